"""What the subcommands of `prophetkv eval` do."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from benchmarks.quality.comparison import compare, gap_table
from benchmarks.quality.evaluator import Evaluator, ModelSource
from benchmarks.quality.methods import parse_methods, split_specs
from benchmarks.quality.paper.job import Data, Job, Scale
from benchmarks.quality.results import Record, load, open_results
from benchmarks.quality.runner import Budget, Workers, run
from benchmarks.quality.suites import Plan
from benchmarks.quality.summary import MEASURES, machines, summary
from errors import ConfigError, InvalidInput
from service.models import resolve_language_model
from service.settings import load_settings

Run = tuple[Mapping[str, Any], Sequence[Record]]  # its settings and records


@dataclass(frozen=True, slots=True)
class Options:
    """What the suites' commands have in common. started: when the budget of minutes began, of time.monotonic()."""

    out: Path
    model: str | None
    strategies: str
    ratios: Sequence[float]
    minutes: float | None
    jobs: int
    chunk_tokens: int | None
    started: float


def evaluate(options: Options, make_plan: Callable[[Evaluator], Plan]) -> None:
    """Runs a suite into its file and prints its summary. Ends with status 1 when a method failed on a prompt."""
    console = Console(stderr=True)
    source, threads = model_source(options.model)
    evaluator = Evaluator(source.load(threads), source.name, options.chunk_tokens, source.codec)
    methods = parse_methods(split_specs(options.strategies), options.ratios, evaluator.model.layout.layers)
    plan = make_plan(evaluator)
    with (
        open_results(options.out, {**evaluator.settings(), **plan.settings}) as results,
        workers_of(source, threads, options.jobs) as workers,
    ):
        if workers is None:
            evaluator.warm_up()
        budget = Budget(options.minutes, options.started)
        outcome = run(plan, evaluator, methods, results, budget, console=console, workers=workers)
    print(summary(*load(options.out)))
    for task, reason in plan.not_run.items():
        console.print(f"{task} not run: {reason}", highlight=False)
    if outcome.left:
        console.print(f"{outcome.left} records did not fit the budget; the same command goes on", highlight=False)
    if outcome.errors:
        console.print(
            f"{len(outcome.errors)} records are of failures, which the same command tries again; the first: "
            f"{outcome.errors[0].error}"
        )
        raise typer.Exit(1)


def model_source(model: str | None) -> tuple[ModelSource, int]:
    """The model that is named, or configured, fetched if need be; and the threads that are configured."""
    settings = load_settings(**({"model": model} if model else {}))
    folder = resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype)
    name = Path(settings.model).name if Path(settings.model).is_dir() else settings.model
    return ModelSource(name, folder, settings.device, settings.dtype, settings.kv_codec), settings.threads


def workers_of(source: ModelSource, threads: int, jobs: int) -> AbstractContextManager[Workers | None]:
    """Processes for several jobs; one needs none."""
    return closing(Workers(jobs, source, threads or os.cpu_count() or 1)) if jobs > 1 else nullcontext()


def differences(a: Run, b: Run, pair: tuple[str, str] | None = None) -> str:
    """What differs of settings and machines, what was not paired, and tables of run `a` against `b` by each measure.

    pair: a method of each; see `compare`, which raises InvalidInput when there is nothing to compare.
    """
    (ours, mine), (theirs, others) = a, b
    lines = [
        f"- {name} is {ours.get(name)!r} in A and {theirs.get(name)!r} in B"
        for name in sorted({*ours, *theirs})
        if ours.get(name) != theirs.get(name)
    ]
    made = [", ".join(machine or "a machine unknown" for machine, _ in machines(side)) for side in (mine, others)]
    if made[0] != made[1]:
        lines.append(f"- A is from {made[0]}, B from {made[1]}")
    found = compare(mine, others, pair=pair)
    sides = (("A", mine, {gap.method for gap in found}), ("B", others, {gap.other for gap in found}))
    for side, records, paired in sides if pair is None else ():
        if left := [name for name in dict.fromkeys(record.method for record in records) if name not in paired]:
            lines.append(f"- of {side} not paired: {', '.join(left)}")
    tables = [f"\n## score\n\n{gap_table(found).markdown()}"]
    for measure in MEASURES[1:]:
        try:
            tables.append(
                f"\n## {measure}\n\n{gap_table(compare(mine, others, measure=measure, pair=pair)).markdown()}"
            )
        except InvalidInput:
            continue
    return "".join([*(f"\n{line}" for line in lines), "\n" if lines else "", *tables])


def reproduce_paper(model: str | None, budget: Budget, jobs: int, data: Data, out: Path, scale: Scale) -> None:
    """Makes the paper's tables and figures in a folder. Ends with status 1 when a part failed."""
    try:
        from benchmarks.quality.paper.reproduce import check, reproduce
    except ImportError as error:
        raise ConfigError("the figures need matplotlib: pip install 'prophetkv-service[eval]'") from error
    source, threads = model_source(model)
    with workers_of(source, threads, jobs) as workers:
        job = Job(source.load(threads), source.name, out, scale, data, Console(stderr=True), source.codec, workers)
        check(job)
        done = reproduce(job, budget, shlex.join(["prophetkv", *sys.argv[1:]]))
    print(out / "index.md")
    if not done:
        raise typer.Exit(1)
