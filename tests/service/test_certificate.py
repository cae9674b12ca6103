"""A codec is used only where it was measured to be good enough."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from cache_store.base import ChunkKV
from engine.model import Model
from errors import ConfigError
from service import certificate
from service.certificate import Certificate, certify, require_certified
from tests.service.conftest import MakeServer


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    return Model.load(tiny_folder, "cpu", "float32")


def test_what_is_measured_tells_codecs_apart(model: Model) -> None:
    raw, int8, int4 = certify(model, ["raw", "int8", "int4"])
    assert (raw.kl, raw.overlap) == (0.0, 1.0)
    assert 0 < int8.kl < int4.kl
    assert int4.overlap <= int8.overlap <= 1


@pytest.mark.parametrize(
    ("kl", "overlap", "passed"), [(0.00008, 0.995, True), (0.0018, 0.985, True), (0.0049, 0.956, False)]
)
def test_what_is_refused_is_what_loses_points_on_ruler(kl: float, overlap: float, passed: bool) -> None:
    """int8, int4 and fp8 on Qwen2.5-Coder-0.5B, see docs/results/codecs.md: fp8 loses 3.3 points, clearly."""
    assert Certificate("any", kl, overlap).passed is passed


def test_a_codec_is_measured_once_for_a_model(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def measured(model: Model, codecs: list[str]) -> list[Certificate]:
        made.extend(codecs)
        return [Certificate(codec, 0.001 if codec == "int8" else 0.3, 0.95) for codec in codecs]

    monkeypatch.setattr(certificate, "certify", measured)
    for _ in range(2):
        require_certified(model, "raw", tmp_path)
        require_certified(model, "int8", tmp_path)
        with pytest.raises(
            ConfigError, match=r"KV_CODEC=int4 is not good enough for this model: logits differ by 0.3 nats"
        ):
            require_certified(model, "int4", tmp_path)
    assert made == ["int8", "int4"]
    monkeypatch.setattr(model, "fingerprint", "another model")
    require_certified(model, "int8", tmp_path)
    (tmp_path / "certificates.json").write_text("{broken")
    require_certified(model, "int8", tmp_path)
    assert made == ["int8", "int4", "int8", "int8"]
    assert list(json.loads((tmp_path / "certificates.json").read_text())) == ["another model int8 1"]


@pytest.mark.parametrize(
    "entry", [7, None, [], {}, {"kl": 0.001}, {"kl": None, "overlap": 1.0}, {"kl": "little", "overlap": 1.0}]
)
def test_a_malformed_entry_is_measured_again(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: object
) -> None:
    monkeypatch.setattr(certificate, "certify", lambda model, codecs: [Certificate(codecs[0], 0.001, 0.95)])
    require_certified(model, "int8", tmp_path)
    path = tmp_path / "certificates.json"
    measured = path.read_text()
    path.write_text(json.dumps(dict.fromkeys(json.loads(measured), entry)))
    require_certified(model, "int8", tmp_path)
    assert path.read_text() == measured


def test_a_codec_behind_which_logits_are_no_numbers_is_refused(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in the last layer's V: Stage I, which needs none of it, still chooses the same tokens."""

    def recoded(kv: ChunkKV, codec: str) -> ChunkKV:
        layers = [kv.layer(index).clone() for index in range(kv.layout.layers)]
        layers[-1][1] = float("nan")
        return ChunkKV.pack(layers)

    monkeypatch.setattr(ChunkKV, "recoded", recoded)
    (found,) = certify(model, ["int8"])
    assert (math.isnan(found.kl), found.overlap, found.passed) == (True, 1.0, False)
    for _ in range(2):  # measured and remembered
        with pytest.raises(ConfigError, match=r"KV_CODEC=int8 is not good enough for this model: .* nan nats"):
            require_certified(model, "int8", tmp_path)


def test_few_tokens_in_common_are_refused_too(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "certify", lambda model, codecs: [Certificate(codecs[0], 0.0, 0.5)])
    with pytest.raises(ConfigError, match=r"agrees on 50.0%"):
        require_certified(model, "fp8", tmp_path)


def test_a_server_with_int8_answers_the_same_from_everywhere(make_server: MakeServer, tmp_path: Path) -> None:
    """Computed, from memory and from disk: the same answer, from entries of about a quarter of the bytes."""
    server = make_server(kv_codec="int8", precompute=False)
    context = " ".join(f"word{number}" for number in range(200))
    body = {"question": "which word?", "contexts": [context], "max_tokens": 12}

    def ask() -> tuple[str, dict[str, int], int]:
        with server.http() as http:
            answer = http.post("/query", json=body).json()
        used = answer["usage"]
        return answer["answer"], {tier: n for tier, n in used["chunk_hits"].items() if n}, used["bytes_loaded"]

    server.start()
    computed, memory = ask(), ask()
    server.stop()
    server.start()
    disk = ask()
    assert computed[0] == memory[0] == disk[0]
    assert [list(found[1]) for found in (computed, memory, disk)] == [["computed"], ["memory"], ["disk"]]
    assert 0 < disk[2] == memory[2]
    files = list((tmp_path / "data" / "kv").rglob("*.kv"))
    assert all(path.read_bytes()[10] == 1 for path in files)
    server.stop()


def test_a_server_refuses_a_codec_that_loses_too_much(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certificate, "MAX_KL", 0.0)
    server = make_server(kv_codec="int4")
    server.launch()
    server.join()
    assert isinstance(server.runtime.failure, ConfigError)
    assert "KV_CODEC=int4" in str(server.runtime.failure)
