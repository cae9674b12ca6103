"""Results as tables: CSV for further work, Markdown for reading."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.quality.results import Record
from errors import InvalidInput

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns. None is a value that does not exist."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def csv(self) -> str:
        """Comma-separated, numbers in full, None empty."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(self.rows)
        return out.getvalue()

    def markdown(self) -> str:
        """A Markdown table; numbers with two decimals, small ones with two digits, None as a dash."""
        lines = [self.columns, ["---"] * len(self.columns), *(map(_shown, row) for row in self.rows)]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def score_table(records: Sequence[Record]) -> Table:
    """Methods by tasks as in the paper's tables, for the records of one suite: points of 100, the mean over tasks last.

    Of each task only the prompts count that every method has which has the task at all, so that an unfinished run does
    not compare different prompts; the last row says how many. Failures do not count. A method's mean is there only when
    it has every task. Raises InvalidInput when there are no records or those of several suites or models.
    """
    if len({(record.suite, record.model) for record in records}) != 1:
        raise InvalidInput("a score table is made of the records of one suite and one model")
    scores: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        of_task = scores[record.task]
        if not record.error:
            of_task[record.method][record.digest] = record.score
    shared = {task: _in_all(methods.values()) for task, methods in scores.items()}
    rows: list[tuple[Cell, ...]] = []
    for method in dict.fromkeys(record.method for record in records):
        means = [
            100 * fmean(methods[method][digest] for digest in shared[task])
            if method in methods and shared[task]
            else None
            for task, methods in scores.items()
        ]
        known = [mean for mean in means if mean is not None]
        rows.append((method, *means, fmean(known) if len(known) == len(means) else None))
    counts = [len(digests) for digests in shared.values()]
    return Table(("method", *scores, "mean"), (*rows, ("prompts", *counts, sum(counts))))


def _in_all(scores: Collection[Mapping[str, float]]) -> set[str]:
    return set.intersection(*map(set, scores)) if scores else set()


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.2f}" if cell == 0 or abs(cell) >= 0.1 else f"{cell:.2g}"
    return "-" if cell is None else str(cell)
