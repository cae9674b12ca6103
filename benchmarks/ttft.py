"""Time to first token of every strategy against a full prefill, in one process: interleaved, paired, warm.

Beside the times stand counters that do not depend on the machine: rows and attention pairs, floating point operations,
bytes copied; and the speed-up that each of them alone would allow.
"""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.quality.haystack import read_sentences
from benchmarks.report import conditions, paired_ratio, publish
from cache_store.base import Chunk, KVSource, KVStore
from cache_store.disk import DiskStore
from cache_store.keys import chunk_key, tokens_digest
from cache_store.memory import MemoryStore
from cache_store.redis import RedisStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.base import Decision, GenerateRequest, Part, Prefilled, Sampling, Token
from engine.controller import Controller
from engine.encode import PrefixCache, encode_chunk
from engine.forward import run_steps
from engine.generate import generate
from engine.model import Model
from engine.strategies import STRATEGIES, Strategy
from errors import InvalidInput
from service.models import resolve_language_model
from service.prompt import PromptTemplate
from service.settings import Settings

PHASES = ("load", "assemble", "stage1", "select", "stage2", "first_token")
CHUNK_TOKENS = 512
SUFFIX_TOKENS = 64  # at least, and hardly more


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. `tier`: memory, disk or redis; `pairs`: rounds; `plain`: attentions of the model by itself."""

    lengths: list[int]
    ratios: list[float]
    strategies: list[str]
    tier: str = "memory"
    pairs: int = 5
    plain: tuple[str, ...] = ("sdpa",)


@dataclass(slots=True)
class Run:
    """One request to its first token. Phases in milliseconds, counters as in engine.base.Work, bytes copied.

    `peak_bytes`: by how much the process's resident set rose above where it began. `decision`: of the strategy `auto`.
    """

    seconds: float
    phases: dict[str, float]
    counters: dict[str, int]
    peak_bytes: int
    decision: Decision | None


def measure(settings: Settings, plan: Plan, command: str) -> Iterator[dict[str, Any]]:
    """The result after every length, whole so far; see `report` for what becomes of it."""
    unknown = [name for name in plan.strategies if name not in STRATEGIES or name in ("full", "auto", "oracle")]
    if unknown:
        raise InvalidInput(f"cannot measure {', '.join(unknown)} against full", field="strategies")
    folder = resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype)
    model = Model.load(folder, settings.device, settings.dtype)
    told: dict[str, Any] = {
        "command": command,
        "model": settings.model,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "tier": plan.tier,
        "suffix_tokens": SUFFIX_TOKENS,
        "conditions": conditions(),
        "lengths": [],
    }
    with torch.inference_mode():
        for length in plan.lengths:
            with _store(settings, plan.tier, model) as store:
                told["lengths"].append(measure_length(model, store, plan, length))
            yield told


def measure_length(model: Model, store: TieredStore, plan: Plan, length: int) -> dict[str, Any]:
    """One context length: the chunks are encoded once into `store`, then rounds of every method in turning order.

    A round over the first chunks warms up; allocations grow to their size in the first measured round.
    """
    prefixes = PrefixCache(model)
    methods = list(_methods(plan))
    runs: dict[str, list[Run]] = {name: [] for name, _ in methods}
    plain: dict[str, list[float]] = {name: [] for name in plan.plain}
    make = request_maker(model, length)
    whole = make(STRATEGIES["full"]())
    source = ChunkSource(store, partial(encode_chunk, model, prefixes, whole.prefix))
    for part in whole.parts:
        run_steps(source.load(part.chunk))
    store.flush()
    warm_up = request_maker(model, min(length, 2 * CHUNK_TOKENS))
    for _, strategy in methods:
        first_token(model, source, prefixes, warm_up(strategy))
    for number in range(plan.pairs):
        turn = number % len(methods)
        for name, strategy in methods[turn:] + methods[:turn]:
            runs[name].append(first_token(model, source, prefixes, make(strategy)))
        for attention, times in plain.items():
            start = time.perf_counter()
            float(model.plain_logits(_ids(whole), attention)[0])  # a number on the host: the device has done
            times.append(time.perf_counter() - start)
    return _summed_up(model, length, methods, runs, plain)


def first_token(
    model: Model,
    source: KVSource,
    prefixes: PrefixCache,
    request: GenerateRequest,
    controller: Controller | None = None,
) -> Run:
    """Runs the request as the engine does, to its first token."""
    gc.collect()
    resident = _restart_peak()
    start = time.perf_counter()
    for event in generate(model, source, prefixes, request, controller):
        if isinstance(event, Prefilled):
            usage, timings = event.usage, event.timings
        if isinstance(event, Token):
            break
    seconds = time.perf_counter() - start
    phases = {name: timings.get(name, 0.0) for name in PHASES}
    phases["first_token"] = seconds * 1000 - sum(phases.values())
    counters = {
        "rows": usage.work.rows,
        "kv_rows": usage.work.kv_rows,
        "pairs": usage.work.pairs,
        "flops": model.flops(usage.work),
        "bytes_copied": usage.bytes_copied,
        "recomputed_tokens": usage.recomputed_tokens,
    }
    return Run(seconds, phases, counters, memory("VmHWM") - resident, usage.decision)


def _methods(plan: Plan) -> Iterator[tuple[str, Strategy]]:
    yield "full", STRATEGIES["full"]()
    for name in plan.strategies:
        if not STRATEGIES[name].takes_ratio:
            yield name, STRATEGIES[name]()
            continue
        for ratio in plan.ratios:
            yield f"{name} {ratio:g}", STRATEGIES[name](ratio=ratio)


def request_maker(model: Model, length: int, chunk_tokens: int = CHUNK_TOKENS) -> Callable[[Strategy], GenerateRequest]:
    """Requests over one context of `length` tokens in chunks, framed as the service frames them.

    The context is the sample documents' prose, again and again, and the question is about what stands in its middle:
    where the selected tokens stand decides how much attention Stage II computes, so this has to be a text.
    """
    prompt = PromptTemplate(model.tokenizer, "Answer the question from the sources.")
    text = " ".join(read_sentences(None))
    while len(prompt.encode(text)[0]) < length:
        text += f" {text}"
    ids, offsets = prompt.encode(text)
    about = text[offsets[length // 2][0] :].split()
    for count in range(1, SUFFIX_TOKENS):
        suffix, question = prompt.suffix(f"What do the sources say about {' '.join(about[:count])}?")
        if len(suffix) >= SUFFIX_TOKENS:
            break
    chunks = [tuple(ids[start : min(start + chunk_tokens, length)]) for start in range(0, length, chunk_tokens)]
    parts = tuple(
        Part(prompt.source_glue(number), Chunk(chunk_key("0" * 64, tokens_digest(chunk)), chunk))
        for number, chunk in enumerate(chunks, start=1)
    )
    return lambda strategy: GenerateRequest(
        "bench", prompt.prefix, parts, suffix, strategy, Sampling(max_tokens=1), question
    )


def fits_window(model: Model, length: int) -> bool:
    """Whether a request of `request_maker` over that context, with its first token, fits the model's window."""
    # Only then the frame is counted: the text of a length far beyond the window is not made.
    return length < model.window and len(_ids(request_maker(model, length)(STRATEGIES["full"]()))) < model.window


