"""How the context's KV is had before the first token. A new strategy is one file here and one line in the table."""

from __future__ import annotations

from typing import Protocol

from engine.base import StrategySpec
from engine.prefill import Prefill, Steps
from engine.strategies.full import full
from engine.strategies.naive import naive
from engine.strategies.prophetkv import prophetkv
from errors import InvalidInput, UnknownStrategy


class Strategy(Protocol):
    """Fills the slots of all prompt positions and returns the last row's logits, fp32 [vocab]."""

    def __call__(self, prefill: Prefill) -> Steps:
        """Yields wherever the engine may take over or abort."""


STRATEGIES: dict[str, Strategy] = {
    "full": full,
    "naive": naive,
    "prophetkv": prophetkv,
}


def check_strategy(spec: StrategySpec) -> None:
    """Raises UnknownStrategy, or InvalidInput for a ratio outside 0..1."""
    if spec.name not in STRATEGIES:
        raise UnknownStrategy(f"unknown strategy {spec.name!r}; there are {', '.join(STRATEGIES)}")
    if not 0.0 <= spec.ratio <= 1.0:
        raise InvalidInput(f"ratio is {spec.ratio}; it must lie between 0 and 1", field="strategy.ratio")
