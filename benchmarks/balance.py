"""Does the strategy `auto` choose well? Emulated media of every speed, against every fixed choice.

On a CPU every medium looks fast, for prefill is slow. A token bucket before the tier restores the balance of a GPU:
what counts is the medium's rate over the break-even rate, at which a chunk loads as fast as it is computed. Nothing
here says how fast a real medium is.

    full       a full prefill
    load       ProphetKV, every stored chunk loaded, the others computed
    compute    ProphetKV, every chunk computed in isolation, stored or not
    auto       what the controller chooses, from estimates that start as they do in a server
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.report import conditions, paired_ratio, publish
from benchmarks.throttle import Throttled
from benchmarks.ttft import SUFFIX_TOKENS, Run, first_token, request_maker
from cache_store.base import Chunk, ChunkKV, KVSource, LoadedChunk, Pause
from cache_store.memory import MemoryStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.base import GenerateRequest
from engine.calibration import calibrate, calibrate_tiers
from engine.controller import Controller
from engine.encode import PrefixCache, encode_observed
from engine.forward import run_steps
from engine.model import Model
from engine.strategies import STRATEGIES, Strategy
from service.models import resolve_language_model
from service.settings import Settings

CHUNK_TOKENS = 256
SHARES = {"all": 1.0, "half": 0.5, "none": 0.0}
FIXED = ("full", "load", "compute")
_HOPELESS = 1.5  # a fixed choice that takes so many times as long as the best is not repeated
_LONGEST_LOAD = 3.0  # full prefills; what takes longer to load alone is not run
_REFERENCE = "Llama-3.1-8B on an H100", 6.1  # GB/s: its break-even rate, from bytes and operations a token


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `rates`: MB/s, infinity for no throttle; `pairs`: rounds at most, within `minutes` in all."""

    tokens: int = 1536
    rates: Sequence[float] = (1, 4, 16, 32, 64, 256, float("inf"))
    ratio: float = 0.2
    pairs: int = 5
    minutes: float = 9.0


class _Computing:
    """A source that computes what it is asked for, stored or not."""

    def __init__(self, source: ChunkSource) -> None:
        self._source = source

    def prefetch(self, chunks: Sequence[Chunk]) -> object:
        """See KVSource.prefetch: there is nothing to read."""
        return None

    def load(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """See KVSource.load."""
        return self._source.compute(chunk)

    compute = load

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """See KVSource.locate_many."""
        return self._source.locate_many(chunks)


@dataclass(slots=True)
class Cell:
    """One medium with one share of the chunks stored. Seconds to the first token by method, in rounds."""

    rate: float
    stored: str
    loading: float
    seconds: dict[str, list[float]] = field(default_factory=dict)
    chosen: Counter[str] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)


