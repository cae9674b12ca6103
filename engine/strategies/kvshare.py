"""KVShare (arXiv 2503.16525): deviation of V at an early layer, weighted by the attention that the token receives."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import Strategy, recompute_budget, top_tokens
from engine.strategies.cacheblend import deviation


class KVShare(Strategy):
    """As CacheBlend, by another criterion: the column sum of attention over all rows times the L1 norm of V's change.

    The formula is known from secondary sources; that the check happens at layer 1 is an assumption. What KVShare does
    while decoding is left out, as the comparison is about the prefill.
    """

    name: ClassVar[str] = "kvshare"

    check_layer: int = Field(1, ge=1, le=1024, description="the layer, counted from 0, that decides")

    def check(self, layers: int) -> None:
        """See Strategy.check."""
        if self.check_layer > layers - 1:
            raise ValueError(f"check_layer must be at most {layers - 1} on a model of {layers} layers")

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill."""
        yield from prefill.assemble(lazily=True)
        count = prefill.usage.context_tokens
        budget = recompute_budget(self.ratio, count)
        if budget == 0:
            return (yield from prefill.recompute(torch.arange(0)))
        everything = torch.arange(len(prefill.layout))
        run = prefill.start(everything)
        with prefill.timed("stage1"):
            yield from run.run(self.check_layer)
            stored = prefill.context_kv(run.layer, 1)
            sums = torch.zeros(prefill.model.layout.kv_heads, len(everything), device=prefill.model.device)
            run.score(prefill.scores_of(everything, everything, sums))
            received = prefill.of_context(sums.sum(0))
            scores = received * deviation(prefill.context_kv(run.layer, 1), stored, norm=1)
        with prefill.timed("select"):
            selected = top_tokens(scores, budget)
            prefill.narrow(run, selected)
        prefill.note_selected(selected)
        with prefill.timed("stage2"):
            return (yield from run.finish())
