"""Plots of gpu_check.py's results."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(result: dict[str, Any], folder: Path) -> bool:
    """Writes two PNGs a model: speed-up over length, and where the time goes. False without matplotlib."""
    try:
        import matplotlib as mpl
    except ImportError:
        return False
    mpl.use("agg")
    from matplotlib import pyplot

    for model, runs in result["prefill"].items():
        if not runs:
            continue
        name = model.lower().replace(".", "-")
        for draw, what in ((_speedups, "speedup"), (_phases, "phases")):
            figure, axes = pyplot.subplots(figsize=(9, 5), layout="constrained")
            draw(axes, runs)
            axes.set_title(f"{model}, random weights, {_device(result)}")
            figure.savefig(folder / f"{name}-{what}.png", dpi=120)
            pyplot.close(figure)
    return True


def _speedups(axes: Any, runs: list[dict[str, Any]]) -> None:
    """ProphetKV over full prefill, with the bound that its arithmetic sets."""
    own = [run for run in runs if run["name"] == "prophetkv"]
    for color, ratio in enumerate(sorted({run["ratio_recomputed"] for run in own})):
        for memory, style in (("device", "-"), ("pinned", "--")):
            line = [run for run in own if run["ratio_recomputed"] == ratio and run["memory"] == memory]
            if line:
                tokens = [run["tokens"] for run in line]
                label = f"ratio {ratio}, KV in {memory} memory"
                axes.plot(tokens, [run["speedup"] for run in line], style, marker="o", color=f"C{color}", label=label)
                axes.plot(tokens, [run["flops_bound"] for run in line], ":", color=f"C{color}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("context tokens")
    axes.set_ylabel("full prefill / ProphetKV (dotted: by arithmetic alone)")
    axes.legend()


def _phases(axes: Any, runs: list[dict[str, Any]]) -> None:
    """Every contestant at the longest prompt, by phase."""
    longest = max(run["tokens"] for run in runs)
    shown = [run for run in runs if run["tokens"] == longest and "phases_ms" in run]
    labels = [
        " ".join(str(part) for part in (run["name"], run["ratio_recomputed"], run["memory"]) if part is not None)
        for run in shown
    ]
    left = [0.0] * len(shown)
    for phase in ("load", "assemble", "stage1", "select", "stage2"):
        width = [run["phases_ms"].get(phase, 0.0) for run in shown]
        axes.barh(labels, width, left=left, label=phase)
        left = [start + length for start, length in zip(left, width, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel(f"ms at {longest} context tokens")
    axes.legend()


def _device(result: dict[str, Any]) -> str:
    device = result["device"]
    return str(device["name"]) if isinstance(device, dict) else "CPU"
