"""Results as tables: CSV for further work, Markdown for reading."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
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
    not compare different prompts. Failures do not count. A method's mean is there only when it has every task.
    Raises InvalidInput when there are no records or those of several suites or models.
    """
    if len({(record.suite, record.model) for record in records}) != 1:
        raise InvalidInput("a score table is made of the records of one suite and one model")
    scores: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for record in records:
        of_task = scores[record.task]
        if not record.error:
            of_task[record.method][record.digest] = record.score
    rows = []
    for method in dict.fromkeys(record.method for record in records):
        means = [_points(methods, method) for methods in scores.values()]
        known = [mean for mean in means if mean is not None]
        rows.append((method, *means, fmean(known) if len(known) == len(means) else None))
    return Table(("method", *scores, "mean"), tuple(rows))


def _points(methods: dict[str, dict[str, float]], method: str) -> float | None:
    if method not in methods:
        return None
    shared = set.intersection(*(set(scores) for scores in methods.values()))
    if not shared:
        return None
    return 100 * fmean(methods[method][digest] for digest in shared)


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return f"{cell:.2f}" if cell == 0 or abs(cell) >= 0.1 else f"{cell:.2g}"
    return "-" if cell is None else str(cell)
