"""Runs methods over a plan's prompts and adds a record of each to the run's file; a run goes on where it was cut.

Prompts are computed in this process or, with several jobs, in processes of their own; only this one writes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.quality.evaluator import Evaluator, ModelSource, Work
from benchmarks.quality.methods import Method
from benchmarks.quality.results import Record, ResultFile
from benchmarks.quality.suites import Plan, PromptId
from errors import PromptTooLong


@dataclass(slots=True)
class Outcome:
    """What a run came to. left: records that the budget did not allow; errors: methods that failed, by record."""

    added: int = 0
    left: int = 0
    errors: list[Record] = field(default_factory=list)


class Budget:
    """Wall time that may be used. `minutes` None: as much as is needed.

    end, whole_end: of time.monotonic(), which all processes share: when this budget is spent, and when that is of which
    it is a part.
    """

    def __init__(self, minutes: float | None, started: float | None = None, whole_end: float | None = None) -> None:
        self.started = time.monotonic() if started is None else started
        self.end = float("inf") if minutes is None else self.started + 60 * minutes
        self.whole_end = self.end if whole_end is None else whole_end

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def part(self, share: float) -> Budget:
        """A budget of a share of what is left."""
        left = max(0.0, self.left())
        return Budget(None if left == float("inf") else share * left / 60, whole_end=self.whole_end)


def run(
    plan: Plan,
    evaluator: Evaluator,
    methods: Sequence[Method],
    results: ResultFile,
    budget: Budget,
    *,
    console: Console,
    workers: Workers | None = None,
) -> Outcome:
    """Computes what is missing, as far as the budget goes; a prompt that would overrun it is not begun.

    The first one is begun in any case, for nothing is known of its cost before, and may overrun a part of a budget. The
    whole cuts any: no method is begun after its end. A prompt that does not fit the model's window has records that say
    so.
    """
    missing = [
        (prompt, lacking) for prompt in plan.prompts if (lacking := _lacking(evaluator, prompt, methods, results))
    ]
    total = sum(len(lacking) for _, lacking in missing)
    outcome = Outcome(left=total)
    pace = _Pace(budget)

    def keep(record: Record) -> None:
        results.append(record)
        outcome.added += 1
        outcome.left -= 1
        pace.observe(record)
        if record.error:
            outcome.errors.append(record)
        advance(f"{record.suite} {record.task} {record.index} {record.method}")

    def work() -> Iterator[Work]:
        for prompt, lacking in missing:
            if pace.allows(prompt):
                begun = time.perf_counter()
                try:
                    sample = plan.make(prompt)
                except PromptTooLong as error:
                    for method in lacking:
                        keep(evaluator.failure(prompt, method, error))
                    continue
                yield Work(sample, lacking, time.perf_counter() - begun)

    with progress(console, total) as advance:
        for records in _computed(work(), evaluator, workers, budget.whole_end):
            for record in records:
                keep(record)
    return outcome


class Workers:
    """Processes that each hold the model. Their threads share the cores."""

    def __init__(self, count: int, source: ModelSource, chunk_tokens: int | None, threads: int) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(
            count,
            multiprocessing.get_context("spawn"),  # a forked torch hangs
            _begin_worker,
            (source, chunk_tokens, max(1, threads // count)),
        )

    def submit(self, work: Work, end: float) -> Future[list[Record]]:
        """All records of a prompt, as far as they are begun before `end`."""
        return self._pool.submit(_worker_records, work, end)

    def close(self) -> None:
        """Ends the processes once they have done what they are at."""
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time that is left; gives what is called after each step with its name.

    Where there is no terminal, a line says every twentieth of the way.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console, transient=True) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def advance(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, advance=1, description=name)
            if not console.is_terminal and done * 20 // total > (done - 1) * 20 // total:
                left = (bar.tasks[0].time_remaining or 0) / 60
                console.print(f"{done} of {total}, {left:.0f} minutes left: {name}", highlight=False)

        yield advance


class _Pace:
    """Whether a prompt may be begun, judged by those that were computed, of the same task if there are any."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._spent: dict[tuple[str, str, int], float] = defaultdict(float)

    def allows(self, prompt: PromptId) -> bool:
        if not self._spent:
            return True
        alike = [spent for key, spent in self._spent.items() if key[:2] == (prompt.suite, prompt.task)]
        return self._budget.left() > fmean(alike or self._spent.values())

    def observe(self, record: Record) -> None:
        if not record.timings:
            return  # refused before anything was computed
        parts = ("prepare", "encode", "prefill", "decode", "forced", "score")
        seconds = sum(record.timings.get(part, 0.0) for part in parts) / 1000
        self._spent[record.suite, record.task, record.index] += seconds


def _lacking(
    evaluator: Evaluator, prompt: PromptId, methods: Sequence[Method], results: ResultFile
) -> tuple[Method, ...]:
    where = (evaluator.name, prompt.suite, prompt.task, prompt.index)
    return tuple(method for method in methods if (*where, method.name) not in results)


def _computed(
    work: Iterable[Work], evaluator: Evaluator, workers: Workers | None, end: float
) -> Iterator[Iterable[Record]]:
    """The records of every prompt, as they come."""
    if workers is None:
        for one in work:
            yield _until(end, evaluator.records(one))
        return
    running: set[Future[list[Record]]] = set()
    for one in work:
        running.add(workers.submit(one, end))
        if len(running) == workers.count:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    for future in running:
        yield future.result()


def _until(end: float, records: Iterable[Record]) -> Iterator[Record]:
    """The first, and those after it that are begun before `end`."""
    for record in records:
        yield record
        if time.monotonic() >= end:
            return


_evaluator: Evaluator | None = None  # of a worker process


def _begin_worker(source: ModelSource, chunk_tokens: int | None, threads: int) -> None:
    global _evaluator
    _evaluator = Evaluator(source.load(threads), source.name, chunk_tokens, source.codec)
    _evaluator.warm_up()


def _worker_records(work: Work, end: float) -> list[Record]:
    assert _evaluator is not None
    return list(_until(end, _evaluator.records(work)))
