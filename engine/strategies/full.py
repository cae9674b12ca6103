"""Full prefill: no reuse. The baseline that every other strategy is measured against."""

from __future__ import annotations

import torch

from engine.prefill import Prefill, Steps


def full(prefill: Prefill) -> Steps:
    """All prompt rows through all layers, causal SDPA without a mask."""
    with prefill.timed("stage2"):
        prefill.usage.recomputed_tokens = len(prefill.layout.context)
        prefill.usage.ratio = 1.0
        return (yield from prefill.forward(torch.arange(len(prefill.layout))))
