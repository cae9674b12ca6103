"""One request's prefill: the prompt's layout, its slots, and the operations that strategies are written in."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from cache_store.base import KVSource, LoadedChunk
from engine.attention import QueryRows
from engine.base import GenerateRequest, Usage
from engine.encode import PrefixCache
from engine.model import Model, Scores, Step, token_tensor

Steps = Generator[None, None, Tensor]


class Layout:
    """Where everything stands. Slot index == position: prefix, then glue and chunk in turn, then the suffix.

    ids: int64 [prompt]; chunk_starts[i] is chunk i's first position; context: int64, the positions of all chunk tokens;
    fresh: int64, those of glue and suffix, which are computed anew in both stages; suffix_start: n of the paper.
    """

    def __init__(self, request: GenerateRequest) -> None:
        ids = list(request.prefix)
        self.chunk_starts: list[int] = []
        context: list[Tensor] = []
        fresh: list[Tensor] = []
        for part in request.parts:
            fresh.append(torch.arange(len(ids), len(ids) + len(part.glue)))
            ids += part.glue
            self.chunk_starts.append(len(ids))
            context.append(torch.arange(len(ids), len(ids) + len(part.chunk.token_ids)))
            ids += part.chunk.token_ids
        self.suffix_start = len(ids)
        fresh.append(torch.arange(len(ids), len(ids) + len(request.suffix)))
        ids += request.suffix
        self.ids = token_tensor(ids)
        self.context = torch.cat(context) if context else torch.empty(0, dtype=torch.int64)
        self.fresh = torch.cat(fresh)

    def __len__(self) -> int:
        return self.ids.shape[0]


class Prefill:
    """The state of one prefill. Strategies compose its generator methods; each yields between layers or chunks."""

    def __init__(self, model: Model, source: KVSource, prefixes: PrefixCache, request: GenerateRequest) -> None:
        self.model = model
        self.request = request
        self.layout = Layout(request)
        self.slots = model.new_slots(len(self.layout) + request.sampling.max_tokens)
        self.usage = Usage(
            prompt_tokens=len(self.layout),
            context_tokens=len(self.layout.context),
            strategy=request.strategy.name,
            ratio=request.strategy.ratio,
        )
        self.timings: dict[str, float] = {}
        self._source = source
        self._prefixes = prefixes

    def assemble(self) -> Generator[None, None, None]:
        """Loads every chunk (computing what no tier holds) and places it: V copied, K turned to its position."""
        with self.timed("load"):
            yield from self._prefixes.copy_into(self.request.prefix, self.slots)
            loaded: list[LoadedChunk] = []
            for part in self.request.parts:
                found = yield from self._source.load(part.chunk)
                loaded.append(found)
                self.usage.hits[found.tier] += 1
                self.usage.bytes_loaded += found.kv.nbytes if found.tier != "computed" else 0
                self.usage.faults += [fault for fault in found.faults if fault not in self.usage.faults]
                yield
        with self.timed("assemble"):
            yield from self._place(loaded)

    def _place(self, loaded: list[LoadedChunk]) -> Generator[None, None, None]:
        positions = self.layout.context
        if not len(positions):
            return
        lengths = [len(part.chunk.token_ids) for part in self.request.parts]
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        kv_heads, head_dim = self.model.layout.kv_heads, self.model.layout.head_dim
        unturned = torch.empty(kv_heads, len(positions), head_dim, dtype=torch.float32, device=self.model.device)
        turn = self.model.rotation(positions)
        for layer in range(self.model.layout.layers):
            keys, values = self.slots.data[layer]
            spans = list(zip(loaded, self.layout.chunk_starts, pairwise(ends), strict=True))
            for chunk, at, (start, stop) in spans:
                chunk.read_into(layer, unturned[:, start:stop], values[:, at : at + stop - start])
            turned = turn(unturned)
            for _, at, (start, stop) in spans:
                keys[:, at : at + stop - start] = turned[:, start:stop]
            yield

    def forward(self, positions: Tensor) -> Steps:
        """Recomputes the rows at `positions` (sorted; the prompt's last among them), returns the last row's logits."""
        step = Step(self._rows(positions), self.slots)
        return (yield from self.model.forward(self.layout.ids[positions], step))

    def probe(self) -> Steps:
        """Stage I: runs glue and suffix against the assembled slots, for their attention only.

        Returns fp32 [context]: for every context token the softmax weights that the suffix rows put on it, summed over
        rows, mean over heads, mean over layers (Eq. 7). The softmax runs over everything the rows see.
        """
        positions = self.layout.fresh
        scoring = slice(len(positions) - len(self.request.suffix), len(positions))
        sums = torch.zeros(self.layout.suffix_start, dtype=torch.float32, device=self.model.device)
        step = Step(self._rows(positions), self.slots, Scores(sums, scoring), attention_only=True)
        yield from self.model.forward(self.layout.ids[positions], step)
        scores = sums[self.layout.context.to(sums.device)] / (self.model.heads * self.model.layout.layers)
        return scores

    def _rows(self, positions: Tensor) -> QueryRows:
        rows = self.model.rows(positions)
        self.usage.rows += len(rows)
        self.usage.attention_pairs += rows.pairs
        return rows

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall time of the block to `timings[phase]`, in milliseconds."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = (time.perf_counter() - start) * 1000
            self.timings[phase] = self.timings.get(phase, 0.0) + elapsed
