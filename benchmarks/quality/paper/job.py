"""One reproduction: the model, where its records lie, and how its parts run suites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks.quality.evaluator import Evaluator
from benchmarks.quality.methods import Method
from benchmarks.quality.results import Record, load, open_results
from benchmarks.quality.ruler import NEEDS
from benchmarks.quality.runner import Budget, run
from benchmarks.quality.statistics import Interval, mean_interval
from benchmarks.quality.suites import Plan, ruler_plan
from engine.model import Model

# RULER's tasks in the paper's tables, with its abbreviations.
RULER_NAMES = {
    "cwe": "CWE",
    "fwe": "FWE",
    "niah_multikey_1": "MK1",
    "niah_multiquery": "MQ",
    "niah_multivalue": "MV",
    "niah_single_1": "S1",
    "niah_single_2": "S2",
    "niah_single_3": "S3",
    "qa_1": "QA1",
    "qa_2": "QA2",
    "vt": "VT",
}
RATIO = 0.2
CHUNK_TOKENS = 512

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Data:
    """Paths of what is not generated. What needs one that is None is not run, but for the haystack."""

    longbench: Path | None = None
    musique: Path | None = None
    haystack: Path | None = None
    squad: Path | None = None
    hotpotqa: Path | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is asked for: RULER's lengths and tasks (the paper's, if empty), prompts of each task at most, seed.

    ttft_lengths: context tokens of Tables 2 and 4; RULER's lengths, if empty.
    """

    lengths: Sequence[int]
    samples: int
    seed: int
    tasks: Sequence[str] = ()
    ttft_lengths: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """What is asked for, of which model, and the folder that it goes to."""

    model: Model
    name: str
    out: Path
    scale: Scale
    data: Data
    console: Console

    @property
    def curve_tasks(self) -> tuple[str, ...]:
        """Of Figures 8 and 10, whose first is the only one of Figure 10."""
        return tuple(self.scale.tasks[:2]) or ("niah_multivalue", "vt")

    def evaluator(self, kind: type[Evaluator] = Evaluator, chunk_tokens: int | None = CHUNK_TOKENS) -> Evaluator:
        """One over the job's model."""
        return kind(self.model, self.name, chunk_tokens)

    def ruler(self, evaluator: Evaluator, lengths: Sequence[int], tasks: Iterable[str] = ()) -> Plan:
        """RULER's prompts: of these tasks, or of the job's, or of those of the paper's whose data are given.

        Raises InvalidInput as `ruler_plan` does, so for a named task whose data are not given too.
        """
        data, scale = self.data, self.scale
        named = tuple(tasks) or tuple(scale.tasks)
        paths = {"qa_1": data.squad, "qa_2": data.hotpotqa}
        lacking = {} if named else {task: NEEDS[task] for task, path in paths.items() if path is None}
        plan = ruler_plan(
            evaluator.builder.encode,
            evaluator.room,
            lengths=lengths,
            samples=scale.samples,
            tasks=named or [task for task in RULER_NAMES if task not in lacking],
            seed=scale.seed,
            haystack=data.haystack,
            squad=data.squad,
            hotpotqa=data.hotpotqa,
        )
        return replace(plan, not_run=lacking)

    def run(
        self, name: str, evaluator: Evaluator, plan: Plan, methods: Sequence[Method], budget: Budget
    ) -> tuple[list[Record], list[str]]:
        """Runs into records/NAME.jsonl.

        Returns its records of the plan and the methods but for those of failures, and what to say of them.
        """
        path = self.file(f"{name}.jsonl")
        with open_results(path, {**evaluator.settings(), **plan.settings}) as results:
            outcome = run(plan, evaluator, methods, results, budget, console=self.console)
        names = {method.name for method in methods}
        wanted = {(prompt.suite, prompt.task, prompt.index) for prompt in plan.prompts}
        found = [
            record
            for record in load(path)[1]
            if record.method in names and (record.suite, record.task, record.index) in wanted
        ]
        records = [record for record in found if not record.error]
        notes = [f"{len({record.digest for record in records})} of {len(plan.prompts)} prompts, records in {path.name}"]
        if outcome.left:
            notes.append(f"the budget left out {outcome.left} records; the same command goes on with them")
        if failed := [record.error for record in found if record.error]:
            notes.append(
                f"{len(failed)} records are of failures, which count nowhere and which the same command tries again; "
                f"the first: {failed[0]}"
            )
        notes += [f"{task} not run: {reason}" for task, reason in plan.not_run.items()]
        return records, notes

    def file(self, name: str) -> Path:
        """A file of what was measured, which later runs go on from."""
        return self.out / "records" / name


def means(
    records: Iterable[Record],
    key: Callable[[Record], K],
    value: Callable[[Record], float] = lambda record: record.score,
) -> dict[K, Interval]:
    """By key the mean over tasks with its interval, of those prompts only that all keys have."""
    found: dict[K, dict[str, Record]] = defaultdict(dict)
    for record in records:
        found[key(record)][record.digest] = record
    shared = set.intersection(*map(set, found.values())) if found else set()
    if not shared:
        return {}
    intervals = {}
    for name, members in found.items():
        tasks: dict[str, list[float]] = defaultdict(list)
        for digest in sorted(shared):
            tasks[members[digest].task].append(value(members[digest]))
        intervals[name] = mean_interval(list(tasks.values()))
    return intervals
