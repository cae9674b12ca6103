"""Plots of `prophetkv bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display
from matplotlib import pyplot as plt

from benchmarks.balance import FIXED, SHARES
from benchmarks.ttft import PHASES


def plot_phases(result: dict[str, Any], path: Path) -> None:
    """Stacked bars: where the time to first token of each method went, at the longest context."""
    length = result["lengths"][-1]
    names = list(length["methods"])
    figure, axes = plt.subplots(figsize=(9, 0.5 * len(names) + 1.5), layout="constrained")
    left = [0.0] * len(names)
    for phase in PHASES:
        seconds = [length["methods"][name]["phases_ms"][phase] / 1000 for name in names]
        axes.barh(names, seconds, left=left, label=phase.replace("_", " "))
        left = [a + b for a, b in zip(left, seconds, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("seconds to the first token")
    axes.set_title(f"{result['model']}, {length['context_tokens']} context tokens")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_speed_up(result: dict[str, Any], path: Path) -> None:
    """Speed-up over length for each method, and for ProphetKV the bound by rows, dashed."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    lengths = [length["context_tokens"] for length in result["lengths"]]
    for name, method in result["lengths"][0]["methods"].items():
        if name == "full":
            continue
        found = [length["methods"][name] for length in result["lengths"]]
        [line] = axes.plot(lengths, [method["speed_up"]["ratio"] for method in found], marker="o", label=name)
        if method["strategy"] == "prophetkv":
            bound = [method["bounds"]["rows"] for method in found]
            axes.plot(lengths, bound, linestyle="--", color=line.get_color(), label=f"{name}: bound by rows")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xlabel("context tokens")
    axes.set_ylabel("TTFT of full / TTFT of the method")
    axes.set_title(f"{result['model']} in {result['dtype']}, chunk KV in {result['tier']}")
    if axes.lines:
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_balance(result: dict[str, Any], path: Path) -> None:
    """Time to first token over the emulated medium's rate: each fixed choice, and `auto` on top of them."""
    shares = [stored for stored in SHARES if any(cell["stored"] == stored for cell in result["cells"])]
    figure, panels = plt.subplots(1, len(shares), figsize=(5 * len(shares), 4.5), sharey=True, layout="constrained")
    fastest = 4 * max((cell["rate_mb_s"] or 1.0) for cell in result["cells"])
    for axes, stored in zip(np.atleast_1d(panels), shares, strict=True):
        cells = [cell for cell in result["cells"] if cell["stored"] == stored]
        for name, style in (*((name, "--") for name in FIXED), ("auto", "-")):
            points = [(c["rate_mb_s"] or fastest, c["ttft_s"][name]) for c in cells if name in c["ttft_s"]]
            axes.plot(*zip(*points, strict=True), style, marker="o", label=name) if points else None
        axes.axvline(result["break_even_mb_s"], color="grey", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"MB/s, emulated; {fastest:g} stands for memory")
        axes.set_title(f"{stored} of the chunks stored")
        axes.legend()
    np.atleast_1d(panels)[0].set_ylabel("seconds to the first token")
    figure.suptitle(f"{result['model']}, {result['context_tokens']} context tokens; grey: a chunk's break-even")
    figure.savefig(path, dpi=120)
    plt.close(figure)
