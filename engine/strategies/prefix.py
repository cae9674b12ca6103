"""Prefix caching, as vLLM and SGLang do: only what stands at the very beginning in the very same order is reused."""

from __future__ import annotations

from typing import ClassVar

import torch

from engine.decode import finite
from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import Strategy


class Prefix(Strategy):
    """Exact: reuses the longest beginning shared with a kept prompt and computes the rest. `ratio` has no meaning."""

    name: ClassVar[str] = "prefix"
    takes_ratio: ClassVar[bool] = False
    reuses: ClassVar[bool] = False

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill. The prompt is kept for those that come after it.

        Raises NumericalFault, and keeps nothing, when the logits are NaN or infinite.
        """
        ids = tuple(prefill.layout.ids.tolist())
        with prefill.timed("assemble"):
            length = prefill.prefixes.copy_longest(ids, prefill.slots)
        context = prefill.layout.context
        prefill.note_selected(torch.arange(int(torch.searchsorted(context, length)), len(context)))
        prefill.usage.ratio = len(prefill.selected) / max(1, len(context))
        with prefill.timed("stage2"):
            logits = finite((yield from prefill.start(torch.arange(length, len(ids))).finish()))
        prefill.prefixes.keep(ids, prefill.slots)
        return logits
