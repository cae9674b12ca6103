"""KV that outlives a request: prefixes of prompts, kept exactly, and chunks, each computed in isolation."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Generator

import torch
from torch import Tensor

from cache_store.base import Chunk, ChunkKV, Pause
from engine.base import Work
from engine.controller import Controller
from engine.forward import ForwardPass
from engine.model import Model, token_tensor
from engine.slots import Slots
from errors import NumericalFault

_FEWEST = 2  # short prompts that are kept, whatever they take: the system prefix, and it with the glue of one request


class PrefixCache:
    """KV at its true positions 0..len-1, exact: of short prompts and of whole ones, each the last used within a budget.

    Short are the system prefix, which serves every strategy, and it with glue behind it, for Stage I: one for each
    number of chunks. Only the strategy `prefix` keeps whole prompts.
    """

    def __init__(self, model: Model, max_bytes: int = 512 << 20, short_bytes: int = 256 << 20) -> None:
        """`max_bytes`: of whole prompts. `short_bytes`: of short ones, the two used last excepted."""
        self._model = model
        self._max_bytes = max_bytes
        self._short_bytes = short_bytes
        self._system: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()
        self._prompts: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def copy_into(self, prefix: tuple[int, ...], slots: Slots) -> Generator[Pause, None, None]:
        """Fills slots 0..len(prefix)-1; computes the prefix's KV when it is not kept."""
        if prefix:
            slots.data[:, :, :, : len(prefix)] = yield from self.exact(prefix)

    def exact(self, ids: tuple[int, ...]) -> Generator[Pause, None, Tensor]:
        """KV of a short prompt, which are kept, [layers, 2, kv_heads, tokens, head_dim]. Not to be written to."""
        kept = self._system.get(ids)
        if kept is None:
            own = self._model.new_slots(len(ids))
            run = ForwardPass(self._model, token_tensor(ids), torch.arange(len(ids)), own)
            yield from run.run(self._model.layout.layers - 1)
            run.write_kv()
            kept = self._system[ids] = own.data
            _forget_beyond(self._short_bytes, self._system, _FEWEST)
        self._system.move_to_end(ids)
        return kept

    def copy_longest(self, ids: tuple[int, ...], slots: Slots) -> int:
        """Fills the slots of the longest beginning that `ids` share with a kept prompt; returns its length.

        At least the last token is left to be computed.
        """
        best, length = None, 0
        for prompt in self._prompts:
            shared = _shared_length(prompt, ids)
            if shared > length:
                best, length = prompt, shared
        if best is None:
            return 0
        length = min(length, len(ids) - 1)
        self._prompts.move_to_end(best)
        slots.data[:, :, :, :length] = self._prompts[best][:, :, :, :length]
        return length

    def keep(self, ids: tuple[int, ...], slots: Slots) -> None:
        """Keeps a prompt whose KV in `slots` is exact, and forgets the least recently used beyond the budget."""
        data = slots.data[:, :, :, : len(ids)].clone()
        self._prompts.pop(ids, None)
        self._prompts[ids] = data
        _forget_beyond(self._max_bytes, self._prompts)


def _forget_beyond(max_bytes: int, kept: OrderedDict[tuple[int, ...], Tensor], fewest: int = 0) -> None:
    """Drops those used longest ago. Whoever uses one of them still has it."""
    held = sum(data.nbytes for data in kept.values())
    while held > max_bytes and len(kept) > fewest:
        held -= kept.popitem(last=False)[1].nbytes


def _shared_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    count = min(len(one), len(other))
    differing = (token_tensor(one[:count]) != token_tensor(other[:count])).nonzero()
    return int(differing[0]) if len(differing) else count


def encode_chunk(
    model: Model,
    prefixes: PrefixCache,
    prefix: tuple[int, ...],
    chunk: Chunk,
    codec: str = "raw",
    work: Work | None = None,
) -> Generator[Pause, None, ChunkKV]:
    """Prefills prefix + chunk and keeps the chunk's K and V, K turned back to angle 0 in fp32, as `codec` writes them.

    Yields between layers, and adds what it did to `work`, except for the prefix. Raises NumericalFault when the model
    overflows on the chunk.
    """
    start, stop = len(prefix), len(prefix) + len(chunk.token_ids)
    slots = model.new_slots(stop)
    yield from prefixes.copy_into(prefix, slots)
    positions = torch.arange(start, stop)
    run = ForwardPass(model, token_tensor(chunk.token_ids), positions, slots, work)
    yield from run.run(model.layout.layers - 1)
    run.write_kv()
    run.work.turned += model.layout.layers * model.layout.layer_bytes(len(positions))
    turn_back = model.rotation(-positions)
    layers = []
    for layer in range(model.layout.layers):
        k, v = (part[0, :, start:stop] for part in slots.read(layer))
        layers.append(torch.stack((turn_back(k, layer).to(model.dtype), v)).cpu())
    if not all(bool(torch.isfinite(layer).all()) for layer in layers):
        raise NumericalFault("the model gives NaN or infinite keys or values for a chunk of the context")
    return ChunkKV.pack(layers, codec)


def encode_observed(
    model: Model, prefixes: PrefixCache, prefix: tuple[int, ...], codec: str, controller: Controller, chunk: Chunk
) -> Generator[Pause, None, ChunkKV]:
    """`encode_chunk`, of whose cost the controller learns: the time of its own steps, not of what ran between them."""
    work, seconds = Work(), 0.0
    steps = encode_chunk(model, prefixes, prefix, chunk, codec, work)
    while True:
        start = time.perf_counter()
        try:
            next(steps)
        except StopIteration as stop:
            controller.observe(work, seconds + time.perf_counter() - start)
            return stop.value  # type: ignore[no-any-return]
        seconds += time.perf_counter() - start
        yield None
