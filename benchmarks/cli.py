"""`prophetkv bench`: what the service costs, measured on this machine. Imports nothing heavy until a command runs."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.settings import load_settings

app = typer.Typer(no_args_is_help=True, help="Measure speed on this machine.")

_RATES = "1,4,16,32,64,256,inf"
_STRATEGIES = "naive,epic,cacheblend,kvshare,prophetkv"  # those that the paper compares


@app.command()
def ttft(
    model: Annotated[str | None, typer.Option(help="manifest name, folder or hub id")] = None,
    lengths: Annotated[str, typer.Option(help="context tokens, comma-separated")] = "1024,2048,4096",
    ratios: Annotated[str, typer.Option(help="shares of context to recompute, comma-separated")] = "0.2",
    strategies: Annotated[str, typer.Option(help="beside full, comma-separated")] = _STRATEGIES,
    tier: Annotated[str, typer.Option(help="where chunk KV is kept: memory, disk or redis")] = "memory",
    pairs: Annotated[int, typer.Option(min=1, help="measured rounds; one more warms up")] = 5,
    plain: Annotated[str, typer.Option(help="attentions of the model by itself: sdpa, eager, both, or none")] = "sdpa",
    out: Annotated[Path, typer.Option(help="JSON; a table and plots go beside it")] = Path("docs/results/ttft.json"),
) -> None:
    """Time to first token of every strategy against a full prefill: interleaved, paired, warm."""
    from benchmarks.ttft import Plan, measure, report

    plan = Plan(
        lengths=[int(length) for length in lengths.split(",")],
        ratios=[float(ratio) for ratio in ratios.split(",")],
        strategies=[name for name in strategies.split(",") if name],
        tier=tier,
        pairs=pairs,
        plain=tuple(name for name in plain.split(",") if name),
    )
    settings = load_settings(**({"model": model} if model else {}))
    for result in measure(settings, plan, shlex.join(["prophetkv", *sys.argv[1:]])):
        report(result, out)


@app.command()
def balance(
    model: Annotated[str | None, typer.Option(help="manifest name, folder or hub id")] = None,
    tokens: Annotated[int, typer.Option(min=512, help="context tokens")] = 1536,
    rates: Annotated[str, typer.Option(help="MB/s of the emulated medium, comma-separated; inf: memory")] = _RATES,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.2,
    pairs: Annotated[int, typer.Option(min=2, help="rounds at most")] = 5,
    minutes: Annotated[float, typer.Option(min=0.0, help="about how long to go on")] = 9.0,
    out: Annotated[Path, typer.Option(help="JSON; a table and a plot go beside it")] = Path(
        "docs/results/balance.json"
    ),
) -> None:
    """The strategy `auto` against every fixed choice, on emulated media of every speed."""
    from benchmarks.balance import Plan, measure, report

    plan = Plan(tokens, [float(rate) for rate in rates.split(",")], ratio, pairs, minutes)
    settings = load_settings(**({"model": model} if model else {}))
    report(measure(settings, plan, shlex.join(["prophetkv", *sys.argv[1:]])), out)


@app.command()
def store(
    megabytes: Annotated[str, typer.Option(help="sizes of entries, comma-separated")] = "1,4,12,64",
    rounds: Annotated[int, typer.Option(min=1, help="measured rounds; one more warms up")] = 15,
    codecs: Annotated[str, typer.Option(help="to place, comma-separated")] = "raw,int8,fp8,int4",
    chunks: Annotated[int, typer.Option(min=1, help="of 512 tokens, to place")] = 16,
    out: Annotated[Path, typer.Option(help="JSON; tables and a plot go beside it")] = Path("docs/results/store.json"),
) -> None:
    """GB/s of every tier against its raw medium. Starts a Redis of its own."""
    from benchmarks.store import Plan, measure, report

    plan = Plan(tuple(map(float, megabytes.split(","))), rounds, tuple(codecs.split(",")), chunks)
    report(measure(plan, load_settings().data_dir, shlex.join(["prophetkv", *sys.argv[1:]])), out)
