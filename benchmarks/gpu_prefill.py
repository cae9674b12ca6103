"""Time to first logits on a GPU: full prefill against every strategy, stored KV in device or in pinned host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu_timing import Clock, synchronize
from benchmarks.report import paired_ratio
from cache_store.base import Chunk, ChunkKV, HeldChunks
from engine.base import GenerateRequest, Part, Sampling, Usage
from engine.encode import PrefixCache
from engine.forward import ForwardPass, Steps
from engine.kernels.graph import DecodeGraph
from engine.model import Model, token_tensor
from engine.prefill import Prefill
from engine.strategies import SERVED, Strategy
from errors import NumericalFault

_GROWTH = 3.0  # a round at twice the length takes at most so much longer


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of a model."""

    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768)
    ratios: tuple[float, ...] = (0.05, 0.1, 0.2)
    rounds: int = 5
    chunk: int = 512
    prefix: int = 32
    glue: int = 4
    suffix: int = 64
    decoded: int = 32


class Contestant(NamedTuple):
    """`name` is "plain" for the transformers model itself; `memory` is where the stored KV lies, if any is used."""

    name: str
    ratio_recomputed: float | None = None
    memory: str | None = None


class Run(NamedTuple):
    """One prefill: seconds to the last row's logits, and what the engine says about it."""

    seconds: float
    timings: dict[str, float]
    usage: Usage


def make_strategy(name: str, ratio: float | None) -> Strategy:
    """The strategy, with its other options as they are by default."""
    return SERVED[name]() if ratio is None else SERVED[name](ratio=ratio)


def run_strategy(prefill: Prefill) -> Steps:
    """The generator whose result is the last row's logits."""
    return prefill.request.strategy.prefill(prefill)


def _held(pool: Tensor) -> HeldChunks:
    """`pool`: [chunks, layers, 2, kv_heads, tokens, head_dim], of which the chunks' KV are views."""
    return HeldChunks({f"{index:064x}": ChunkKV.pack(kv.unbind()) for index, kv in enumerate(pool)})


