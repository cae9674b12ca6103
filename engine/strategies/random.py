"""Random selection: the control that every criterion must beat."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import SelectiveStrategy


class Random(SelectiveStrategy):
    """Context tokens drawn without replacement, all equally likely."""

    name: ClassVar[str] = "random"

    seed: int = Field(0, ge=0, lt=1 << 63, description="the same draw for the same seed and number of tokens")

    def select(self, prefill: Prefill, budget: int) -> Steps:
        """See SelectiveStrategy.select."""
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(prefill.usage.context_tokens, generator=generator)
        yield None
        return order[:budget].sort().values
