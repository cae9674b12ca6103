"""Runs methods over a plan's prompts and adds a record of each to the run's file; a run goes on where it was cut.

Prompts are computed in this process or, with several jobs, in processes of their own; only this one writes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.queues import SimpleQueue
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.quality.evaluator import Evaluator, ModelSource, Work
from benchmarks.quality.methods import Method
from benchmarks.quality.results import Record, ResultFile
from benchmarks.quality.suites import Plan, PromptId
from engine.model import Model
from errors import ConfigError, PromptTooLong

_DAY, _MOMENT = 86400.0, 0.2  # seconds


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

    Of the first one's cost nothing is known before, so it is begun and may overrun a part of a budget. The whole cuts
    any: no method is begun after its end. A prompt that does not fit the model's window has records that say so.
    """
    missing = [
        (prompt, lacking) for prompt in plan.prompts if (lacking := _lacking(evaluator, prompt, methods, results))
    ]
    total = sum(len(lacking) for _, lacking in missing)
    outcome = Outcome(left=total)
    pace = _Pace(budget, {(prompt.suite, prompt.task, prompt.index): len(lacking) for prompt, lacking in missing})

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
        end = budget.whole_end
        if workers is not None:
            records = workers.records(evaluator, work(), end)
        else:
            records = chain.from_iterable(_until(end, evaluator.records(one)) for one in work())
        for record in records:
            keep(record)
    return outcome


class Workers:
    """Processes that each hold the model. Their threads share the cores."""

    def __init__(self, count: int, source: ModelSource, threads: int) -> None:
        self._count = count
        context = multiprocessing.get_context("spawn")  # a forked torch hangs
        self._records: SimpleQueue[Record] = context.SimpleQueue()
        self._pool = ProcessPoolExecutor(
            count, context, _begin_worker, (source, max(1, threads // count), self._records)
        )

    def records(self, evaluator: Evaluator, work: Iterable[Work], end: float) -> Iterator[Record]:
        """The records that such an evaluator computes of every prompt, as each is done and if it is begun before `end`.

        Raises ConfigError when a process has died.
        """
        running: set[Future[None]] = set()
        try:
            for one in work:
                running.add(self._pool.submit(_work, type(evaluator), evaluator.chunk_tokens, one, end))
                while len(running) == self._count:
                    yield from self._arrived(running)
            while running:
                yield from self._arrived(running)
        except BrokenProcessPool as error:
            yield from self._waiting()
            raise ConfigError(
                "a process that computed records has died, of too little memory perhaps; what is done is kept, the "
                "same command with fewer --jobs goes on"
            ) from error

    def _arrived(self, running: set[Future[None]]) -> Iterator[Record]:
        """What has come after a moment, or as soon as one of the futures is done; it is taken out of `running`."""
        done, _ = wait(running, timeout=_MOMENT, return_when=FIRST_COMPLETED)
        yield from self._waiting()
        running -= done
        for future in done:
            future.result()

    def _waiting(self) -> Iterator[Record]:
        while not self._records.empty():
            yield self._records.get()

    def close(self) -> None:
        """Ends the processes once they have done what they are at."""
        self._pool.shutdown(cancel_futures=True)


@contextmanager
def progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar with the time that is left; gives what is called after each step with its name.

    The time is judged by all steps so far: some take a minute. Where there is no terminal, a line says every twentieth
    of the way.
    """
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "left", TimeRemainingColumn())
    text = TextColumn("{task.description}")
    with Progress(*columns, text, console=console, transient=True, speed_estimate_period=_DAY) as bar:
        task = bar.add_task("", total=total)
        done = 0

        def advance(name: str) -> None:
            nonlocal done
            done += 1
            bar.update(task, advance=1, description=name)
            if not console.is_terminal and done * 20 // total > (done - 1) * 20 // total:
                left = bar.tasks[0].time_remaining
                told = "" if left is None else f", {left / 60:.0f} minutes left"
                console.print(f"{done} of {total}{told}: {name}", highlight=False)

        yield advance


class _Pace:
    """Whether a prompt may be begun, judged by those that were computed whole, of the same task if there are any."""

    def __init__(self, budget: Budget, records: dict[tuple[str, str, int], int]) -> None:
        """records: how many are to come of each prompt."""
        self._budget = budget
        self._left = records
        self._begun: dict[tuple[str, str, int], float] = defaultdict(float)
        self._spent: dict[tuple[str, str, int], float] = {}

    def allows(self, prompt: PromptId) -> bool:
        if time.monotonic() >= self._budget.whole_end:
            return False
        if not self._spent:
            return True
        alike = [spent for key, spent in self._spent.items() if key[:2] == (prompt.suite, prompt.task)]
        return self._budget.left() > median(alike or self._spent.values())  # a machine stalls at times

    def observe(self, record: Record) -> None:
        if not record.timings:
            return  # refused before anything was computed
        parts = ("prepare", "encode", "prefill", "decode", "forced", "score")
        prompt = (record.suite, record.task, record.index)
        self._begun[prompt] += sum(record.timings.get(part, 0.0) for part in parts) / 1000
        self._left[prompt] -= 1
        if not self._left[prompt]:
            self._spent[prompt] = self._begun[prompt]


def _lacking(
    evaluator: Evaluator, prompt: PromptId, methods: Sequence[Method], results: ResultFile
) -> tuple[Method, ...]:
    where = (evaluator.name, prompt.suite, prompt.task, prompt.index)
    return tuple(method for method in methods if (*where, method.name) not in results)


def _until(end: float, records: Iterable[Record]) -> Iterator[Record]:
    """The first, and those after it that are begun before `end`, of time.monotonic()."""
    for record in records:
        yield record
        if time.monotonic() >= end:
            return


@dataclass(frozen=True, slots=True)
class _Worker:
    """What a worker process holds."""

    source: ModelSource
    model: Model
    records: SimpleQueue[Record]
    evaluators: dict[tuple[type[Evaluator], int | None], Evaluator] = field(default_factory=dict)

    def evaluator(self, kind: type[Evaluator], chunk_tokens: int | None) -> Evaluator:
        if (kind, chunk_tokens) not in self.evaluators:
            self.evaluators[kind, chunk_tokens] = kind(self.model, self.source.name, chunk_tokens, self.source.codec)
        return self.evaluators[kind, chunk_tokens]


_worker: _Worker | None = None


def _begin_worker(source: ModelSource, threads: int, records: SimpleQueue[Record]) -> None:
    global _worker
    _worker = _Worker(source, source.load(threads), records)
    _worker.evaluator(Evaluator, None).warm_up()


def _work(kind: type[Evaluator], chunk_tokens: int | None, work: Work, end: float) -> None:
    assert _worker is not None
    for record in _until(end, _worker.evaluator(kind, chunk_tokens).records(work)):
        _worker.records.put(record)
