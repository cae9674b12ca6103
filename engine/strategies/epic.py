"""EPIC (arXiv 2410.15332, LegoLink): the first tokens of each chunk, where isolation leaves a false attention sink."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import Strategy


class Epic(Strategy):
    """Recomputes the first `k` tokens of every chunk, or round(ratio * length) of them.

    The public code counts a chunk's own beginning-of-text token as one of the k; chunks here have none, being encoded
    behind the system prefix. As there, the first chunk is linked too: only the prefix counts as exact.
    """

    name: ClassVar[str] = "epic"

    k: int | None = Field(None, ge=0, le=1 << 20, description="tokens per chunk; instead of `ratio`")

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill. Needs no scores, so the budget is met up to rounding in each chunk."""
        yield from prefill.assemble(lazily=True)
        selected, start = [torch.arange(0)], 0
        for length in prefill.layout.chunk_lengths:
            first = int(self.ratio * length + 0.5) if self.k is None else min(self.k, length)
            selected.append(torch.arange(start, start + first))
            start += length
        chosen = torch.cat(selected)
        if self.k is not None:
            prefill.usage.ratio = len(chosen) / max(1, prefill.usage.context_tokens)
        return (yield from prefill.recompute(chosen))
