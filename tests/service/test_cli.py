"""The command as users run it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.forward import Steps
from engine.model import Model
from engine.prefill import Prefill
from service.doctor import _identities
from service.version import __version__
from tests.conftest import MODEL_CACHE, ROOT, RedisServer
from tests.service.conftest import ServerProcess
from tests.tiny import FAMILIES, tiny_model


def prophetkv(*arguments: str, **settings: object) -> tuple[int, str]:
    told = {f"PROPHETKV_{name.upper()}": str(value) for name, value in settings.items()}
    run = subprocess.run(
        [sys.executable, "-m", "service.cli", *arguments],
        env=os.environ | told | {"COLUMNS": "200"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return run.returncode, run.stdout + run.stderr


def test_version_and_help() -> None:
    assert prophetkv("--version") == (0, f"{__version__}\n")
    status, text = prophetkv("--help")
    assert status == 0
    for command in ("serve", "ingest", "ask", "models", "doctor", "plan", "config", "store"):
        assert command in text


def test_config_prints_values_origins_and_no_secrets() -> None:
    status, text = prophetkv("config", top_k=9, database_url="postgresql://me:swordfish@db/x")
    assert status == 0
    assert "PROPHETKV_TOP_K=9  # environment (PROPHETKV_TOP_K): " in text
    assert "PROPHETKV_RATIO=0.2  # default: " in text
    assert "postgresql://me:***@db/x" in text
    assert "swordfish" not in text
    status, text = prophetkv("config", ratoi=1)
    assert (status, text.strip()) == (1, "unknown setting PROPHETKV_RATOI; `prophetkv config` lists all that exist")


def test_models_lists_the_manifest() -> None:
    status, text = prophetkv("models", model_dir=MODEL_CACHE)
    assert status == 0
    assert "smollm2-135m-instruct" in text
    assert "Apache-2.0" in text


def test_ingest_and_ask(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "ferry.md").write_text("# Ferry\n\nThe ferry leaves at 07:15.\n")
    (tmp_path / "docs" / "broken.pdf").write_text("no pdf")
    status, text = prophetkv("ingest", str(tmp_path / "docs"), "--collection", "cli", "--url", server.url)
    assert status == 1
    assert "ferry.md: created" in text
    assert "broken.pdf: 415" in text
    status, text = prophetkv("ingest", str(tmp_path / "docs" / "ferry.md"), "--collection", "cli", "--url", server.url)
    assert (status, "ferry.md: unchanged" in text) == (0, True)
    status, text = prophetkv("ask", "When?", "--collection", "cli", "--strategy", "full", "--url", server.url)
    assert status == 0
    assert "[1] ferry.md, 'Ferry', characters 0 to 36" in text
    status, text = prophetkv("ask", "When?", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert "no answer from http://127.0.0.1:9" in text


def test_doctor_finds_a_good_model_good(smollm: Path, tmp_path: Path, redis_server: RedisServer) -> None:
    settings = {"data_dir": tmp_path, "dtype": "float32", "redis_url": redis_server.url, "redis_timeout_ms": 20_000}
    status, text = prophetkv("doctor", model=smollm, **settings)
    assert status == 0, text
    for line in ("ratio 1 is the full prefill", "ratio 0 is naive reuse", "rotation", "codec round trip"):
        assert f"ok   {line}" in text
    for tier in ("memory", "disk", "redis"):
        assert f"{tier} tier: reads" in text
    assert "does reuse pay on this machine?: yes, from memory" in text
    assert "FAIL" not in text


def test_the_identities_hold_in_bf16_too(tiny_folder: Path) -> None:
    with torch.inference_mode():
        findings = list(_identities(Model.load(tiny_folder, "cpu", "bfloat16")))
    assert [finding.what for finding in findings if not finding.passed] == []


def test_doctor_says_what_is_wrong_with_a_configuration(tmp_path: Path) -> None:
    folder = tmp_path / "a[" / "b]"  # reads like markup
    folder.mkdir(parents=True)
    rope = {"rope_type": "yarn", "rope_theta": 1e4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rope_parameters": rope}))
    status, text = prophetkv("doctor", model=folder, data_dir=tmp_path / "data")
    assert status == 1
    assert "describes no model that can be loaded: KeyError: " in text
    assert "{'factor'}" in text
    assert "Traceback" not in text


def _failed(model: Model) -> list[str]:
    with torch.inference_mode():
        return [finding.what for finding in _identities(model) if not finding.passed]


@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_doctor_finds_a_wrong_frequency_in_every_kind_of_layer(kind: str) -> None:
    model = tiny_model(FAMILIES["gemma3"])
    assert _failed(model) == []
    model._inv_freq[kind] = model._inv_freq[kind].clone()
    model._inv_freq[kind][2] *= 1.05
    assert _failed(model) == [f"rotation of {kind}"]


def test_doctor_finds_a_slot_that_stays_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    recompute = Prefill.recompute

    def forgetful(prefill: Prefill, selected: Tensor) -> Steps:
        return recompute(prefill, selected[:-1])

    monkeypatch.setattr(Prefill, "recompute", forgetful)
    assert "no slot stays stale" in _failed(tiny_model(FAMILIES["llama"]))
