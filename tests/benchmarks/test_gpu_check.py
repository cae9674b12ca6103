"""The GPU measurement runs to its end: at tiny shapes, on a CPU by Triton's interpreter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_check import main
from cache_store.codec import CODECS
from engine.strategies import SERVED


def measure(folder: Path, *arguments: str) -> dict[str, Any]:
    assert main(["--smoke", "--out", str(folder), *arguments]) == 0
    return json.loads((folder / "gpu_check.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_everything_is_measured(tmp_path: Path) -> None:
    result = measure(tmp_path)
    assert {kernel.get("verdict", "good") for kernel in result["kernels"]} == {"good"}
    assert {"column_sums", *(f"place, {codec}" for codec in CODECS), "paged decode"} < {
        kernel["kernel"] for kernel in result["kernels"]
    }
    runs = result["prefill"]["tiny"]
    assert {run["name"] for run in runs} == {"plain", *SERVED} - {"auto"}
    assert {run["tokens"] for run in runs} == {64, 128}
    assert all(run["rounds"] == 1 and run["ms"] > 0 for run in runs)
    assert result["decode"]["tiny"]["128"]["graph_ms"] > 0
    plots = sorted(path.name for path in tmp_path.glob("*.png"))
    if plots:
        assert plots == ["tiny-phases.png", "tiny-speedup.png"]
    else:
        assert any("matplotlib" in what for what in result["left_out"])


def test_what_does_not_fit_the_time_is_named(tmp_path: Path) -> None:
    result = measure(tmp_path, "--seconds", "0.001")
    assert result["kernels"] == []
    assert result["prefill"] == {}
    assert "column_sums, tiny" in result["left_out"]
    assert "tiny" in result["left_out"]
