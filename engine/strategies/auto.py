"""The default: ProphetKV where that is predicted to be faster, else a full prefill, so that it is never slower."""

from __future__ import annotations

from typing import ClassVar

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import recompute_budget
from engine.strategies.full import Full
from engine.strategies.prophetkv import ProphetKV


class Auto(ProphetKV):
    """Runs as `prophetkv` or as `full`, whichever the controller predicts to give the first token sooner.

    A stored chunk that loads more slowly than it is computed is computed. The options are those of `prophetkv`.
    """

    name: ClassVar[str] = "auto"
    chooses: ClassVar[bool] = True

    def prefill(self, prefill: Prefill) -> Steps:
        """See Strategy.prefill. `usage.decision` tells what was expected, `usage.strategy` what ran."""
        chunks = [part.chunk for part in prefill.request.parts]
        with prefill.timed("load"):
            decision, compute = prefill.controller.decide(
                prefill.layout,
                chunks,
                prefill.locate(),
                recompute_budget(self.ratio, prefill.usage.context_tokens),
                self._layers(prefill.model.layout.layers),
                len(self._rows(prefill)),
            )
        prefill.usage.decision = decision
        prefill.usage.strategy = decision.strategy
        if decision.strategy == Full.name:
            return (yield from Full().prefill(prefill))
        prefill.compute = compute
        return (yield from super().prefill(prefill))
