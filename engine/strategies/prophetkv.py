"""ProphetKV (arXiv 2602.02579): the question's attention over imprecise KV tells which context tokens to recompute."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.prefill import Prefill, Steps


def prophetkv(prefill: Prefill) -> Steps:
    """Stage I scores all context tokens, the best `ratio` of them are selected, Stage II recomputes just these."""
    yield from prefill.assemble()
    context = prefill.layout.context
    budget = recompute_budget(prefill.request.strategy.ratio, len(context))
    selected = context[:0]
    if 0 < budget < len(context):
        with prefill.timed("stage1"):
            scores = yield from prefill.probe()
        with prefill.timed("select"):
            selected = context[top_tokens(scores.cpu(), budget)]
    elif budget:
        selected = context  # nothing to choose: scoring would only cost time
    prefill.usage.recomputed_tokens = len(selected)
    with prefill.timed("stage2"):
        rows = torch.cat((selected, prefill.layout.fresh)).sort().values
        return (yield from prefill.forward(rows))


def recompute_budget(ratio: float, context_tokens: int) -> int:
    """floor(ratio * context), at least 1 when the ratio is above 0 and there is context."""
    if ratio <= 0 or not context_tokens:
        return 0
    # 0.29 * 100 is 28.999...: what the caller wrote is a decimal number.
    return max(1, int(ratio * context_tokens + 1e-9))


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ascending; equal scores go to the lower index. NaN never wins."""
    order = torch.sort(scores.nan_to_num(nan=-1.0), descending=True, stable=True).indices
    return order[:count].sort().values
