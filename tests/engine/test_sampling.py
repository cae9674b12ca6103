from __future__ import annotations

import pytest
import torch

from engine.base import Sampling
from engine.decode import Sampler
from engine.strategies.base import recompute_budget, top_tokens
from errors import NumericalFault

LOGITS = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))


def draws(count: int = 400, **options: float) -> list[int]:
    sampler = Sampler(Sampling(seed=7, **options))  # type: ignore[arg-type]
    return [sampler(LOGITS) for _ in range(count)]


def test_temperature_zero_is_greedy() -> None:
    assert set(draws(temperature=0.0)) == {0}


def test_a_seed_repeats_and_its_absence_does_not() -> None:
    assert draws(temperature=1.0) == draws(temperature=1.0)
    free = [Sampler(Sampling(temperature=1.0)) for _ in range(2)]
    assert [free[0](LOGITS) for _ in range(100)] != [free[1](LOGITS) for _ in range(100)]


def test_frequencies_follow_the_distribution() -> None:
    found = draws(4000, temperature=1.0)
    assert found.count(0) / 4000 == pytest.approx(0.5, abs=0.03)
    assert found.count(3) / 4000 == pytest.approx(0.05, abs=0.02)
    cold = draws(4000, temperature=0.5)
    assert cold.count(0) / 4000 == pytest.approx(0.25 / 0.365, abs=0.03)


def test_no_temperature_overflows() -> None:
    assert set(draws(100, temperature=1e-300)) == {0}


@pytest.mark.parametrize(
    ("top_p", "allowed"), [(0.4, {0}), (0.5, {0}), (0.51, {0, 1}), (0.9, {0, 1, 2}), (1.0, {0, 1, 2, 3})]
)
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, allowed: set[int]) -> None:
    assert set(draws(2000, temperature=1.0, top_p=top_p)) == allowed


def test_top_tokens_are_sorted_and_stable_and_nan_is_no_score() -> None:
    scores = torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 2.0])
    assert top_tokens(scores, 1).tolist() == [1]
    assert top_tokens(scores, 2).tolist() == [1, 2]
    assert top_tokens(scores, 4).tolist() == [1, 2, 4, 5]
    for bad in (float("nan"), float("inf")):
        scores[3] = bad
        with pytest.raises(NumericalFault):
            top_tokens(scores, 2)


@pytest.mark.parametrize(
    ("ratio", "context", "expected"),
    [(0.0, 100, 0), (0.2, 0, 0), (0.001, 100, 1), (0.2, 257, 51), (0.29, 100, 29), (1.0, 257, 257)],
)
def test_budget_is_the_floor_and_at_least_one(ratio: float, context: int, expected: int) -> None:
    assert recompute_budget(ratio, context) == expected
