"""CacheBlend (EuroSys 2025, arXiv 2405.16444): tokens whose KV deviates most at an early layer."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from engine.forward import ForwardPass, Steps
from engine.prefill import Prefill
from engine.strategies.base import Strategy, recompute_budget, top_tokens

_GRADUAL = (1.5, 1.2, 1.0)  # times the ratio at three layers in turn; the paper gives no numbers, these are ours


class CacheBlend(Strategy):
    """Layers before `check_layer` run for all tokens; there fresh K and V are compared with the stored ones.

    Attention at the check layer and everything behind it runs for the selected tokens only, over fresh K and V at that
    layer and a mixture behind it. The public code lets a selected token see later keys; here causality holds.
    """

    name: ClassVar[str] = "cacheblend"

    criterion: Literal["v_l2", "k_l2", "k_l1"] = Field(
        "v_l2", description="deviation of V (as the public code) or K, by squared L2 or L1 norm"
    )
    check_layer: int = Field(1, ge=1, le=1024, description="the layer, counted from 0, that decides")
    gradual: bool = Field(False, description="narrow the selection at three layers in turn, as the paper proposes")

    def check(self, layers: int) -> None:
        """See Strategy.check."""
        last = layers - (len(_GRADUAL) if self.gradual else 1)
        if self.check_layer > last:
            raise ValueError(f"check_layer must be at most {last} on a model of {layers} layers")

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill."""
        yield from prefill.assemble(lazily=True)
        count = prefill.usage.context_tokens
        budget = recompute_budget(self.ratio, count)
        if budget == 0:
            return (yield from prefill.recompute(torch.arange(0)))
        run = prefill.start(torch.arange(len(prefill.layout)))
        with prefill.timed("stage1"):
            yield from run.run(self.check_layer)
            selected = torch.arange(count)
            for factor in _GRADUAL if self.gradual else (1.0,):
                scores = self._scores(prefill, run, selected)
                keep = top_tokens(scores, min(len(selected), recompute_budget(min(1.0, factor * self.ratio), count)))
                selected = selected[keep]
                prefill.narrow(run, selected)
                if factor != 1.0:
                    yield from run.run(run.layer + 1)
        prefill.note_selected(selected)
        with prefill.timed("stage2"):
            return (yield from run.finish())

    def _scores(self, prefill: Prefill, run: ForwardPass, candidates: Tensor) -> Tensor:
        """fp32 [candidates]: how far their K or V at the pass's layer are from the stored ones."""
        which = 0 if self.criterion.startswith("k") else 1
        stored = prefill.context_kv(run.layer, which, candidates)
        run.write_kv()
        fresh = prefill.context_kv(run.layer, which, candidates)
        return deviation(fresh, stored, norm=1 if self.criterion.endswith("l1") else 2)


def deviation(fresh: Tensor, stored: Tensor, norm: int) -> Tensor:
    """fp32 [tokens]: L1 norm or squared L2 norm of the difference, over heads and dimensions.

    fresh, stored: [kv_heads, tokens, head_dim].
    """
    return (fresh.float() - stored.float()).abs().pow(norm).sum((0, 2))