class Prefills:
    """One model's measurements."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self._model = model
        self._plan = plan
        layout, chunks = model.layout, max(plan.lengths) // plan.chunk
        shape = (chunks, layout.layers, 2, layout.kv_heads, plan.chunk, layout.head_dim)
        pool = torch.randn(shape, dtype=model.dtype, device=model.device)
        self._stores = {"device": _held(pool)}
        if model.device.type == "cuda":
            self._stores["pinned"] = _held(torch.empty_like(pool, device="cpu", pin_memory=True).copy_(pool))

    def measure(self, name: str, clock: Clock, until: float) -> list[dict[str, Any]]:
        """A result a length and contestant, up to the share `until` of the time."""
        contestants = [Contestant("plain"), *(Contestant(name) for name, kind in SERVED.items() if not kind.reuses)]
        for memory in self._stores:
            for name, kind in SERVED.items():
                if kind.reuses and not kind.chooses:
                    ratios = self._plan.ratios if kind.takes_ratio else (None,)
                    contestants += [Contestant(name, ratio, memory) for ratio in ratios]
        results, round_share = [], 0.0
        for index, length in enumerate(self._plan.lengths):
            # A length may take what is left, in proportion to its tokens; a warm-up and one round must fit.
            share = (until - clock.spent()) * length / sum(self._plan.lengths[index:])
            if clock.spent() + 2 * _GROWTH * round_share > until:
                clock.leave_out(f"{name} at {length} tokens")
                continue
            try:
                found, round_share = self._at(length, contestants, clock, clock.spent() + share)
            except torch.cuda.OutOfMemoryError:
                clock.leave_out(f"{name} at {length} tokens: out of memory")
                break
            except NumericalFault as error:
                clock.leave_out(f"{name} at {length} tokens: {error}")
                continue
            results += found
        return results

    def _at(
        self, length: int, contestants: list[Contestant], clock: Clock, until: float
    ) -> tuple[list[dict[str, Any]], float]:
        """The results at one length, and the share of the time that its last round took."""
        runs: dict[Contestant, list[Run]] = {contestant: [] for contestant in contestants}
        round_share = 0.0
        for number in range(self._plan.rounds + 1):
            if number > 1 and clock.spent() + round_share > until:
                clock.leave_out(f"rounds {number} to {self._plan.rounds} at {length} tokens")
                break
            start = clock.spent()
            # Every other round backwards: nobody always runs behind the same neighbour.
            for contestant in contestants if number % 2 else reversed(contestants):
                run = self._run(contestant, length)
                if number:  # the first round warms up
                    runs[contestant].append(run)
            round_share = clock.spent() - start
        return [
            self._result(contestant, length, own, runs[Contestant("full")]) for contestant, own in runs.items()
        ], round_share

    def _result(self, contestant: Contestant, length: int, runs: list[Run], full: list[Run]) -> dict[str, Any]:
        pairs = paired_ratio([run.seconds for run in full], [run.seconds for run in runs])
        milliseconds = round(median(run.seconds for run in runs) * 1000, 2)
        speedup = {"rounds": pairs["pairs"], "speedup": pairs["ratio"], "interval": pairs["interval"]}
        result = {"tokens": length, **contestant._asdict(), "ms": milliseconds, **speedup}
        if contestant.name != "plain":
            usage = runs[0].usage
            result |= {"recomputed": usage.recomputed_tokens, "rows": usage.work.rows, "pairs": usage.work.pairs}
            result["phases_ms"] = {name: median(run.timings[name] for run in runs) for name in runs[0].timings}
            whole = self._model.flops(self._model.full_work(usage.prompt_tokens))
            result["flops_bound"] = round(whole / self._model.flops(usage.work), 3)
        who = " ".join(str(part) for part in contestant if part is not None)
        print(f"{length} {who}: {milliseconds} ms, full takes {pairs['ratio']} times as long")
        return result

    def _run(self, contestant: Contestant, length: int) -> Run:
        model, plain = self._model, contestant.name == "plain"
        strategy = make_strategy("full" if plain else contestant.name, contestant.ratio_recomputed)
        request = self._request(length, strategy)
        prefixes = PrefixCache(model)  # which knows the system prefix and no other prompt
        drive(prefixes.copy_into(request.prefix, model.new_slots(len(request.prefix))))
        synchronize(model.device)
        start = time.perf_counter()
        prefill = Prefill(model, self._stores[contestant.memory or "device"], prefixes, request)
        if plain:
            model.plain_logits(prefill.layout.ids)
        else:
            drive(run_strategy(prefill))
        synchronize(model.device)
        return Run(time.perf_counter() - start, prefill.timings, prefill.usage)

    def _request(self, length: int, strategy: Strategy) -> GenerateRequest:
        plan = self._plan

        def draw(count: int, seed: int) -> tuple[int, ...]:
            generator = torch.Generator().manual_seed(seed)
            return tuple(torch.randint(0, self._model.vocab_size, (count,), generator=generator).tolist())

        parts = tuple(
            Part(draw(plan.glue, 2 * index), Chunk(f"{index:064x}", draw(plan.chunk, 2 * index + 1)))
            for index in range(length // plan.chunk)
        )
        prefix, suffix = draw(plan.prefix, 10**6), draw(plan.suffix, 10**6 + 1)
        return GenerateRequest("measure", prefix, parts, suffix, strategy, Sampling(max_tokens=1))

    def measure_decode(self) -> dict[str, Any]:
        """Behind the shortest and the longest prompt."""
        return {str(length): self._decode_at(length) for length in (self._plan.lengths[0], self._plan.lengths[-1])}

    def _decode_at(self, length: int) -> dict[str, float]:
        """Milliseconds a decode step, by the layer loop and by a CUDA graph, and what recording the graph takes."""
        model, steps = self._model, range(length, length + self._plan.decoded)
        slots = model.new_slots(steps.stop)
        slots.data.copy_(torch.randn_like(slots.data))
        graph = DecodeGraph(model, slots)

        def by_loop(position: int) -> None:
            drive(ForwardPass(model, token_tensor([1]), torch.tensor([position]), slots).finish())

        def by_graph(position: int) -> None:
            graph(1, position)

        def milliseconds(step: Callable[[int], None], positions: Sequence[int]) -> float:
            synchronize(model.device)
            start = time.perf_counter()
            for position in positions:
                step(position)
            synchronize(model.device)
            return (time.perf_counter() - start) * 1000 / len(positions)

        found = {"capture_ms": milliseconds(by_graph, steps[:1])}
        by_loop(length)
        found |= {"loop_ms": milliseconds(by_loop, steps), "graph_ms": milliseconds(by_graph, steps)}
        print(f"decode behind {length} tokens: {found}")
        return found


def drive(steps: Generator[Any, None, Any]) -> None:
    """Runs a generator to its end."""
    for _ in steps:
        pass
