"""How sure a difference is: paired bootstrap intervals, and the share of the possible gain that a method has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# With five differences, all of one sign, a two-sided sign test is at 0.06: no interval makes fewer than six a finding.
# Ties say nothing of the sign, but the bootstrap is narrowed by them: four of twelve that differ would exclude 0.
LEAST_PAIRS = 6
# Where only one sign is asked for, five are enough (0.03).
LEAST_PAIRS_ONE_SIDED = 5
# A span of less between no context and full prefill (5 points of 100) is too little to measure a share of.
LEAST_SPAN = 0.05
_ROUNDING = 1e-9  # a bound that is 0 but for the sum's rounding is 0


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its bootstrap interval, over `pairs` paired prompts. The unit is that of the scores.

    low, high: NaN where nothing is known of them. differing: the pairs that are no ties.
    """

    mean: float
    low: float
    high: float
    pairs: int
    differing: int

    @property
    def is_clear(self) -> bool:
        """The sign of the mean may be claimed: the interval excludes 0, and enough pairs differ."""
        return self.differing >= LEAST_PAIRS and (self.low > _ROUNDING or self.high < -_ROUNDING)

    @property
    def is_above(self) -> bool:
        """The mean may be called positive where nothing else was expected."""
        return self.differing >= LEAST_PAIRS_ONE_SIDED and self.low > _ROUNDING


def mean_interval(
    strata: Sequence[Sequence[float]], *, level: float = 0.95, draws: int = 10_000, seed: int = 0
) -> Interval:
    """The mean over strata (tasks) of the mean in each, with the percentile bootstrap interval.

    Prompts are drawn again within their stratum, so that each task weighs the same however many prompts it has. The
    same seed gives the same interval. A stratum of one says nothing of its spread: then the ends are NaN. Raises
    ValueError when a stratum is empty or there is none.
    """
    if not strata or not all(len(stratum) for stratum in strata):
        raise ValueError("every stratum needs at least one value")
    chance = np.random.default_rng(seed)
    values = [np.asarray(stratum, dtype=np.float64) for stratum in strata]
    mean = np.mean([stratum.mean() for stratum in values])
    drawn = np.mean([_spread(stratum, draws, chance) for stratum in values], axis=0)
    low, high = mean + np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
    differing = sum(int(np.count_nonzero(stratum)) for stratum in values)
    return Interval(float(mean), float(low), float(high), sum(map(len, values)), differing)


def recovered(method: float, floor: float, full: float) -> float | None:
    """PGR, the performance gap recovered: (method - floor) / (full - floor) of mean scores from 0 to 1.

    The floor is the score without context. 1 is as good as full prefill; it may lie outside 0..1. None where full
    prefill is less than `LEAST_SPAN` above the floor: such a task tells nothing about reuse.
    """
    span = full - floor
    return (method - floor) / span if span >= LEAST_SPAN else None


def _spread(values: FloatArray, draws: int, chance: np.random.Generator) -> FloatArray:
    """How far means of values drawn again lie from the mean, float64[draws].

    Drawn from n values, their variance is (n - 1) / n of what it is between samples of n: with two prompts, half.
    """
    count = len(values)
    scale = math.sqrt(count / (count - 1)) if count > 1 else math.nan
    away: FloatArray = scale * (chance.choice(values, (draws, count)).mean(axis=1) - values.mean())
    return away
