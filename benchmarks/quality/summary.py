"""A run as a page of Markdown: scores, gaps to full prefill, what may be claimed and what may not, and the time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.quality.comparison import MEAN, Gap, Measure, gap_table, gaps, orderings, uninformative
from benchmarks.quality.methods import FULL, NONE
from benchmarks.quality.results import Record
from benchmarks.quality.statistics import LEAST_SPAN, recovered
from benchmarks.quality.tables import Cell, Table, score_table

MEASURES: tuple[Measure, ...] = ("score", "kl", "nll")
# By measure: what it is called, how a better method is to another, the unit, and what a difference gains in it.
_WORDS: dict[Measure, tuple[str, str, str, int]] = {
    "score": ("scores", "is better than", "points", 100),
    "kl": ("divergence from full prefill", "is closer to full prefill than", "nats a token (KL, less is better)", -1),
    "nll": (
        "likelihood of right answers",
        "finds right answers likelier than",
        "nats a token (NLL, less is better)",
        -1,
    ),
}
_SUBJECT = "prophetkv"  # the strategy whose first method the others are set against
# What the harness spends its time on beside prefills.
_WORK = ("prepare", "encode", "decode", "forced", "score")


def summary(settings: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The whole page."""
    lines = [f"# {settings.get('suite', 'run')} on {settings.get('model', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in settings.items() if name not in ("suite", "model")]
    lines += [f"- {count} records from {machine or 'a machine unknown'}" for machine, count in machines(records)]
    for suite, members in by_suite(records).items():
        lines += ["", f"## {suite}: points of 100", "", _with_recovered(score_table(members)).markdown()]
        for group in sorted({record.group for record in members} - {""}):
            of_group = [record for record in members if record.group == group]
            lines += [f"Of these, {group}:", "", score_table(of_group).markdown()]
    if any(record.strategy == FULL for record in records):
        for measure in MEASURES:
            found = gaps(records, measure=measure)
            if found:
                lines += ["", f"## Gap to full prefill: {measure}", "", gap_table(_ends(found)).markdown()]
    if subject := next((record.method for record in records if record.strategy == _SUBJECT), None):
        rivals = [record for record in records if record.strategy not in (FULL, NONE)]
        for measure in MEASURES:
            found = gaps(rivals, reference=subject, measure=measure)
            if found:
                lines += ["", f"## Against {subject}: {measure}", "", gap_table(_ends(found)).markdown()]
    lines += ["", *findings(records), "", "## Where the time went", "", time_split(records).markdown()]
    return "\n".join(lines) + "\n"


def findings(records: Sequence[Record]) -> list[str]:
    """What may be claimed, what tells nothing, and what failed, as lines."""
    lines = [line for measure in MEASURES for line in _claims(records, measure)]
    lines += [
        f"- {suite} {task} tells nothing about reuse: full prefill is not shown to be better than no context by "
        f"{100 * LEAST_SPAN:.0f} points"
        for suite, task in uninformative(records)
    ]
    failed = Counter((record.method, record.error) for record in records if record.error)
    return lines + [f"- {method} failed on {count} prompts: {error}" for (method, error), count in failed.items()]


def time_split(records: Iterable[Record], name: Callable[[Record], str] = lambda record: record.method) -> Table:
    """Seconds of computation by what they went into. `encode` holds each prompt's one assembly too.

    name: of what prefills are told apart by.
    """
    spent: dict[str, float] = defaultdict(float)
    for record in records:
        spent[f"prefill {name(record)}"] += record.timings.get("prefill", 0.0) / 1000
        for part in _WORK:
            spent[part] += record.timings.get(part, 0.0) / 1000
    total = sum(spent.values()) or 1.0
    rows = [(part, seconds, 100 * seconds / total) for part, seconds in spent.items() if seconds]
    return Table(("part", "seconds", "%"), (*rows, ("sum", sum(spent.values()), 100.0)))


def by_suite(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records in the order of the file."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        found[record.suite].append(record)
    return dict(found)


def machines(records: Iterable[Record]) -> list[tuple[str, int]]:
    """What the records were measured on, and how many there."""
    return Counter(record.machine for record in records).most_common()


def _claims(records: Sequence[Record], measure: Measure) -> list[str]:
    """Which methods are better than which by a measure; that none is; nothing if no record has it."""
    # Full prefill's divergence from itself is 0: that it has the least is no finding.
    measured = [record for record in records if measure != "kl" or record.strategy != FULL]
    if all(getattr(record, measure) is None for record in measured):
        return []
    noun, better, unit, gain = _WORDS[measure]
    lines = []
    for gap in orderings(measured, measure=measure):
        interval = gap.difference
        low, high = sorted((gain * interval.low, gain * interval.high))
        lines.append(
            f"- {gap.suite}, mean over tasks: {gap.method} {better} {gap.other} by {gain * interval.mean:.3g} {unit} "
            f"[{low:.3g}, {high:.3g}], {interval.pairs} prompts"
        )
    return lines or [f"- no two methods can be told apart by their {noun}"]


def _with_recovered(scores: Table) -> Table:
    """A table of scores with the share of the gap between no context and full prefill that each mean has (PGR)."""
    means = {row[0]: row[-1] for row in scores.rows}
    floor, full = means.get(NONE), means.get(FULL)

    def share(mean: Cell) -> float | None:
        if isinstance(mean, float) and isinstance(floor, float) and isinstance(full, float):
            return recovered(mean / 100, floor / 100, full / 100)
        return None

    return Table((*scores.columns, "PGR"), tuple((*row, share(row[-1])) for row in scores.rows))


def _ends(found: Sequence[Gap]) -> list[Gap]:
    """The means over tasks; of a suite with one task, that."""
    with_mean = {gap.suite for gap in found if gap.task == MEAN}
    return [gap for gap in found if gap.task == MEAN or gap.suite not in with_mean]
