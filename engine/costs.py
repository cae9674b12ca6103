"""Running estimates of what things cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

PACE = 0.2  # of a measurement's news that is believed
_ROUNDS, _LEARNING_PACE = 200, 0.5
_CREDIBLE = 1.0  # a measurement that is off by more than e times counts as if it were off by e times


class LinearCost:
    """Seconds as a sum of amounts (bytes, operations, calls) times coefficients, which follow what is observed.

    After each observation the coefficients are multiplied so that the prediction moves towards it, each by its share
    in the prediction: an exponentially weighted average along the amounts seen. What was not seen stays as it is, and
    no coefficient changes its sign.
    """

    def __init__(self, coefficients: Sequence[float]) -> None:
        """`coefficients`: a first guess, in seconds a unit, all positive."""
        self.coefficients = tuple(coefficients)

    def predict(self, amounts: Sequence[float]) -> float:
        """Seconds."""
        return sum(cost * amount for cost, amount in zip(self.coefficients, amounts, strict=True))

    def observe(self, amounts: Sequence[float], seconds: float, pace: float = PACE) -> None:
        """These amounts took `seconds`. Without amounts, or in no time, it says nothing."""
        predicted = self.predict(amounts)
        if predicted <= 0.0 or seconds <= 0.0:
            return
        news = max(-_CREDIBLE, min(_CREDIBLE, math.log(seconds / predicted)))
        shares = [cost * amount / predicted for cost, amount in zip(self.coefficients, amounts, strict=True)]
        step = pace * news / sum(share * share for share in shares)
        self.coefficients = tuple(
            cost * math.exp(step * share) for cost, share in zip(self.coefficients, shares, strict=True)
        )

    def learn(self, samples: Iterable[tuple[Sequence[float], float]]) -> None:
        """Takes in measurements of different amounts together, until the coefficients explain them all.

        What none of them contains keeps its relation to the rest.
        """
        known = [(amounts, seconds) for amounts, seconds in samples if seconds > 0.0 < self.predict(amounts)]
        if not known:
            return
        scale = median(seconds / self.predict(amounts) for amounts, seconds in known)
        self.coefficients = tuple(scale * cost for cost in self.coefficients)
        for _ in range(_ROUNDS):
            for amounts, seconds in known:
                self.observe(amounts, seconds, _LEARNING_PACE)