def _ids(request: GenerateRequest) -> torch.Tensor:
    ids = [*request.prefix]
    for part in request.parts:
        ids += [*part.glue, *part.chunk.token_ids]
    return torch.tensor([*ids, *request.suffix])


@contextmanager
def _store(settings: Settings, tier: str, model: Model) -> Iterator[TieredStore]:
    """A store with an unused memory tier before the one that is measured."""
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.data_dir) as folder:
        tiers: list[KVStore] = [MemoryStore((1 << 50) if tier == "memory" else 0)]
        if tier == "disk":
            tiers.append(DiskStore(Path(folder), model.layout, 1 << 50))
        elif tier == "redis":
            tiers.append(RedisStore(settings.redis_url, model.layout, settings.redis_timeout_ms / 1000))
        elif tier != "memory":
            raise InvalidInput(f"there is no tier {tier!r}", field="tier")
        store = TieredStore(tiers, backlog_bytes=1 << 50)
        try:
            yield store
        finally:
            store.close()


def _restart_peak() -> int:
    """Gives free memory back, begins the peak of the resident set anew, and says where it begins, in bytes."""
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier run left to the allocator would hide what this one needs
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def memory(name: str, file: str = "/proc/self/status") -> int:
    """A size in bytes by its name in a file of /proc, which counts in KiB; by default one of this process."""
    for line in Path(file).read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def _summed_up(
    model: Model,
    length: int,
    methods: list[tuple[str, Strategy]],
    runs: dict[str, list[Run]],
    plain: dict[str, list[float]],
) -> dict[str, Any]:
    full = runs["full"]
    told: dict[str, Any] = {
        "context_tokens": length,
        "kv_bytes": length * model.layout.layers * model.layout.layer_bytes(1),
        "plain_against_full": {
            name: paired_ratio(times, [run.seconds for run in full]) for name, times in plain.items()
        },
        "methods": {},
    }
    base = full[0].counters
    for name, strategy in methods:
        counters = runs[name][0].counters
        bounds = {
            "rows": (base["rows"] + base["kv_rows"]) / (counters["rows"] + counters["kv_rows"]),
            "pairs": base["pairs"] / counters["pairs"],
            "flops": base["flops"] / counters["flops"],
        }
        told["methods"][name] = {
            "strategy": strategy.name,
            "ratio": strategy.ratio if strategy.takes_ratio else None,
            "ttft_s": round(median(run.seconds for run in runs[name]), 4),
            "seconds": [round(run.seconds, 4) for run in runs[name]],  # by round, to compare any two methods
            "speed_up": paired_ratio([run.seconds for run in full], [run.seconds for run in runs[name]]),
            "bounds": {what: round(value, 2) for what, value in bounds.items()},
            "phases_ms": {phase: round(median(run.phases[phase] for run in runs[name]), 1) for phase in PHASES},
            "counters": counters,
            "peak_bytes": max(run.peak_bytes for run in runs[name]),
        }
    return told


