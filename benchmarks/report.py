"""What every report states: machine, versions, date and load; and how paired samples are summed up."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from service.version import __version__


def conditions() -> dict[str, Any]:
    """Machine, versions, date and load at this moment."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "prophetkv": __version__,
    }


def paired_ratio(slow: Sequence[float], fast: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Median of slow/fast over interleaved pairs with a 95 % bootstrap interval, and the medians themselves."""
    ratios = np.asarray(slow) / np.asarray(fast)
    draws = np.random.default_rng(seed).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), [2.5, 97.5])
    return {
        "pairs": len(ratios),
        "ratio": round(float(np.median(ratios)), 3),
        "interval": [round(float(low), 3), round(float(high), 3)],
        "slow_s": round(float(np.median(slow)), 3),
        "fast_s": round(float(np.median(fast)), 3),
    }


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result as JSON and prints it."""
    text = json.dumps(result, indent=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(text)


def publish(result: dict[str, Any], out: Path, table: str, plot: Callable[[], None]) -> None:
    """The result as JSON at `out`, its table as Markdown beside it, and plots there when matplotlib is installed."""
    write(out, result)
    out.with_suffix(".md").write_text(table)
    print(table)
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        print("no plots: install the extra `bench`")
        return
    plot()


def cpu_name() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
