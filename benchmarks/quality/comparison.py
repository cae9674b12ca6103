"""Differences on the same prompts: methods against full prefill or each other, one run against another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Literal

from benchmarks.quality.results import Record
from benchmarks.quality.statistics import LEAST_SPAN, Interval, mean_interval, recovered
from benchmarks.quality.tables import Table
from errors import InvalidInput

Measure = Literal["score", "kl", "nll"]

# In the place of a task: all of them, each weighing the same.
MEAN = "mean"

_Pairs = Sequence[tuple[Record, Record]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """How a method differs from another on the same prompts of a task, in the unit of the measure.

    value, other_value: means over the prompts that both have; difference: method - other; recovered: PGR of a score
    where the run has a floor and full prefill is far enough above it.
    """

    suite: str
    task: str
    method: str
    other: str
    measure: Measure
    value: float
    other_value: float
    difference: Interval
    recovered: float | None = None

    @property
    def is_better(self) -> bool:
        """The method may be called better than the other: a higher score, or less divergence or likelihood lost."""
        return self.difference.is_clear and (self.difference.mean > 0) == (self.measure == "score")


def gaps(
    records: Sequence[Record], *, reference: str = "full", floor: str = "none", measure: Measure = "score"
) -> list[Gap]:
    """Every method of a run against the reference, for each suite its tasks and then their mean.

    `floor`: the method without context, for PGR. Raises InvalidInput when the reference is not among the records.
    """
    methods = _by_method(records)
    if reference not in methods:
        raise InvalidInput(f"the results hold no {reference!r} to compare with")
    floors = {one.digest: one.score for one in _measured(methods.get(floor, []), measure)} if measure == "score" else {}
    return [
        gap
        for method, members in methods.items()
        if method != reference
        for gap in _differences(members, methods[reference], measure, floors)
    ]


def compare(
    a: Sequence[Record], b: Sequence[Record], *, measure: Measure = "score", pair: tuple[str, str] | None = None
) -> list[Gap]:
    """Run `a` against run `b` on the prompts that both have.

    pair: a method of `a` and one of `b`. Without it methods of the same name are compared, and of those that are left a
    strategy that each run has with one set of options (ratio 0.1 here, ratio 0.2 there). Raises InvalidInput when no
    two of these share a prompt, or a run lacks the method that is named.
    """
    ours, theirs = _by_method(a), _by_method(b)
    if pair is None:
        pairs = [(method, method) for method in ours if method in theirs]
        left, right = _single_strategies(ours, theirs), _single_strategies(theirs, ours)
        pairs += [(left[strategy], right[strategy]) for strategy in left if strategy in right]
    else:
        for name, methods in zip(pair, (ours, theirs), strict=True):
            if name not in methods:
                raise InvalidInput(f"no records of {name!r}; there are {', '.join(methods)}", field="method")
        pairs = [pair]
    found = [gap for mine, other in pairs for gap in _differences(ours[mine], theirs[other], measure, {})]
    if not found:
        raise InvalidInput("the two runs have no method with the same prompts in common")
    return found


def orderings(records: Sequence[Record], *, measure: Measure = "score") -> list[Gap]:
    """Which methods are better than which, suite by suite on the mean over tasks: only what the intervals support.

    A pair that is missing could not be told apart.
    """
    found = []
    for (_, first), (_, second) in combinations(_by_method(records).items(), 2):
        for better, worse in ((first, second), (second, first)):
            last = {gap.suite: gap for gap in _differences(better, worse, measure, {})}  # the mean, or the only task
            found += [gap for gap in last.values() if gap.is_better]
    return found


def uninformative(records: Sequence[Record], *, reference: str = "full", floor: str = "none") -> list[tuple[str, str]]:
    """(suite, task) that tell nothing about reuse: full prefill is not shown to be better than no context by enough.

    By a one-sided test: that it is worse is not expected. Empty without records of both.
    """
    methods = _by_method(records)
    if reference not in methods or floor not in methods:
        return []
    telling = {
        (gap.suite, gap.task)
        for gap in _differences(methods[reference], methods[floor], "score", {})
        if gap.difference.is_above and gap.difference.mean >= LEAST_SPAN
    }
    return [task for task in dict.fromkeys((record.suite, record.task) for record in records) if task not in telling]


def gap_table(found: Iterable[Gap]) -> Table:
    """A row per gap. Scores are in points of 100, KL and NLL in nats a token; the interval is at 95 %."""
    rows = []
    for gap in found:
        scale = 100 if gap.measure == "score" else 1
        interval = gap.difference
        numbers = (gap.value, gap.other_value, interval.mean, interval.low, interval.high)
        rows.append(
            (
                *(gap.suite, gap.task, gap.method, gap.other, gap.measure, interval.pairs, interval.differing),
                *(scale * number for number in numbers),
                "yes" if interval.is_clear else "no",
                gap.recovered,
            )
        )
    columns = (
        "suite",
        "task",
        "method",
        "other",
        "measure",
        "prompts",
        "differing",
        "value",
        "other value",
        "difference",
        "low",
        "high",
    )
    return Table((*columns, "clear", "PGR"), tuple(rows))


def _differences(
    ours: Iterable[Record], theirs: Iterable[Record], measure: Measure, floors: Mapping[str, float]
) -> list[Gap]:
    """For each suite a gap per task and, if there are several, last their mean."""
    other = {record.digest: record for record in _measured(theirs, measure)}
    suites: dict[str, dict[str, list[tuple[Record, Record]]]] = defaultdict(lambda: defaultdict(list))
    for record in _measured(ours, measure):
        if record.digest in other:
            suites[record.suite][record.task].append((record, other[record.digest]))
    found = []
    for suite, tasks in suites.items():
        found += [_gap(suite, task, [pairs], measure, floors) for task, pairs in tasks.items()]
        if len(tasks) > 1:
            found.append(_gap(suite, MEAN, list(tasks.values()), measure, floors))
    return found


def _measured(records: Iterable[Record], measure: Measure) -> Iterator[Record]:
    """Those that have the measure. The score of a failure is none: it says nothing about the answers."""
    return (record for record in records if not record.error and getattr(record, measure) is not None)


def _gap(suite: str, task: str, strata: Sequence[_Pairs], measure: Measure, floors: Mapping[str, float]) -> Gap:
    values = [[(getattr(mine, measure), getattr(other, measure)) for mine, other in pairs] for pairs in strata]
    value, other_value = (fmean(fmean(pair[side] for pair in pairs) for pairs in values) for side in (0, 1))
    share = None
    if all(mine.digest in floors for pairs in strata for mine, _ in pairs):
        share = recovered(
            value, fmean(fmean(floors[mine.digest] for mine, _ in pairs) for pairs in strata), other_value
        )
    return Gap(
        suite=suite,
        task=task,
        method=strata[0][0][0].method,
        other=strata[0][0][1].method,
        measure=measure,
        value=value,
        other_value=other_value,
        difference=mean_interval([[mine - other for mine, other in pairs] for pairs in values]),
        recovered=share,
    )


def _by_method(records: Iterable[Record]) -> dict[str, list[Record]]:
    methods: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        methods[record.method].append(record)
    if len({record.model for members in methods.values() for record in members}) > 1:
        raise InvalidInput("these records are of several models; compare those of one with those of another")
    return dict(methods)


def _single_strategies(methods: Mapping[str, list[Record]], others: Mapping[str, list[Record]]) -> dict[str, str]:
    """Strategy -> method, of the strategies that have one method which the others lack."""
    found: dict[str, list[str]] = defaultdict(list)
    for method, records in methods.items():
        if method not in others:
            found[records[0].strategy].append(method)
    return {strategy: names[0] for strategy, names in found.items() if len(names) == 1}
