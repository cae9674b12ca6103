"""What a selection would be with exact knowledge: the ideal of the paper, each of its factors, the rivals' criteria.

Costs a full prefill before the selection, so it is for ablations (Fig. 6 and Fig. 9) and never served.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from cache_store.base import Pause
from engine.forward import ForwardPass, Steps
from engine.prefill import Prefill
from engine.strategies.base import SelectiveStrategy, top_tokens

Factor = Literal["ideal", "delta_phi", "phi", "v", "delta_v", "cacheblend", "kvshare"]


class Oracle(SelectiveStrategy):
    """Selects by `factor`, averaged over all layers.

    With phi, V from the full prefill and phi', V' from the reused KV, phi being the column sums of the suffix rows'
    attention: `ideal` |phi V - phi' V'| (Eq. 5), and of Eq. 6 `delta_phi` |phi - phi'|, `phi` phi', `v` |V'|, `delta_v`
    |V - V'|. `cacheblend` is the squared L2 norm of V - V', `kvshare` the L1 norm times the column sums of all rows,
    at every layer instead of one.
    """

    name: ClassVar[str] = "oracle"
    served: ClassVar[bool] = False

    factor: Factor = Field("ideal", description="what a token is selected by")

    def select(self, prefill: Prefill, budget: int) -> Steps:
        """See SelectiveStrategy.select."""
        with prefill.timed("stage1"):
            scores = yield from importance(prefill, self.factor)
        return top_tokens(scores, budget)


def importance(prefill: Prefill, factor: Factor) -> Steps:
    """fp32 [context]: mean over layers of `factor`. The slots are assembled; the context's stay as they are."""
    return (yield from importances(prefill, (factor,)))[factor]


def importances(prefill: Prefill, factors: Sequence[Factor]) -> Generator[Pause, None, dict[Factor, Tensor]]:
    """`importance` of several factors, of one full prefill; `kvshare`, which other rows score, takes one of its own."""
    found: dict[Factor, Tensor] = {}
    for apart in (False, True):
        together = [factor for factor in factors if (factor == "kvshare") is apart]
        if together:
            found |= yield from _means(prefill, together)
    return found


def _means(prefill: Prefill, factors: Sequence[Factor]) -> Generator[Pause, None, dict[Factor, Tensor]]:
    layout, layers = prefill.layout, prefill.model.layout.layers
    everything = torch.arange(len(layout))
    scoring = everything if "kvshare" in factors else layout.suffix
    exact = prefill.start(everything, prefill.model.new_slots(len(layout)))
    reused = prefill.start(layout.fresh)
    totals = {factor: torch.zeros(len(layout.context), device=prefill.model.device) for factor in factors}
    for layer in range(layers):
        phi = yield from _received(prefill, exact, layer, scoring)
        phi_reused = yield from _received(prefill, reused, layer, layout.suffix)
        v, v_reused = (prefill.context_kv(layer, 1, slots=run.slots).float() for run in (exact, reused))
        for factor, total in totals.items():
            total += _factor(factor, phi, phi_reused, v, v_reused)
    return {factor: total / layers for factor, total in totals.items()}


def _received(prefill: Prefill, run: ForwardPass, layer: int, scoring: Tensor) -> Steps:
    """Takes the pass through `layer`: the attention that its context keys receive, fp32 [kv_heads, context]."""
    sums = torch.zeros(prefill.model.layout.kv_heads, len(prefill.layout), device=prefill.model.device)
    scores = prefill.scores_of(scoring, run.rows.host_positions, sums)
    if layer + 1 < prefill.model.layout.layers:
        yield from run.run(layer + 1, scores)
    else:
        run.score(scores)
    return prefill.of_context(sums)


def _factor(factor: Factor, phi: Tensor, phi_reused: Tensor, v: Tensor, v_reused: Tensor) -> Tensor:
    """fp32 [context] of one layer; phi [kv_heads, context], v [kv_heads, context, head_dim]."""
    match factor:
        case "ideal":
            return (phi[..., None] * v - phi_reused[..., None] * v_reused).pow(2).sum((0, 2)).sqrt()
        case "delta_phi":
            return (phi - phi_reused).sum(0).abs()
        case "phi":
            return phi_reused.sum(0)
        case "v":
            return v_reused.pow(2).sum((0, 2)).sqrt()
        case "delta_v":
            return (v - v_reused).pow(2).sum((0, 2)).sqrt()
        case "cacheblend":
            return (v - v_reused).pow(2).sum((0, 2))
        case "kvshare":
            return phi.sum(0) * (v - v_reused).abs().sum((0, 2))
