"""What a strategy is, and what those share that recompute a selection of the context."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from engine.forward import Steps
from engine.prefill import Prefill
from errors import NumericalFault


class Strategy(BaseModel, ABC):
    """How the context's KV is had before the first token. Fields are the options that a request may set."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: ClassVar[str]
    served: ClassVar[bool] = True  # False: for experiments, no request may name it
    reuses: ClassVar[bool] = True  # False: needs no stored KV, so any model that runs will do
    takes_ratio: ClassVar[bool] = True  # False: what is recomputed does not depend on `ratio`
    chooses: ClassVar[bool] = False  # True: uses stored KV only where that pays

    ratio: float = Field(0.2, ge=0.0, le=1.0, description="share of context tokens to recompute")

    @abstractmethod
    def prefill(self, prefill: Prefill) -> Steps:
        """Fills the slots of all prompt positions and returns the last row's logits, fp32 [vocab].

        Yields wherever the engine may take over or abort.
        """

    def check(self, layers: int) -> None:
        """Raises ValueError when an option does not fit a model of `layers` layers."""


class SelectiveStrategy(Strategy):
    """Assembles stored KV, chooses context tokens, recomputes them through all layers together with the question."""

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill."""
        yield from prefill.assemble(lazily=True)
        count = prefill.usage.context_tokens
        budget = recompute_budget(self.ratio, count)
        if 0 < budget < count:
            selected = yield from self.select(prefill, budget)
        else:
            selected = torch.arange(budget)  # nothing to choose: scoring would only cost time
        return (yield from prefill.recompute(selected))

    @abstractmethod
    def select(self, prefill: Prefill, budget: int) -> Steps:
        """Indices of the context tokens to recompute, int64, ascending. The slots are assembled, those of
        layers that no pass of `prefill.start` has reached excepted."""


def recompute_budget(ratio: float, context_tokens: int) -> int:
    """floor(ratio * context), at least 1 when the ratio is above 0 and there is context."""
    if ratio <= 0 or not context_tokens:
        return 0
    # 0.29 * 100 is 28.999...: what the caller wrote is a decimal number.
    return max(1, int(ratio * context_tokens + 1e-9))


def top_tokens(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ascending; equal scores go to the lower index.

    Raises NumericalFault for scores that are NaN or infinite: they would select at random and say nothing.
    """
    scores = scores.cpu()
    if not bool(torch.isfinite(scores).all()):
        raise NumericalFault("the scores of context tokens are NaN or infinite")
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[:count].sort().values
