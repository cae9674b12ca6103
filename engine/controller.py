"""What a prefill will take, and the choice of the strategy `auto`: reuse or a full prefill, load a chunk or compute it.

A prediction is made of what the parts cost: each chunk's loading (reads and bytes, by tier) or its computation, and
passes through the model (layer calls, operations of linear layers and of each kind of attention, bytes turned). Loading
goes on beside the device's work until Stage I ends. The coefficients are measured when the service starts and follow
every request.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from cache_store.base import Chunk, KVStore
from engine.base import Decision, Work
from engine.costs import PACE, LinearCost

if TYPE_CHECKING:
    from engine.model import Model
    from engine.prefill import Layout

# Reuse must promise to save this share of a full prefill: it is an approximation, and predictions err.
MARGIN = 0.05
# Of the time, what goes to the way that looks slower: one that is never taken would look slow for ever.
TRIALS = 0.02

# First guesses, in seconds a unit, before anything was measured.
_SECONDS_PER_FLOP = 1e-11
_SECONDS_PER_BYTE = 1e-9
_SECONDS_PER_READ = 1e-4
_READ_PACE = 0.5  # media change more suddenly than devices, and slow ones are read seldom
_TRIAL_PACE = 0.5  # trials are seldom, too
_ATTENTION = 2  # times as long for an operation of attention as for one of a linear layer
_ROWS_PER_CALL = 16  # a layer's call costs about as much as so many rows, for it reads the layer's weights


class Controller:
    """Estimates of one model on one device and of the tiers of one store. The device thread alone changes them."""

    def __init__(self, model: Model, tiers: Sequence[KVStore] = (), stored_bytes: int | None = None) -> None:
        """`tiers`: whose reads are observed. Others keep a first guess.

        `stored_bytes`: a token's KV as the tiers hold it, when that is not as the model has it.
        """
        self._model = model
        self._token_bytes = model.layout.layers * model.layout.layer_bytes(1)
        self._stored_bytes = stored_bytes or self._token_bytes
        call = 2 * model.layer_params * _ROWS_PER_CALL * _SECONDS_PER_FLOP
        attention = [_ATTENTION * _SECONDS_PER_FLOP] * 3
        self.compute = LinearCost((call, _SECONDS_PER_FLOP, *attention, _SECONDS_PER_BYTE))
        self._tiers = tuple(tiers)
        self.reads: dict[str, LinearCost] = defaultdict(lambda: LinearCost((_SECONDS_PER_READ, _SECONDS_PER_BYTE)))
        self._seen = {tier.name: (0, 0, 0.0) for tier in self._tiers}
        self._chance = random.Random(0)

    def amounts(self, work: Work) -> tuple[float, ...]:
        """What `compute` counts: layer calls; operations of linear layers, causal attention, other attention and column
        sums; bytes turned.
        """
        pair = 2 * self._model.heads * self._model.layout.head_dim
        linear = self._model.flops(Work(rows=work.rows, kv_rows=work.kv_rows))
        causal, scattered = 2 * pair * work.causal, 2 * pair * (work.pairs - work.causal)
        return work.calls, linear, causal, scattered, pair * work.scored, work.turned

    def observe(self, work: Work, seconds: float, trial: bool = False) -> None:
        """The device did `work` in so many seconds. `trial`: see Decision."""
        self.compute.observe(self.amounts(work), seconds, _TRIAL_PACE if trial else PACE)

    def observe_reads(self) -> None:
        """Takes in what the tiers have counted since the last time."""
        for tier in self._tiers:
            now = tier.stats.hits, tier.stats.read_bytes, tier.stats.read_seconds
            reads, nbytes, seconds = (new - old for new, old in zip(now, self._seen[tier.name], strict=True))
            self._seen[tier.name] = now
            self.reads[tier.name].observe((reads, nbytes), seconds, _READ_PACE)

    def predict(self, work: Work) -> float:
        """Seconds that the device needs for `work`."""
        return self.compute.predict(self.amounts(work))

    def loading(self, chunk: Chunk, tier: str) -> float:
        """Seconds to load the chunk from a tier."""
        return self.reads[tier].predict((1, len(chunk.token_ids) * self._stored_bytes))

    def computing(self, chunk: Chunk, prefix: int) -> float:
        """Seconds to compute the chunk in isolation, behind a prefix of so many tokens."""
        tokens, layers = len(chunk.token_ids), self._model.layout.layers
        work = Work(turned=tokens * self._token_bytes)
        work.add(tokens, tokens * prefix + tokens * (tokens + 1) // 2, layers=layers - 1)
        work.add_kv(tokens)
        return self.predict(work)

    def worth_loading(self, chunk: Chunk, tier: str) -> bool:
        """Loading the chunk from the tier takes no longer than computing it, leaving the prefix aside. Thread-safe."""
        return self.loading(chunk, tier) <= self.computing(chunk, 0)

    def decide(
        self,
        layout: Layout,
        chunks: Sequence[Chunk],
        places: Sequence[str | None],
        budget: int,
        layers: Sequence[int],
        scoring: int,
    ) -> tuple[Decision, set[str]]:
        """The faster of a full prefill and ProphetKV, and the keys of the chunks that this had better compute.

        Where reuse would load a chunk the slower one is tried now and then, by chance.

        places: the tier that holds each chunk, None where none does. budget: context tokens that Stage II recomputes.
        layers, scoring: whose attention Stage I averages, and how many of the last rows score.
        """
        self.observe_reads()
        loading = [self.loading(chunk, tier) if tier else None for chunk, tier in zip(chunks, places, strict=True)]
        computing = [self.computing(chunk, layout.prefix) for chunk in chunks]
        first, second = _stages(layout, budget, layers, scoring, self._model.layout.layers, self._token_bytes)
        full = self.predict(self._model.full_work(len(layout)))
        chosen, reuse, compute = choose(loading, computing, self.predict(first), self.predict(second), full)
        seconds = {"prophetkv": reuse, "full": full}
        other = "full" if chosen == "prophetkv" else "prophetkv"
        trial = False in compute and self._chance.random() * seconds[other] < TRIALS * seconds[chosen]
        return Decision(
            strategy=other if trial else chosen,
            predicted_ms={name: value * 1000 for name, value in seconds.items()},
            loaded=compute.count(False),
            computed=compute.count(True),
            missing=tuple(chunk for chunk, tier in zip(chunks, places, strict=True) if tier is None),
            trial=trial,
        ), {chunk.key for chunk, anew in zip(chunks, compute, strict=True) if anew}


def choose(
    loading: Sequence[float | None], computing: Sequence[float], stage1: float, stage2: float, full: float
) -> tuple[str, float, list[bool]]:
    """The strategy to run, what ProphetKV would take in seconds, and which chunks it would compute instead of load.

    loading, computing: seconds for each chunk; None: no tier holds it. stage1 includes placing. Reading goes on beside
    the device's work up to the end of Stage I, so of the stored chunks as many are computed as make the longer of the
    two shortest, those first that gain most by it.
    """
    compute = [load is None for load in loading]
    read = sum(load for load in loading if load is not None)
    work = stage1 + sum(anew for load, anew in zip(loading, computing, strict=True) if load is None)
    gains = {index: load - computing[index] for index, load in enumerate(loading) if load is not None}
    for index in sorted(gains, key=gains.__getitem__, reverse=True):
        fewer, more = read - (gains[index] + computing[index]), work + computing[index]
        if max(fewer, more) >= max(read, work):
            break
        read, work, compute[index] = fewer, more, True
    reuse = max(read, work) + stage2
    return ("prophetkv" if reuse < full * (1 - MARGIN) else "full"), reuse, compute


def _stages(
    layout: Layout, budget: int, layers: Sequence[int], scoring: int, depth: int, token_bytes: int
) -> tuple[Work, Work]:
    """What placing the chunks and Stage I, and Stage II will do, as if the selected tokens were evenly spread."""
    context, fresh = len(layout.context), len(layout.fresh)
    fresh_pairs = int((layout.fresh + 1).sum())
    first, second = Work(turned=context * token_bytes), Work()
    if 0 < budget < context:
        suffix_pairs = int((layout.suffix + 1).sum())
        first.add(len(layout.suffix), suffix_pairs, layers=layers[-1])
        first.add_kv(len(layout.suffix), suffix_pairs)
        first.scored += len(layers) * int((layout.suffix[-scoring:] + 1).sum())
    selected = layout.context[torch.arange(budget) * context // max(1, budget)]
    second.add(budget + fresh, fresh_pairs + int((selected + 1).sum()), layers=depth - 1)
    second.add_kv(budget + fresh)
    second.add(1, len(layout))
    return first, second
