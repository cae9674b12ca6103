"""`prophetkv eval` as users run it, on a tiny model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.quality.cli import app
from benchmarks.quality.results import load
from tests.benchmarks.test_runner import write_longbench, write_musique
from tests.benchmarks.tiny_prompts import one_thread
from tests.conftest import ROOT

SMALL = ("--lengths", "620", "--tasks", "vt", "--samples", "1", "--chunk-tokens", "128")


@pytest.fixture(autouse=True)
def _tiny_work(monkeypatch: pytest.MonkeyPatch, tiny_folder: Path) -> Iterator[None]:
    monkeypatch.setenv("PROPHETKV_MODEL", str(tiny_folder))
    monkeypatch.setenv("PROPHETKV_DTYPE", "float32")
    monkeypatch.setenv("PROPHETKV_DEVICE", "cpu")
    with one_thread():
        yield


def prophetkv(*arguments: object) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return found.exit_code, found.output


def test_a_run_its_continuation_report_and_comparison(tmp_path: Path) -> None:
    one, other, third = (tmp_path / f"{name}.jsonl" for name in ("one", "other", "third"))
    status, text = prophetkv("ruler", "--out", one, *SMALL, "--strategies", "naive,prophetkv:ratio=0.1,smooth=7")
    assert status == 0, text
    assert "## ruler-620: points of 100" in text
    assert "| prophetkv ratio=0.1 smooth=7 | " in text
    assert {record.method for record in load(one)[1]} == {
        "full",
        "none",
        "random ratio=0.2",
        "naive",
        "prophetkv ratio=0.1 smooth=7",
    }
    status, text = prophetkv("ruler", "--out", one, *SMALL, "--strategies", "epic", "--ratios", "0.3")
    assert status == 0, text
    assert len(load(one)[1]) == 7
    status, text = prophetkv("ruler", "--out", one, *SMALL, "--seed", "1")
    assert status == 1
    assert "seed was 0 and is now 1" in text
    status, text = prophetkv("ruler", "--out", other, *SMALL, "--strategies", "prophetkv:smooth=3")
    assert status == 0, text
    status, text = prophetkv("compare", one, other)
    assert status == 0
    assert "| ruler-620 | vt | full | full | score | 1 | " in text
    assert "- of A not paired: naive, random ratio=0.3, epic ratio=0.3\n" in text
    assert "of B" not in text
    assert "| prophetkv ratio=0.1 smooth=7 | prophetkv ratio=0.2 smooth=3 | nll |" in text
    assert prophetkv("report", one) == (0, prophetkv("report", one)[1])
    assert "## Gap to full prefill: kl" in prophetkv("report", one)[1]
    status, text = prophetkv("ruler", "--out", third, *SMALL[:-1], 256, "--strategies", "naive")
    assert status == 0, text
    assert "- chunk_tokens is 128 in A and 256 in B\n" in prophetkv("compare", one, third)[1]


def test_longbench_and_musique(tmp_path: Path) -> None:
    status, text = prophetkv(
        *("longbench", write_longbench(tmp_path / "data"), "--out", tmp_path / "l.jsonl"),
        *("--samples", 1, "--limit", 300, "--strategies", "naive", "--chunk-tokens", 64),
    )
    assert status == 0, text
    assert "| method | hotpotqa | mean | PGR |" in text
    path = write_musique(tmp_path / "musique.json")
    status, text = prophetkv("musique", path, "--out", tmp_path / "m.jsonl", "--samples", 1, "--strategies", "naive")
    assert status == 0, text
    assert "| method | musique | mean |" in text
    assert {record.suite for record in load(tmp_path / "m.jsonl")[1]} == {"musique"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ruler", "--lengths", "4k"), "lengths: '4k' is not a list of whole numbers"),
        (("ruler", "--ratios", "few"), "ratios: 'few' is not a list of numbers"),
        (("ruler", "--lengths", "99999"), "beyond the model's window"),
        (("ruler", "--samples", "0"), "at least one is needed"),
        (("ruler", "--strategies", "profet"), "unknown strategy 'profet'"),
        (("ruler", "--haystack", "nowhere"), "no haystack at nowhere"),
        (("ruler", "--model", "nowhere"), "'nowhere' is neither a folder nor"),
        (("longbench", "nowhere"), "no LongBench file"),
        (("musique", "nowhere"), "no file at nowhere"),
        (("paper", "--minutes", "1", "--lengths", "99999"), "beyond the model's window"),
        (("report", "nowhere"), "no results at nowhere"),
        (("compare", "nowhere", "nowhere"), "no results at nowhere"),
    ],
)
def test_bad_input_is_said_in_a_line(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    out = () if arguments[0] in ("report", "compare") else ("--out", tmp_path / "x")
    status, text = prophetkv(*arguments, *out)
    assert status == 1
    assert message in text
    assert len(text.strip().splitlines()) == 1
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("limit", "status", "message"), [(0, 2, "'--limit'"), (99999, 1, "beyond the model's window")])
def test_a_limit_that_cannot_be_is_refused(tmp_path: Path, limit: int, status: int, message: str) -> None:
    found = prophetkv("longbench", write_longbench(tmp_path), "--out", tmp_path / "x", "--limit", limit)
    assert found[0] == status
    assert message in found[1]
    assert not (tmp_path / "x").exists()


def test_an_interrupted_run_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("benchmarks.quality.evaluator.Evaluator.records", interrupt)
    status, text = prophetkv("ruler", "--out", tmp_path / "x.jsonl", *SMALL)
    assert status == 130
    assert "interrupted" in text


def test_the_command_is_part_of_prophetkv_and_costs_the_others_nothing() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "service.cli", "eval", "--help"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    for name in ("ruler", "longbench", "musique", "paper", "compare", "report"):
        assert name in run.stdout
    imported = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "numpy", "matplotlib"}
