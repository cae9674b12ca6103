"""`prophetkv bench store`, small: that it runs and what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.cli import app


def test_a_small_run_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROPHETKV_DATA_DIR", str(tmp_path / "data"))
    out = tmp_path / "store.json"
    options = "store --megabytes 0.2,5 --rounds 2 --codecs raw,int8 --chunks 1 --out"
    result = CliRunner().invoke(app, [*options.split(), str(out)])
    assert result.exit_code == 0, result.output
    told = json.loads(out.read_text())
    assert [row["codec"] for row in told["memory"]] == ["raw", "raw", "int8", "int8"]
    assert [(row["transport"], set(row["get"])) for row in told["redis"]] == [
        (transport, {"raw", "ours", "redis-py"}) for _ in range(2) for transport in ("unix", "tcp")
    ]
    assert all(set(row["set"]) == {"raw", "ours", "redis-py"} for row in told["redis"])
    assert all(row["get"]["ours"]["gb_per_s"] > 0 for row in told["disk"] + told["redis"])
    assert 0 < told["concurrent"]["in_flight_peak"] <= told["concurrent"]["window"]
    table = out.with_suffix(".md").read_text()
    assert "| redis, unix | " in table
    assert "64 loads at once" in table
    assert out.with_suffix(".png").exists()
    assert list((tmp_path / "data").iterdir()) == []
