"""One request's prefill: the prompt's layout, its slots, and the operations that strategies are written in."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence, Set
from contextlib import closing, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from cache_store.base import KVSource, LoadedChunk, Pause, Waiting
from engine.base import GenerateRequest, Usage
from engine.controller import Controller
from engine.encode import PrefixCache
from engine.forward import ForwardPass, Scores, Steps
from engine.model import Model, token_tensor
from engine.placing import place, place_on_gpu
from engine.slots import Slots

_PATIENCE_SECONDS = 0.005  # how long a layer is waited for before others may go on


class Layout:
    """Where everything stands. Slot index == position: `prefix` tokens, glue and chunk in turn, then the suffix.

    ids: int64 [prompt]. chunk_starts[i], chunk_lengths[i]: chunk i's first position and its tokens. As int64 positions:
    context, all chunk tokens; glue; fresh, glue and suffix, computed anew in Stage II; suffix, and question within it.
    suffix_start is n of the paper.
    """

    def __init__(self, request: GenerateRequest) -> None:
        ids = list(request.prefix)
        self.prefix = len(ids)
        self.chunk_starts: list[int] = []
        self.chunk_lengths = [len(part.chunk.token_ids) for part in request.parts]
        context: list[Tensor] = []
        glue: list[Tensor] = []
        for part in request.parts:
            glue.append(torch.arange(len(ids), len(ids) + len(part.glue)))
            ids += part.glue
            self.chunk_starts.append(len(ids))
            context.append(torch.arange(len(ids), len(ids) + len(part.chunk.token_ids)))
            ids += part.chunk.token_ids
        self.suffix_start = len(ids)
        self.suffix = torch.arange(len(ids), len(ids) + len(request.suffix))
        self.question = self.suffix[slice(*request.question)]
        ids += request.suffix
        self.ids = token_tensor(ids)
        self.context = torch.cat(context) if context else torch.empty(0, dtype=torch.int64)
        self.glue = torch.cat(glue) if glue else torch.empty(0, dtype=torch.int64)
        self.fresh = torch.cat((self.glue, self.suffix))

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
        self._places: list[str | None] | None = None
        self.controller = controller or Controller(model)
        self.source = source
        self._loaded: list[LoadedChunk] = []  # whose layers from `_placed` on are not in the slots yet
        self._placed = 0
        self._angles: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by kind of layer, of each chunk
        self._phases: list[str] = []  # those that are being timed, the innermost last
        self._mark = 0.0

    def locate(self) -> list[str | None]:
        """The tier that holds each chunk, None where none does: asked once, and what fails is noted."""
        if self._places is None:
            self._places, faults = self.source.locate_many([part.chunk for part in self.request.parts])
            self._note_faults(faults)
        return self._places

    def assemble(self, lazily: bool = False) -> Generator[Pause, None, None]:
        """Loads every chunk (computing what no tier holds) and places it: V copied, K turned to its position.

        What is computed goes first, for the others are read meanwhile. Every layer is placed, or `lazily` only the
        first: the passes of `start` then place each layer before they reach it, so they begin while the others are
        still being read. Until then what stands in the slots is garbage.
        """
        with self.timed("load"):
            chunks = [part.chunk for part in self.request.parts]
            missing = {chunk.key for chunk, place in zip(chunks, self.locate(), strict=True) if place is None}
            anew = missing | self.compute
            reading = self.source.prefetch([chunk for chunk in chunks if chunk.key not in anew])
            yield from self.prefixes.copy_into(self.request.prefix, self.slots)
            loaded: dict[int, LoadedChunk] = {}
            for index in sorted(range(len(chunks)), key=lambda index: chunks[index].key not in anew):
                had = self.source.compute if chunks[index].key in anew else self.source.load
                loaded[index] = found = yield from had(chunks[index])
                self._note(found, 1)
                yield None
            self._loaded = [loaded[index] for index in range(len(chunks))]
            del reading
        self._placed = 0
        lengths = list(self.layout.chunk_lengths)
        self._angles = {
            kind: list(zip(torch.split(cos, lengths), torch.split(sin, lengths), strict=True))
            for kind, (cos, sin) in self.model.angles(self.layout.context).items()
        }
        yield from self._place_through(0 if lazily else self.model.layout.layers - 1)

    def _place_through(self, layer: int) -> Generator[Pause, None, None]:
        """Places the layers up to `layer` that are not yet in the slots."""
        while self._loaded and self._placed <= layer:
            with self.timed("load"):
                yield from self._await_layer(self._placed)
            with self.timed("assemble"):
                self._place(self._placed)
            self.usage.work.turned += self.model.layout.layer_bytes(self.usage.context_tokens)
            self._placed += 1
            if self._placed == self.model.layout.layers:
                self._loaded = []
            yield None

    def _await_layer(self, layer: int) -> Generator[Pause, None, None]:
        """Waits until the layer of every chunk can be read, and computes those chunks whose reading failed."""
        for index, found in enumerate(self._loaded):
            arrival = found.arrival
            if arrival is None:
                continue
            while not arrival.wait(layer, _PATIENCE_SECONDS):
                yield Waiting(arrival, layer)
            kv = arrival.kv
            if kv is None:
                self._note(found, -1)
                computed = yield from self.source.compute(self.request.parts[index].chunk)
                found = replace(computed, faults=(*arrival.faults, *computed.faults))
                self._note(found, 1)
            else:
                found = replace(found, kv=kv, faults=arrival.faults)  # another tier may have taken over
            self._note_faults(found.faults)
            self._loaded[index] = found

    def _note(self, found: LoadedChunk, count: int) -> None:
        """Adds a loaded chunk to the usage, or takes it back."""
        self.usage.hits[found.tier] = self.usage.hits.get(found.tier, 0) + count
        self.usage.bytes_copied += count * found.kv.nbytes
        self.usage.bytes_loaded += count * found.kv.nbytes if found.tier != "computed" else 0
        self._note_faults(found.faults)

    def _note_faults(self, faults: Sequence[str]) -> None:
        self.usage.faults += [fault for fault in faults if fault not in self.usage.faults]

    def _place(self, layer: int) -> None:
        keys, values = self.slots.data[layer]
        angles = self._angles[self.model.kind(layer)]
        for found, at, (cos, sin) in zip(self._loaded, self.layout.chunk_starts, angles, strict=True):
            end = at + found.kv.tokens
            if self.model.device.type == "cuda":
                positions = torch.arange(at, end, device=self.model.device)
                place_on_gpu(found.kv, layer, positions, self.model.frequencies(layer), keys, values)
            else:
                place(found.kv, layer, cos, sin, keys[:, at:end], values[:, at:end])

    def start(self, positions: Tensor, slots: Slots | None = None) -> ForwardPass:
        """A pass of the prompt's rows at `positions` (int64 on the CPU, sorted) over the request's slots."""
        ready = self._place_through if slots is None else None
        ids = self.layout.ids[positions]
        return ForwardPass(self.model, ids, positions, slots or self.slots, self.usage.work, ready)

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
        """Stage I: runs the suffix against the assembled slots, for its attention only.

        The glue's KV are as imprecise as those of the chunks: they are computed behind the prefix once and turned to
        their positions.

        layers: whose attention counts, ascending; the pass ends with the last of them. positions: int64, the suffix
        positions whose rows score. Returns fp32 [context]: for every context token the softmax weights that those rows
        put on it, summed over rows, mean over heads, mean over `layers` (Eq. 7). The softmax runs over everything that
        the rows see.
        """
        sums = torch.zeros(self.model.layout.kv_heads, self.layout.suffix_start, device=self.model.device)
        yield from self._place_glue()
        run = self.start(self.layout.suffix)
        scores = self.scores_of(positions, self.layout.suffix, sums)
        for layer in layers[:-1]:
            yield from run.run(layer)
            yield from run.run(layer + 1, scores)
        yield from run.run(layers[-1])
        run.score(scores)
        return self.of_context(sums.sum(0)) / (self.model.heads * len(layers))

    def _place_glue(self) -> Generator[Pause, None, None]:
        """Puts the glue's KV into the slots as if no chunk stood before it."""
        glue = self.layout.glue
        if not len(glue):
            return
        first, rows = self.layout.prefix, self.model.rows(glue)
        kept = yield from self.prefixes.exact((*self.request.prefix, *self.layout.ids[glue].tolist()))
        turn = self.model.rotation(glue - torch.arange(first, first + len(glue)))
        for layer, (keys, values) in enumerate(kept[:, :, :, first:]):
            self.slots.write(layer, rows, turn(keys, layer)[None].to(keys.dtype), values[None])

    def fall_back(self, reason: str) -> None:
        """Says that a full prefill answers in place of the named strategy."""
        self.usage.strategy, self.usage.fallback_reason = "full", reason
        self._loaded = []  # what is not placed yet is not needed

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

    def clocked(self, steps: Steps) -> Steps:
        """The same steps. What others do between them counts as `queue`, unless this one waits for a layer anyway."""
        with closing(steps):
            while True:
                try:
                    pause = next(steps)
                except StopIteration as stop:
                    return stop.value  # type: ignore[no-any-return]
                if pause is not None:
                    yield pause
                    continue
                with self.timed("queue"):
                    yield None

    def device_seconds(self) -> float:
        """How long the device took for `usage.work`."""
        return sum(self.timings.get(phase, 0.0) for phase in ("assemble", "stage1", "stage2")) / 1000

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the wall time of the block to `timings[phase]`, in milliseconds, less that of phases within it."""
        self._lap()
        self._phases.append(phase)
        try:
            yield
            if self.model.device.type == "cuda" and len(self._phases) == 1:
                torch.cuda.synchronize(self.model.device)  # else the next phase would wait for this one's work
        finally:
            self._lap()
            self._phases.pop()

    def _lap(self) -> None:
        now = time.perf_counter()
        if self._phases:
            phase = self._phases[-1]
            self.timings[phase] = self.timings.get(phase, 0.0) + (now - self._mark) * 1000
        self._mark = now
