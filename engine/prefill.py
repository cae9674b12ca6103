"""One request's prefill: the prompt's layout, its slots, and the operations that strategies are written in."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor

from cache_store.base import KVSource, LoadedChunk
from engine.base import GenerateRequest, Usage
from engine.controller import Controller
from engine.encode import PrefixCache
from engine.forward import ForwardPass, Scores, Steps
from engine.model import Model, token_tensor
from engine.slots import Slots


class Layout:
    """Where everything stands. Slot index == position: `prefix` tokens, glue and chunk in turn, then the suffix.

    ids: int64 [prompt]. chunk_starts[i], chunk_lengths[i]: chunk i's first position and its tokens. As int64 positions:
    context, all chunk tokens; fresh, glue and suffix, computed anew in both stages; suffix, and question within it.
    suffix_start is n of the paper.
    """

    def __init__(self, request: GenerateRequest) -> None:
        ids = list(request.prefix)
        self.prefix = len(ids)
        self.chunk_starts: list[int] = []
        self.chunk_lengths = [len(part.chunk.token_ids) for part in request.parts]
        context: list[Tensor] = []
        fresh: list[Tensor] = []
        for part in request.parts:
            fresh.append(torch.arange(len(ids), len(ids) + len(part.glue)))
            ids += part.glue
            self.chunk_starts.append(len(ids))
            context.append(torch.arange(len(ids), len(ids) + len(part.chunk.token_ids)))
            ids += part.chunk.token_ids
        self.suffix_start = len(ids)
        self.suffix = torch.arange(len(ids), len(ids) + len(request.suffix))
        self.question = self.suffix[slice(*request.question)]
        fresh.append(self.suffix)
        ids += request.suffix
        self.ids = token_tensor(ids)
        self.context = torch.cat(context) if context else torch.empty(0, dtype=torch.int64)
        self.fresh = torch.cat(fresh)

    def __len__(self) -> int:
        return self.ids.shape[0]


class Prefill:
    """The state of one prefill. Strategies compose its generator methods; each yields between layers or chunks."""

    def __init__(
        self,
        model: Model,
        source: KVSource,
        prefixes: PrefixCache,
        request: GenerateRequest,
        controller: Controller | None = None,
    ) -> None:
        """`controller`: what the strategy `auto` asks; without one it knows of no tier and has measured nothing."""
        self.model = model
        self.request = request
        self.prefixes = prefixes
        self.layout = Layout(request)
        self.slots = model.new_slots(len(self.layout) + request.sampling.max_tokens)
        self.usage = Usage(
            prompt_tokens=len(self.layout),
            context_tokens=len(self.layout.context),
            strategy=request.strategy.name,
            ratio=request.strategy.ratio,
        )
        self.timings: dict[str, float] = {}
        self.selected = torch.empty(0, dtype=torch.int64)  # among the context tokens; set by the strategy
        self.compute: Set[str] = frozenset()  # keys of chunks to compute even if some tier holds them
        self.controller = controller or Controller(model)
        self.source = source

    def assemble(self) -> Generator[None, None, None]:
        """Loads every chunk (computing what no tier holds) and places it: V copied, K turned to its position."""
        with self.timed("load"):
            yield from self.prefixes.copy_into(self.request.prefix, self.slots)
            loaded: list[LoadedChunk] = []
            for part in self.request.parts:
                had = self.source.compute if part.chunk.key in self.compute else self.source.load
                found = yield from had(part.chunk)
                loaded.append(found)
                self.usage.hits[found.tier] = self.usage.hits.get(found.tier, 0) + 1
                self.usage.bytes_copied += found.kv.nbytes
                self.usage.bytes_loaded += found.kv.nbytes if found.tier != "computed" else 0
                self.usage.faults += [fault for fault in found.faults if fault not in self.usage.faults]
                yield
        with self.timed("assemble"):
            yield from self._place(loaded)
        layout = self.model.layout
        self.usage.work.turned += layout.layers * layout.layer_bytes(self.usage.context_tokens)

    def _place(self, loaded: list[LoadedChunk]) -> Generator[None, None, None]:
        positions = self.layout.context
        if not len(positions):
            return
        if self.model.device.type == "cuda":
            yield from self._place_on_gpu(loaded)
            return
        ends = torch.tensor([0, *self.layout.chunk_lengths]).cumsum(0).tolist()
        kv_heads, head_dim = self.model.layout.kv_heads, self.model.layout.head_dim
        unturned = torch.empty(kv_heads, len(positions), head_dim, dtype=torch.float32, device=self.model.device)
        turn = self.model.rotation(positions)
        for layer in range(self.model.layout.layers):
            keys, values = self.slots.data[layer]
            spans = list(zip(loaded, self.layout.chunk_starts, pairwise(ends), strict=True))
            for chunk, at, (start, stop) in spans:
                chunk.read_into(layer, unturned[:, start:stop], values[:, at : at + stop - start])
            turned = turn(unturned, layer)
            for _, at, (start, stop) in spans:
                keys[:, at : at + stop - start] = turned[:, start:stop]
            yield

    def _place_on_gpu(self, loaded: list[LoadedChunk]) -> Generator[None, None, None]:
        """A copy to the device in the stored dtype, unless it is there already, and one kernel, a chunk and layer."""
        from engine.kernels.place import place  # here, for it needs triton, which a CPU build of torch does not bring

        device = self.model.device
        spans = [
            (chunk.kv, torch.arange(at, at + chunk.kv.tokens, device=device))
            for chunk, at in zip(loaded, self.layout.chunk_starts, strict=True)
        ]
        for layer in range(self.model.layout.layers):
            keys, values = self.slots.data[layer]
            frequencies = self.model.frequencies(layer)
            for kv, positions in spans:
                stored_keys, stored_values = kv.layer(layer).to(device, non_blocking=True)
                place(stored_keys, stored_values, positions, frequencies, keys, values)
            yield

    def start(self, positions: Tensor, slots: Slots | None = None) -> ForwardPass:
        """A pass of the prompt's rows at `positions` (int64 on the CPU, sorted) over the request's slots."""
        return ForwardPass(self.model, self.layout.ids[positions], positions, slots or self.slots, self.usage.work)

    def recompute(self, selected: Tensor) -> Steps:
        """Stage II: recomputes the rows of `selected`, and glue and suffix, through all layers.

        selected: int64, ascending indices among the context tokens. Returns the last row's logits.
        """
        self.note_selected(selected)
        with self.timed("stage2"):
            rows = torch.cat((self.layout.context[selected], self.layout.fresh)).sort().values
            return (yield from self.start(rows).finish())

    def note_selected(self, selected: Tensor) -> None:
        """Says which context tokens (ascending indices) a strategy recomputes."""
        self.selected = selected
        self.usage.recomputed_tokens = len(selected)

    def probe(self, layers: Sequence[int], positions: Tensor) -> Steps:
        """Stage I: runs glue and suffix against the assembled slots, for their attention only.

        layers: whose attention counts, ascending; the pass ends with the last of them. positions: int64, the suffix
        positions whose rows score. Returns fp32 [context]: for every context token the softmax weights that those rows
        put on it, summed over rows, mean over heads, mean over `layers` (Eq. 7). The softmax runs over everything that
        the rows see.
        """
        sums = torch.zeros(self.model.layout.kv_heads, self.layout.suffix_start, device=self.model.device)
        run = self.start(self.layout.fresh)
        scores = self.scores_of(positions, self.layout.fresh, sums)
        for layer in layers[:-1]:
            yield from run.run(layer)
            yield from run.run(layer + 1, scores)
        yield from run.run(layers[-1])
        run.score(scores)
        return self.of_context(sums.sum(0)) / (self.model.heads * len(layers))

    def fall_back(self, reason: str) -> None:
        """Says that a full prefill answers in place of the named strategy."""
        self.usage.strategy, self.usage.fallback_reason = "full", reason

    def scores_of(self, positions: Tensor, rows: Tensor, sums: Tensor) -> Scores:
        """An accumulator for the scoring rows at `positions`, a run within a pass of `rows`."""
        start = int(torch.searchsorted(rows, positions[0]))
        return Scores(sums, self.model.rows(positions), slice(start, start + len(positions)))

    def narrow(self, run: ForwardPass, selected: Tensor) -> None:
        """Goes on with those rows of a pass that are selected context tokens, glue or suffix."""
        rows = torch.cat((self.layout.context[selected], self.layout.fresh)).sort().values
        run.keep(torch.searchsorted(run.rows.host_positions, rows))

    def context_kv(self, layer: int, which: int, index: Tensor | None = None, slots: Slots | None = None) -> Tensor:
        """A copy of the context tokens' K (`which` 0) or V (1) in a layer, [kv_heads, tokens, head_dim].

        index: int64, which context tokens; all by default. slots: whose; the request's by default.
        """
        positions = self.layout.context if index is None else self.layout.context[index]
        data = (slots or self.slots).data[layer, which]
        return data.index_select(1, positions.to(data.device))

    def of_context(self, values: Tensor) -> Tensor:
        """Of values [..., positions] those of the context tokens."""
        return values[..., self.layout.context.to(values.device)]

    def device_seconds(self) -> float:
        """How long the device took for `usage.work`."""
        return sum(self.timings.get(phase, 0.0) for phase in ("assemble", "stage1", "stage2")) / 1000

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall time of the block to `timings[phase]`, in milliseconds."""
        start = time.perf_counter()
        try:
            yield
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)  # else the next phase would wait for this one's work
        finally:
            elapsed = (time.perf_counter() - start) * 1000
            self.timings[phase] = self.timings.get(phase, 0.0) + elapsed
