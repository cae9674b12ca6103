"""A run as a page of Markdown: scores, gaps to full prefill, what may be claimed and what may not, and the time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.quality.comparison import MEAN, Gap, Measure, gap_table, gaps, orderings, uninformative
from benchmarks.quality.methods import FULL
from benchmarks.quality.results import Record
from benchmarks.quality.tables import Table, score_table

MEASURES: tuple[Measure, ...] = ("score", "kl", "nll")
# What the harness spends its time on beside prefills.
_WORK = ("prepare", "encode", "decode", "forced", "score")


def summary(settings: Mapping[str, Any], records: Sequence[Record]) -> str:
    """The whole page."""
    lines = [f"# {settings.get('suite', 'run')} on {settings.get('model', 'a model')}", ""]
    lines += [f"- {name}: {value}" for name, value in settings.items() if name not in ("suite", "model")]
    lines += [f"- {count} records from {machine or 'a machine unknown'}" for machine, count in machines(records)]
    for suite, members in by_suite(records).items():
        lines += ["", f"## {suite}: points of 100", "", score_table(members).markdown()]
        for group in sorted({record.group for record in members} - {""}):
            of_group = [record for record in members if record.group == group]
            lines += [f"Of these, {group}:", "", score_table(of_group).markdown()]
    if any(record.strategy == FULL for record in records):
        for measure in MEASURES:
            found = gaps(records, measure=measure)
            if found:
                lines += ["", f"## Gap to full prefill: {measure}", "", gap_table(_ends(found)).markdown()]
    lines += ["", *findings(records), "", "## Where the time went", "", time_split(records).markdown()]
    return "\n".join(lines) + "\n"


def findings(records: Sequence[Record]) -> list[str]:
    """What may be claimed, what tells nothing, and what failed, as lines."""
    lines = [
        f"- {gap.suite}, mean over tasks: {gap.method} is better than {gap.other} by "
        f"{100 * gap.difference.mean:.1f} points [{100 * gap.difference.low:.1f}, {100 * gap.difference.high:.1f}]"
        for gap in orderings(records)
    ] or ["- no two methods can be told apart by their scores"]
    lines += [
        f"- {suite} {task} tells nothing about reuse: full prefill is not shown to be better than no context"
        for suite, task in uninformative(records)
    ]
    failed = Counter((record.method, record.error) for record in records if record.error)
    return lines + [f"- {method} failed on {count} prompts: {error}" for (method, error), count in failed.items()]


def time_split(records: Iterable[Record]) -> Table:
    """Seconds of computation by what they went into. `encode` holds each prompt's one assembly too."""
    spent: dict[str, float] = defaultdict(float)
    for record in records:
        spent[f"prefill {record.method}"] += record.timings.get("prefill", 0.0) / 1000
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


def _ends(found: Sequence[Gap]) -> list[Gap]:
    """The means over tasks; of a suite with one task, that."""
    with_mean = {gap.suite for gap in found if gap.task == MEAN}
    return [gap for gap in found if gap.task == MEAN or gap.suite not in with_mean]
