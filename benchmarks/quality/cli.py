"""`prophetkv eval`: how good the answers are. Imports nothing heavy until a command runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from errors import InvalidInput, ProphetKVError

app = typer.Typer(no_args_is_help=True, help="Measure the quality of answers with reused KV.")

_STARTED = time.monotonic()

Model = Annotated[str | None, typer.Option(help="manifest name, folder or hub id; default: the configured one")]
Out = Annotated[Path, typer.Option(help="JSON lines; a run goes on where the file ends")]
Samples = Annotated[int, typer.Option(help="prompts of each task")]
Tasks = Annotated[str, typer.Option(help="comma-separated; default: all that can be made")]
Strategies = Annotated[
    str, typer.Option(help="such as naive,prophetkv:ratio=0.1,smooth=7; full, none and random are always there")
]
Ratios = Annotated[str, typer.Option(help="shares of context to recompute, comma-separated")]
Seed = Annotated[int, typer.Option(help="decides the prompts")]
Minutes = Annotated[float | None, typer.Option(help="begin no prompt that would take longer in all; default: no limit")]
Jobs = Annotated[
    int,
    typer.Option(
        min=1,
        help="processes that share the cores; times are comparable with 1 only",
    ),
]
ChunkTokens = Annotated[int, typer.Option(min=16, help="longest chunk")]
Haystack = Annotated[Path | None, typer.Option(help="text or folder to hide needles in; default: the sample documents")]
Squad = Annotated[Path | None, typer.Option(help="SQuAD 2.0 JSON, for qa_1")]
Hotpotqa = Annotated[Path | None, typer.Option(help="HotpotQA JSON, for qa_2")]

_DEFAULT = "naive,epic,cacheblend,kvshare,prophetkv"


@app.command()
def ruler(
    out: Out,
    lengths: Annotated[str, typer.Option(help="tokens of prompt and answer, comma-separated")] = "4096",
    tasks: Tasks = "",
    samples: Samples = 10,
    strategies: Strategies = _DEFAULT,
    ratios: Ratios = "0.2",
    seed: Seed = 0,
    minutes: Minutes = None,
    jobs: Jobs = 1,
    chunk_tokens: ChunkTokens = 512,
    model: Model = None,
    haystack: Haystack = None,
    squad: Squad = None,
    hotpotqa: Hotpotqa = None,
) -> None:
    """RULER: thirteen synthetic tasks of any length."""
    with _failing():
        from benchmarks.quality.commands import Options, evaluate
        from benchmarks.quality.suites import ruler_plan

        evaluate(
            Options(out, model, strategies, _floats(ratios, "ratios"), minutes, jobs, chunk_tokens, _STARTED),
            lambda evaluator: ruler_plan(
                evaluator.builder.encode,
                evaluator.room,
                lengths=_integers(lengths, "lengths"),
                samples=samples,
                tasks=_names(tasks),
                seed=seed,
                haystack=haystack,
                squad=squad,
                hotpotqa=hotpotqa,
            ),
        )


@app.command()
def longbench(
    path: Annotated[Path, typer.Argument(help="folder of the published JSONL files")],
    out: Out,
    limit: Annotated[
        int | None, typer.Option(min=1, help="longest prompt with answer; default: the model's window")
    ] = None,
    tasks: Tasks = "",
    samples: Samples = 10,
    strategies: Strategies = _DEFAULT,
    ratios: Ratios = "0.2",
    seed: Seed = 0,
    minutes: Minutes = None,
    jobs: Jobs = 1,
    chunk_tokens: ChunkTokens = 512,
    model: Model = None,
) -> None:
    """LongBench and LongBench-E, from the published files."""
    with _failing():
        from benchmarks.quality.commands import Options, evaluate
        from benchmarks.quality.suites import longbench_plan

        evaluate(
            Options(out, model, strategies, _floats(ratios, "ratios"), minutes, jobs, chunk_tokens, _STARTED),
            lambda evaluator: longbench_plan(
                evaluator.builder.encode,
                evaluator.room,
                path,
                samples=samples,
                tasks=_names(tasks),
                seed=seed,
                limit=limit,
            ),
        )


@app.command()
def musique(
    path: Annotated[Path, typer.Argument(help="JSON list of questions with answers and ctxs, each a title and a text")],
    out: Out,
    samples: Samples = 20,
    strategies: Strategies = _DEFAULT,
    ratios: Ratios = "0.2",
    seed: Seed = 0,
    minutes: Minutes = None,
    jobs: Jobs = 1,
    model: Model = None,
) -> None:
    """MuSiQue: multi-hop questions, each passage a chunk."""
    with _failing():
        from benchmarks.quality.commands import Options, evaluate
        from benchmarks.quality.suites import musique_plan

        evaluate(
            Options(out, model, strategies, _floats(ratios, "ratios"), minutes, jobs, None, _STARTED),
            lambda evaluator: musique_plan(path, samples=samples, seed=seed),
        )


@app.command()
def paper(
    out: Annotated[Path, typer.Option(help="folder; a run goes on where its records end")],
    minutes: Annotated[float, typer.Option(min=0.0, help="time for all of it")],
    model: Model = None,
    lengths: Annotated[str, typer.Option(help="RULER's lengths in tokens, comma-separated")] = "4096",
    tasks: Annotated[
        str, typer.Option(help="RULER's, comma-separated, the first two for curves; default: the paper's")
    ] = "",
    samples: Annotated[int, typer.Option(help="prompts of each task at most")] = 20,
    ttft_lengths: Annotated[str, typer.Option(help="context tokens of Tables 2 and 4; default: RULER's lengths")] = "",
    seed: Seed = 0,
    jobs: Jobs = 1,
    longbench: Annotated[Path | None, typer.Option(help="folder of LongBench's JSONL files")] = None,
    musique: Annotated[Path | None, typer.Option(help="MuSiQue's JSON, for Figure 8")] = None,
    haystack: Haystack = None,
    squad: Squad = None,
    hotpotqa: Hotpotqa = None,
) -> None:
    """The tables and figures of the paper's evaluation, for one model and a budget of minutes."""
    with _failing():
        from benchmarks.quality.commands import reproduce_paper
        from benchmarks.quality.paper.job import Data, Scale
        from benchmarks.quality.runner import Budget

        reproduce_paper(
            model,
            Budget(minutes, _STARTED),
            jobs,
            Data(longbench, musique, haystack, squad, hotpotqa),
            out,
            Scale(
                _integers(lengths, "lengths"),
                samples,
                seed,
                _names(tasks),
                _integers(ttft_lengths, "ttft_lengths"),
            ),
        )


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="a run's file")],
    b: Annotated[Path, typer.Argument(help="another's, or the same again")],
    method: Annotated[str | None, typer.Option(help="of A, as tables name it: 'prophetkv ratio=0.2'")] = None,
    other: Annotated[str | None, typer.Option(help="of B; default: the same")] = None,
) -> None:
    """Paired differences with intervals of two runs, on the prompts that both have, and what else differs.

    Methods of the same name are paired, or the two that are named.
    """
    with _failing():
        from benchmarks.quality.commands import differences
        from benchmarks.quality.results import load

        if other is not None and method is None:
            raise InvalidInput("--other needs --method", field="method")
        pair = None if method is None else (method, other or method)
        print(f"# A, {a.name}, against B, {b.name}\n{differences(load(a), load(b), pair)}")


@app.command()
def report(file: Annotated[Path, typer.Argument(help="a run's file")]) -> None:
    """A run's tables, gaps to full prefill, what they show, and where the time went, as Markdown."""
    with _failing():
        from benchmarks.quality.results import load
        from benchmarks.quality.summary import summary

        print(summary(*load(file)))


@contextmanager
def _failing() -> Iterator[None]:
    """Says what is wrong in a line and ends with status 1; 130 when interrupted."""
    try:
        yield
    except ProphetKVError as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        typer.echo("interrupted; what is done is kept, the same command goes on", err=True)
        raise typer.Exit(130) from error


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _integers(text: str, field: str) -> list[int]:
    try:
        return [int(name) for name in _names(text)]
    except ValueError as error:
        raise InvalidInput(f"{field}: {text!r} is not a list of whole numbers", field=field) from error


def _floats(text: str, field: str) -> list[float]:
    try:
        return [float(name) for name in _names(text)]
    except ValueError as error:
        raise InvalidInput(f"{field}: {text!r} is not a list of numbers", field=field) from error
