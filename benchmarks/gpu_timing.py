"""Timing on a GPU, and the time that a whole measurement may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

_GROUPS = 5
_GROUP_MS = 20.0  # long enough for an event's resolution, short enough to fit many kernels into minutes


class Clock:
    """Says what share of the budget is spent, and keeps account of what did not fit."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.left_out: list[str] = []
        self._start = time.perf_counter()

    def spent(self) -> float:
        """Share of the budget, above 1 when overdrawn."""
        return (time.perf_counter() - self._start) / self.seconds

    def leave_out(self, what: str) -> None:
        """Says on the spot and in the report what was not measured."""
        print(f"left out: {what}")
        self.left_out.append(what)


def synchronize(device: torch.device) -> None:
    """Waits for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def median_ms(run: Callable[[int], Any], device: torch.device, replayed: bool = True) -> float:
    """Milliseconds of one call of `run`, which takes the number of the call: the median over groups of calls.

    On a GPU the calls of a group are `replayed` from a CUDA graph: the time is the kernels' and not the launches'.
    """
    run(0)
    if device.type != "cuda":
        start = time.perf_counter()
        run(1)
        return (time.perf_counter() - start) * 1000
    torch.cuda.synchronize()
    once = _elapsed(lambda: run(1))
    calls = max(1, min(100, round(_GROUP_MS / once)))

    def group() -> None:
        for call in range(calls):
            run(call)

    if not replayed:
        return median(_elapsed(group) for _ in range(_GROUPS)) / calls
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group()
    graph.replay()
    return median(_elapsed(graph.replay) for _ in range(_GROUPS)) / calls


def _elapsed(run: Callable[[], Any]) -> float:
    event: Any = torch.cuda.Event  # untyped
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
