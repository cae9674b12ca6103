"""KV that outlives a request: the system prefix, kept exactly, and chunks, each computed in isolation behind it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator

import torch
from torch import Tensor

from cache_store.base import Chunk, ChunkKV
from engine.model import Model, Step, token_tensor
from engine.slots import Slots

_PREFIXES = 4  # a service has one; evaluations switch between a few


class PrefixCache:
    """KV of the last few system prefixes, at their true positions 0..len-1."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._kept: OrderedDict[tuple[int, ...], Tensor] = OrderedDict()

    def copy_into(self, prefix: tuple[int, ...], slots: Slots) -> Generator[None, None, None]:
        """Fills slots 0..len(prefix)-1; computes the prefix's KV when it is not kept."""
        if not prefix:
            return
        kept = self._kept.get(prefix)
        if kept is None:
            own = self._model.new_slots(len(prefix))
            rows = self._model.rows(torch.arange(len(prefix)))
            yield from self._model.forward(token_tensor(prefix), Step(rows, own, kv_only=True))
            kept = self._kept[prefix] = own.data
            if len(self._kept) > _PREFIXES:
                self._kept.popitem(last=False)
        self._kept.move_to_end(prefix)
        slots.data[:, :, :, : len(prefix)] = kept


def encode_chunk(
    model: Model, prefixes: PrefixCache, prefix: tuple[int, ...], chunk: Chunk
) -> Generator[None, None, ChunkKV]:
    """Prefills prefix + chunk and keeps the chunk's K and V, K turned back to angle 0 in fp32.

    Yields between layers.
    """
    start, stop = len(prefix), len(prefix) + len(chunk.token_ids)
    slots = model.new_slots(stop)
    yield from prefixes.copy_into(prefix, slots)
    positions = torch.arange(start, stop)
    step = Step(model.rows(positions), slots, kv_only=True)
    yield from model.forward(token_tensor(chunk.token_ids), step)
    turn_back = model.rotation(-positions)
    layers = []
    for layer in range(model.layout.layers):
        k, v = (part[0, :, start:stop] for part in slots.read(layer))
        layers.append(torch.stack((turn_back(k).to(model.dtype), v)).cpu())
    return ChunkKV(tuple(layers))
