"""Naive reuse: chunks as they were encoded, only glue and suffix are computed. The lower bound of quality."""

from __future__ import annotations

from engine.prefill import Prefill, Steps


def naive(prefill: Prefill) -> Steps:
    """No context token is recomputed; the question always is, through all layers."""
    yield from prefill.assemble()
    prefill.usage.ratio = 0.0
    with prefill.timed("stage2"):
        return (yield from prefill.forward(prefill.layout.fresh))
