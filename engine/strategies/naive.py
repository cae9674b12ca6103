"""Naive reuse: chunks as they were encoded, only glue and suffix are computed. The lower bound of quality."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import Strategy


class Naive(Strategy):
    """No context token is recomputed; the question always is, through all layers. `ratio` has no meaning: it is 0."""

    name: ClassVar[str] = "naive"
    takes_ratio: ClassVar[bool] = False

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill."""
        prefill.usage.ratio = 0.0
        yield from prefill.assemble(lazily=True)
        return (yield from prefill.recompute(torch.arange(0)))
