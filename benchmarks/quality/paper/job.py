"""One reproduction: the model, where its records lie, and how its parts run suites."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from benchmarks.quality.evaluator import Evaluator
from benchmarks.quality.methods import Method
from benchmarks.quality.results import Record, load, open_results
from benchmarks.quality.ruler import NEEDS
from benchmarks.quality.runner import Budget, Workers, run
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
Values = dict[str, tuple[str, float]]  # by a prompt's digest its task and what was measured


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
    codec: str = "raw"  # how chunk KV is written
    workers: Workers | None = None

    @property
    def curve_tasks(self) -> tuple[str, ...]:
        """Of Figures 8 and 10, whose first is the only one of Figure 10."""
        return tuple(self.scale.tasks[:2]) or ("niah_multivalue", "vt")

    def evaluator(self, kind: type[Evaluator] = Evaluator, chunk_tokens: int | None = CHUNK_TOKENS) -> Evaluator:
        """One over the job's model."""
        return kind(self.model, self.name, chunk_tokens, self.codec)

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
            outcome = run(plan, evaluator, methods, results, budget, console=self.console, workers=self.workers)
        names = {method.name for method in methods}
        wanted = {(prompt.suite, prompt.task, prompt.index) for prompt in plan.prompts}
        found = [
            record
            for record in load(path)[1]
            if record.method in names and (record.suite, record.task, record.index) in wanted
        ]
        records = [record for record in found if not record.error]
        have: dict[str, set[str]] = defaultdict(set)
        for record in records:
            have[record.digest].add(record.method)
        whole = sum(methods == names for methods in have.values())
        notes = [f"{whole} of {len(plan.prompts)} prompts are done, records in {path.name}"]
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


def shared(
    records: Iterable[Record],
    key: Callable[[Record], K],
    value: Callable[[Record], float] = lambda record: record.score,
) -> dict[K, Values]:
    """By key the values of those prompts only that all keys have."""
    found: dict[K, Values] = defaultdict(dict)
    for record in records:
        found[key(record)][record.digest] = record.task, value(record)
    return common(found)


def common(found: Mapping[K, Values]) -> dict[K, Values]:
    """What is left of them on the prompts that all have; nothing when there is no such prompt."""
    digests = set.intersection(*map(set, found.values())) if found else set()
    if not digests:
        return {}
    return {key: {digest: values[digest] for digest in sorted(digests)} for key, values in found.items()}


def mean(values: Values) -> Interval:
    """Over tasks, with its interval."""
    return mean_interval(_strata(values))


def difference(a: Values, b: Values) -> Interval:
    """Mean over tasks of a - b on the prompts that both have, with the interval of the pairs."""
    return mean_interval(
        _strata({digest: (task, value - b[digest][1]) for digest, (task, value) in a.items() if digest in b})
    )


def _strata(values: Values) -> list[list[float]]:
    tasks: dict[str, list[float]] = defaultdict(list)
    for task, value in values.values():
        tasks[task].append(value)
    return list(tasks.values())