def report(result: dict[str, Any], out: Path) -> None:
    """See benchmarks.report.publish."""

    def plot() -> None:
        from benchmarks.plots import plot_phases, plot_speed_up

        plot_phases(result, out.with_name(f"{out.stem}-phases.png"))
        plot_speed_up(result, out.with_name(f"{out.stem}-speed-up.png"))

    publish(result, out, markdown(result), plot)


def markdown(result: dict[str, Any]) -> str:
    """The result as a table with its conditions."""
    told = result["conditions"]
    lines = [
        f"# TTFT of {result['model']} in {result['dtype']}",
        "",
        f"`{result['command']}`, {told['cpu']} ({told['capability']}, {told['threads']} threads), {told['date']}, "
        f"torch {told['torch']}, chunk KV in {result['tier']}, {result['suffix_tokens']} tokens behind the context. "
        "Medians of interleaved rounds in one process with 95 % bootstrap intervals. Bounds: the speed-up by rows, by "
        "attention pairs and by floating point operations. Anew: context tokens that were recomputed. Peak: growth of "
        "the resident set. KV, bytes copied and peak in MiB.",
        "",
        "| context (KV) | method | TTFT s | full / method | by rows, pairs, FLOPs | I s | II s "
        "| anew | copied | peak |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for length in result["lengths"]:
        tokens = f"{length['context_tokens']} ({length['kv_bytes'] >> 20})"
        for name, method in length["methods"].items():
            ratio, (low, high) = method["speed_up"]["ratio"], method["speed_up"]["interval"]
            cells = [
                f"{method['ttft_s']:.2f}",
                f"{ratio:.2f} [{low:.2f}, {high:.2f}]",
                ", ".join(f"{method['bounds'][what]:.2f}" for what in ("rows", "pairs", "flops")),
                *(f"{method['phases_ms'][stage] / 1000:.2f}" for stage in ("stage1", "stage2")),
                str(method["counters"]["recomputed_tokens"]),
                str(method["counters"]["bytes_copied"] >> 20),
                str(method["peak_bytes"] >> 20),
            ]
            lines.append(f"| {tokens} | {name} | {' | '.join(cells)} |")
        for name, told in length["plain_against_full"].items():
            cells = [f"{told['slow_s']:.2f}", f"{1 / told['ratio']:.2f}", "", "", "", "", "", ""]
            lines.append(f"| {tokens} | plain model, {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
