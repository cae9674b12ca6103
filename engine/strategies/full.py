"""Full prefill: no reuse. The baseline that every other strategy is measured against."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import Strategy


class Full(Strategy):
    """All prompt rows through all layers, causal SDPA without a mask. `ratio` has no meaning here: it is 1."""

    name: ClassVar[str] = "full"
    takes_ratio: ClassVar[bool] = False
    reuses: ClassVar[bool] = False

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill."""
        prefill.usage.ratio = 1.0
        prefill.note_selected(torch.arange(prefill.usage.context_tokens))
        with prefill.timed("stage2"):
            return (yield from prefill.start(torch.arange(len(prefill.layout))).finish())
