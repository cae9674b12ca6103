"""Which context tokens matter, by attention: while decoding, to the question, and to the oracle. Figures 3, 4, 6 and 9.

Everything here is computed with evaluators, so that it goes through the same runner into the same kind of file.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.quality.evaluator import Evaluator, Work
from benchmarks.quality.measure import PromptRun
from benchmarks.quality.methods import FULL, Method
from benchmarks.quality.results import Record
from engine.forward import ForwardPass, Scores, run_steps
from engine.model import token_tensor
from engine.prefill import Prefill
from engine.strategies import STRATEGIES
from engine.strategies.base import recompute_budget, top_tokens
from engine.strategies.oracle import Factor, importances

# The share of context tokens that count as attended to (Figures 3 and 4).
ATTENDED = 0.2
# What is compared in Figure 6: Eq. 5 and the factors of Eq. 6. In Figure 9: every method's criterion, known exactly.
FACTORS: tuple[Factor, ...] = ("ideal", "delta_phi", "phi", "delta_v", "v")
CRITERIA: tuple[Factor, ...] = ("ideal", "phi", "cacheblend", "kvshare")
QUERY = Method("query")  # no strategy: what the question attends to under full prefill

Share = tuple[Method, float, dict[str, float]]


class AttentionEvaluator(Evaluator, ABC):
    """Instead of answers the records hold a share, as their score, that `shares` computes."""

    @abstractmethod
    def shares(self, run: PromptRun, methods: Sequence[Method]) -> Iterator[Share]:
        """A share and further ones by name for each method, in their order."""

    def measured(self, work: Work, run: PromptRun, begun: float) -> Iterator[Record]:
        """See Evaluator.measured. What the methods share is computed with the first: when it fails they all do."""
        left = list(work.methods)
        try:
            for method, share, more in self.shares(run, work.methods):
                elapsed, begun = 1000 * (time.perf_counter() - begun), time.perf_counter()
                blank = self.blank(work.sample, left.pop(0))
                assert blank.method == method.name
                yield replace(blank, score=share, more=more, timings={"prefill": round(elapsed, 3)})
        except Exception as error:  # whatever a method does wrong belongs to its results
            yield from (self.failure(work.sample, method, error) for method in left)


class Overlaps(AttentionEvaluator):
    """Of the tokens that decoding attends to most, the share that a method selects, or that the question attends to."""

    measures: ClassVar[str] = "overlap with what decoding attends to"

    def shares(self, run: PromptRun, methods: Sequence[Method]) -> Iterator[Share]:
        """See AttentionEvaluator.shares."""
        run.full()
        assert run.reference is not None
        wanted = _top(_attended_while_decoding(run), ATTENDED)
        for method in methods:
            if method == QUERY:
                found = _top(_attended_by_question(run.reference.prefill), ATTENDED)
            else:
                prefill = run.start(method.build(self.model.layout.layers))
                run_steps(prefill.request.strategy.prefill(prefill))
                found = prefill.selected
            yield method, _overlap(found, wanted), {}


class Residuals(AttentionEvaluator):
    """The share of the ideal's sum that is left to tokens which a factor does not select: Eq. 4 over its value at 0.

    Factor and ideal are both averaged over layers before the selection, as Eq. 7 does.
    """

    measures: ClassVar[str] = "residual loss"

    def shares(self, run: PromptRun, methods: Sequence[Method]) -> Iterator[Share]:
        """See AttentionEvaluator.shares."""
        found = _importances(run, methods, FACTORS)
        ideal = found["ideal"]
        for method in methods:
            selected = _top(found[_factor(method)], _ratio(method))
            yield method, float(1 - ideal[selected].sum() / ideal.sum()), {}


class Recoveries(AttentionEvaluator):
    """What a selection by exact knowledge recovers.

    The share is that of the tokens which the question attends to most under full prefill and still does when the
    selected ones were recomputed; `ideal` that of the ideal's selection which the criterion selects as well.
    """

    measures: ClassVar[str] = "recovered attention"

    def shares(self, run: PromptRun, methods: Sequence[Method]) -> Iterator[Share]:
        """See AttentionEvaluator.shares."""
        exact = run.start(STRATEGIES[FULL]())
        run_steps(exact.request.strategy.prefill(exact))
        wanted = _top(_attended_by_question(exact), ATTENDED)
        found = _importances(run, methods, CRITERIA)
        for method in methods:
            ratio = _ratio(method)
            selected = _top(found[_factor(method)], ratio)
            prefill = _assembled(run)
            run_steps(prefill.recompute(selected))
            attended = _top(_attended_by_question(prefill), ATTENDED)
            yield method, _overlap(attended, wanted), {"ideal": _overlap(selected, _top(found["ideal"], ratio))}


def oracle_methods(factors: Iterable[Factor], ratios: Iterable[float]) -> list[Method]:
    """Names of the oracle's selections, a factor at every ratio."""
    ratios = list(ratios)
    return [Method("oracle", {"factor": factor, "ratio": ratio}) for factor in factors for ratio in ratios]


def _importances(run: PromptRun, methods: Sequence[Method], order: Sequence[Factor]) -> dict[Factor, Tensor]:
    """fp32 [context] on the CPU of every factor that is asked for, and of the ideal."""
    asked = {"ideal", *map(_factor, methods)}
    found = run_steps(importances(_assembled(run), [factor for factor in order if factor in asked]))
    return {factor: scores.cpu() for factor, scores in found.items()}


def _assembled(run: PromptRun) -> Prefill:
    prefill = run.start(STRATEGIES["naive"]())
    run_steps(prefill.assemble())
    return prefill


def _attended_while_decoding(run: PromptRun) -> Tensor:
    """fp32 [context]: the weights that the rows of full prefill's answer put on each token, over all heads and layers.

    The answer goes in at once instead of token by token: the same rows, so the same weights.
    """
    assert run.reference is not None
    model, prefill = run.model, run.reference.prefill
    # The last token of an answer is never fed back, unless it is the only one.
    answer = run.reference.answer[:-1] or run.reference.answer
    positions = torch.arange(len(prefill.layout), len(prefill.layout) + len(answer))
    sums = torch.zeros(model.layout.kv_heads, prefill.layout.suffix_start, device=model.device)
    scores = Scores(sums, model.rows(positions), slice(0, len(answer)))
    decoding = ForwardPass(model, token_tensor(answer), positions, prefill.slots)
    run_steps(decoding.run(model.layout.layers - 1, scores))
    decoding.score(scores)
    return prefill.of_context(sums.sum(0))


def _attended_by_question(prefill: Prefill) -> Tensor:
    """fp32 [context]: the weights that the suffix puts on each token over the slots as they are."""
    return run_steps(prefill.probe(range(prefill.model.layout.layers), prefill.layout.suffix))


def _top(scores: Tensor, ratio: float) -> Tensor:
    return top_tokens(scores, recompute_budget(ratio, len(scores)))


def _overlap(found: Tensor, wanted: Tensor) -> float:
    """The share of `wanted` that is in `found`."""
    return float(torch.isin(wanted, found).float().mean())


def _factor(method: Method) -> Factor:
    return method.options["factor"]  # type: ignore[return-value]


def _ratio(method: Method) -> float:
    return float(method.options["ratio"] or 0.0)
