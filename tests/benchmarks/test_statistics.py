from __future__ import annotations

import math
from operator import sub

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality.statistics import Interval, mean_interval, recovered

scores = st.lists(st.floats(0, 1), min_size=2, max_size=30)


def test_the_interval_of_a_normal_mean_is_the_textbook_one() -> None:
    chance = np.random.default_rng(1)
    values = chance.normal(0.1, 0.2, 400)
    found = mean_interval([values.tolist()])
    half = 1.96 * values.std() / np.sqrt(400)
    assert found.mean == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.05 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.05 * half)
    assert found.pairs == 400


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(2)
    intervals = [mean_interval([chance.exponential(1.0, 40).tolist()], draws=1000, seed=run) for run in range(300)]
    covered = sum(interval.low <= 1.0 <= interval.high for interval in intervals)
    assert 0.88 <= covered / 300 <= 0.97  # a skewed distribution: somewhat below 0.95 is known for percentiles


def test_a_real_difference_is_told_from_noise_by_pairing() -> None:
    chance = np.random.default_rng(3)
    hardness = chance.uniform(0, 1, 60)
    worse, better = hardness, hardness + 0.03 + chance.normal(0, 0.02, 60)
    assert mean_interval([(better - worse).tolist()]).is_clear
    assert not mean_interval([(better - chance.permutation(worse)).tolist()]).is_clear


@settings(deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=2, max_size=30), st.integers(0, 5))
def test_the_other_way_round_is_the_same_with_the_other_sign(differences: list[float], seed: int) -> None:
    forth = mean_interval([differences], draws=200, seed=seed)
    back = mean_interval([[-difference for difference in differences]], draws=200, seed=seed)
    assert forth.mean == pytest.approx(-back.mean)
    assert (forth.low, forth.high) == pytest.approx((-back.high, -back.low))
    assert forth.low - 1e-12 <= forth.mean <= forth.high + 1e-12 or len(differences) < 6


@settings(deadline=None)
@given(scores)
def test_a_method_against_itself_is_exactly_nothing(values: list[float]) -> None:
    same = [list(map(sub, values, values))]
    assert mean_interval(same, draws=100) == Interval(0.0, 0.0, 0.0, len(values), 0)


def test_the_seed_decides() -> None:
    values = np.random.default_rng(4).normal(size=20).tolist()
    assert mean_interval([values], seed=1) == mean_interval([values], seed=1)
    assert mean_interval([values], seed=1) != mean_interval([values], seed=2)


def test_tasks_weigh_the_same_whatever_their_number_of_prompts() -> None:
    found = mean_interval([[1.0] * 30, [0.0] * 3])
    assert (found.mean, found.low, found.high, found.pairs) == (0.5, 0.5, 0.5, 33)


def test_a_wider_level_is_a_wider_interval() -> None:
    values = np.random.default_rng(5).normal(size=20).tolist()
    narrow, wide = mean_interval([values], level=0.8), mean_interval([values], level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high


@pytest.mark.parametrize(
    ("interval", "clear"),
    [
        (Interval(0.2, 0.1, 0.3, 12, 12), True),
        (Interval(-0.2, -0.3, -0.1, 12, 12), True),
        (Interval(0.2, 0.0, 0.3, 12, 12), False),
        (Interval(-0.2, -0.3, 0.0, 12, 12), False),
        (Interval(0.2, 7e-16, 0.3, 12, 12), False),
        (Interval(0.2, -0.1, 0.3, 12, 12), False),
        (Interval(1.0, 1.0, 1.0, 6, 6), True),
        (Interval(1.0, 1.0, 1.0, 12, 5), False),
    ],
)
def test_a_sign_is_claimed_only_when_zero_is_outside_and_pairs_suffice(interval: Interval, clear: bool) -> None:
    assert interval.is_clear is clear


def test_ties_do_not_make_few_differences_a_finding() -> None:
    """A sign test of four against none is at 0.125."""
    found = mean_interval([[1.0] * 4 + [0.0] * 8])
    assert (found.pairs, found.differing) == (12, 4)
    assert found.low > 0
    assert not found.is_clear
    assert mean_interval([[1.0] * 3 + [0.0] * 3, [1.0] * 3 + [0.0] * 3]).is_clear


@pytest.mark.parametrize("strata", [[], [[]], [[1.0], []]])
def test_nothing_has_no_mean(strata: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        mean_interval(strata)


@pytest.mark.parametrize("tasks", [1, 6])
def test_a_task_of_one_prompt_has_no_interval(tasks: int) -> None:
    """Drawn again it is always the same: six tasks of one prompt each would make a finding of anything."""
    found = mean_interval([[0.25]] * tasks)
    assert (found.mean, found.pairs, found.differing) == (0.25, tasks, tasks)
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert not found.is_clear
    assert not found.is_above


@pytest.mark.parametrize("prompts", [2, 3, 6])
def test_an_interval_is_not_too_narrow_where_prompts_are_few(prompts: int) -> None:
    """Six tasks, as many as the paper's subset: the mean's spread is what it is over runs with other prompts."""
    chance = np.random.default_rng(6)
    runs = chance.normal(size=(400, 6, prompts))
    found = [mean_interval(run.tolist(), draws=400) for run in runs]
    halves = np.array([(one.high - one.low) / 2 for one in found])
    assert np.sqrt(np.mean(halves**2)) == pytest.approx(1.96 / np.sqrt(6 * prompts), rel=0.06)


@pytest.mark.parametrize(
    ("method", "floor", "full", "share"),
    [
        (0.9, 0.1, 0.9, 1.0),
        (0.1, 0.1, 0.9, 0.0),
        (0.5, 0.1, 0.9, 0.5),
        (1.0, 0.1, 0.9, 1.125),  # better than full prefill
        (0.0, 0.1, 0.9, -0.125),  # worse than no context
        (0.05, 0.0, 0.05, 1.0),
        (0.5, 0.3, 0.34, None),  # too little between them
        (0.5, 0.6, 0.4, None),  # full prefill is worse than no context
    ],
)
def test_the_share_of_the_gap_that_is_recovered(method: float, floor: float, full: float, share: float | None) -> None:
    assert recovered(method, floor, full) == (None if share is None else pytest.approx(share))