class Balance:
    """One model and one prompt, on media of every speed."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        self._prefixes = PrefixCache(model)
        self._make = request_maker(model, plan.tokens, CHUNK_TOKENS)
        request = self._make(STRATEGIES["full"]())
        self._prefix = request.prefix
        self._chunks = [part.chunk for part in request.parts]
        self._memory = MemoryStore(1 << 50)
        self._controller = Controller(model)
        calibrate(model, self._prefixes, self._prefix, self._controller)
        for chunk in self._chunks:
            self._memory.put(chunk, run_steps(self._encode(chunk)))
        self._token_bytes = model.layout.layers * model.layout.layer_bytes(1)
        self._full = first_token(model, self._source(TieredStore([self._memory])), self._prefixes, request).seconds
        # Of what was measured, not of operations: at this rate a chunk loads as fast as it is computed.
        seconds = self._controller.computing(self._chunks[0], len(self._prefix))
        self.break_even = len(self._chunks[0].token_ids) * self._token_bytes / seconds

    def measure(self, rate: float, stored: str, seconds: float) -> Cell:
        """Rounds of all methods in turning order, for about so many seconds, two at least."""
        tier = Throttled(self._memory, rate * 1e6)
        store = TieredStore([MemoryStore(0), tier])
        controller = Controller(self._model, store.tiers)
        controller.compute = self._controller.compute
        calibrate_tiers(store.tiers, self._model.layout, controller)
        tier.frozen = True
        tier.held = {chunk.key for chunk in self._chunks[: round(SHARES[stored] * len(self._chunks))]}
        nbytes = sum(len(chunk.token_ids) for chunk in self._chunks if chunk.key in tier.held) * self._token_bytes
        cell = Cell(rate, stored, nbytes / (rate * 1e6))
        methods = ["auto", "full", "compute"]
        if tier.held and cell.loading < _LONGEST_LOAD * self._full:
            methods.append("load")
        end = time.monotonic() + seconds
        for number in range(self._plan.pairs):
            if number >= 2 and time.monotonic() > end:
                break
            turn = number % len(methods)
            for name in methods[turn:] + methods[:turn]:
                self._run(cell, name, self._source(store, controller), controller)
            best = min(cell.seconds[name][-1] for name in methods)
            methods = [name for name in methods if name == "auto" or cell.seconds[name][-1] < _HOPELESS * best]
        store.close()
        return cell

    def _run(self, cell: Cell, name: str, source: ChunkSource, controller: Controller) -> None:
        kind = {"load": "prophetkv", "compute": "prophetkv"}.get(name, name)
        strategy: Strategy = STRATEGIES[kind](ratio=self._plan.ratio)
        request: GenerateRequest = self._make(strategy)
        used: KVSource = _Computing(source) if name == "compute" else source
        run: Run = first_token(self._model, used, self._prefixes, request, controller)
        cell.seconds.setdefault(name, []).append(run.seconds)
        if run.decision is not None:
            cell.chosen[run.decision.strategy] += 1
            took = sum(value for phase, value in run.phases.items() if phase != "first_token")
            cell.errors.append(run.decision.predicted_ms[run.decision.strategy] / took - 1)

    def _source(self, store: TieredStore, controller: Controller | None = None) -> ChunkSource:
        return ChunkSource(store, partial(self._encode, controller=controller))

    def _encode(self, chunk: Chunk, controller: Controller | None = None) -> Generator[Pause, None, ChunkKV]:
        return encode_observed(self._model, self._prefixes, self._prefix, "raw", controller or self._controller, chunk)


def measure(settings: Settings, plan: Plan, command: str) -> dict[str, Any]:
    """All media and shares; see `report` for what becomes of the result."""
    folder = resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype)
    model = Model.load(folder, settings.device, settings.dtype)
    end = time.monotonic() + 60 * plan.minutes
    with torch.inference_mode():
        balance = Balance(model, plan)
        # Where nothing is stored the medium is asked for nothing: its two ends will do.
        ends = (plan.rates[0], plan.rates[-1])
        todo = [(rate, stored) for rate in plan.rates for stored in SHARES if stored != "none" or rate in ends]
        cells = []
        for number, (rate, stored) in enumerate(todo):
            left = (end - time.monotonic()) / (len(todo) - number)
            cells.append(_summed_up(balance.measure(rate, stored, left)))
    return {
        "command": command,
        "what": "emulated: a token bucket before the tier; see benchmarks/balance.py",
        "model": settings.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "context_tokens": plan.tokens,
        "chunk_tokens": CHUNK_TOKENS,
        "suffix_tokens": SUFFIX_TOKENS,
        "ratio": plan.ratio,
        "break_even_mb_s": round(balance.break_even / 1e6, 1),
        "conditions": conditions(),
        "cells": cells,
    }


def _summed_up(cell: Cell) -> dict[str, Any]:
    """Medians, and `auto` against each fixed choice and the best of them, paired by round."""
    auto, medians = cell.seconds["auto"], {name: median(times) for name, times in cell.seconds.items()}
    fixed = [name for name in FIXED if name in medians]
    best = min(fixed, key=medians.__getitem__)
    against = {name: paired_ratio(auto[: len(cell.seconds[name])], cell.seconds[name]) for name in fixed}
    return {
        "rate_mb_s": cell.rate if cell.rate < float("inf") else None,
        "stored": cell.stored,
        "loading_alone_s": round(cell.loading, 2),
        "ttft_s": {name: round(value, 3) for name, value in medians.items()},
        "rounds": {name: len(times) for name, times in cell.seconds.items()},
        "chosen": dict(cell.chosen),
        "prediction_error": round(median(cell.errors), 3),
        "best": best,
        "auto_over": {name: {"ratio": told["ratio"], "interval": told["interval"]} for name, told in against.items()},
    }


def report(result: dict[str, Any], out: Path) -> None:
    """See benchmarks.report.publish."""

    def plot() -> None:
        from benchmarks.plots import plot_balance

        plot_balance(result, out.with_suffix(".png"))

    publish(result, out, markdown(result), plot)


_INTRODUCTION = """# `auto` on emulated media: {model} in {dtype}

`{command}`, {cpu} ({capability}, {threads} threads, load {load:.1f}), {date}, torch {torch}. {context_tokens} context
tokens in chunks of {chunk_tokens}, ratio {ratio:g}.

**Emulated**: a token bucket before a tier in memory. A chunk loads as fast as it is computed at {break_even_mb_s:g}
MB/s here. The second column is the rate in units of that, which is what carries over; the third is the same for
{name}, whose break-even is {reference:g} GB/s. Seconds to the first token, medians of interleaved rounds in one
process; ratios of auto over the other are paired, with 95 % bootstrap intervals. A dash: loading alone would take more
than three full prefills, so it was not run. A fixed choice that took 1.5 times as long as the best in a round was not
repeated. The last column is the median error of the predictions.

| MB/s | of break-even | like GB/s | stored | full | load | compute | auto | ran | auto / best | auto / full | error |
|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def markdown(result: dict[str, Any]) -> str:
    """The result as a table with its conditions."""
    (name, reference), even = _REFERENCE, result["break_even_mb_s"]
    lines = []
    for cell in result["cells"]:
        rate, scaled = cell["rate_mb_s"], ["memory", "", ""]
        if rate is not None:
            scaled = [f"{rate:g}", f"{rate / even:.2f}", f"{rate / even * reference:.2f}"]
        times = [f"{cell['ttft_s'][method]:.2f}" if method in cell["ttft_s"] else "-" for method in (*FIXED, "auto")]
        ran = ", ".join(f"{strategy} {count}" for strategy, count in cell["chosen"].items())
        ratios = [_shown(cell["auto_over"][method]) for method in (cell["best"], "full")]
        cells = [*scaled, cell["stored"], *times, ran, *ratios, f"{cell['prediction_error']:+.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    best, full = (
        max(cell["auto_over"][method or cell["best"]]["ratio"] for cell in result["cells"]) for method in ("", "full")
    )
    told = {**result, **result["conditions"], "name": name, "reference": reference}
    worst = f"Worst cell: auto takes {best:.3f} of the best fixed choice, {full:.3f} of full."
    return _INTRODUCTION.format(**told) + "\n".join([*lines, "", worst, ""])


def _shown(ratio: dict[str, Any]) -> str:
    low, high = ratio["interval"]
    return f"{ratio['ratio']:.3f} [{low:.3f}, {high:.3f}]"
