"""What a chunk's KV is, what it is called, and what a store of it must do."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cache_store.codec import CODECS, Packed, Shape

ALIGN = 4096  # bytes, of what begins a block
_ALIGNMENT = 64  # bytes, of memory that torch computes with


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of context to be loaded: its content-addressed key and its token ids."""

    key: str
    token_ids: tuple[int, ...]


def padded(nbytes: int) -> int:
    """The least multiple of ALIGN that holds so many bytes."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape, dtype and codec of one model's KV. Sizes follow from it and the token count, never from stored bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    codec: str = "raw"

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of one layer's K and V for `tokens` tokens, as the model has them."""
        return 2 * self.kv_heads * tokens * self.head_dim * self.dtype.itemsize

    def block_bytes(self, tokens: int) -> int:
        """Bytes of one layer's K and V for `tokens` tokens, as the codec writes them."""
        return CODECS[self.codec].block_bytes(Shape(self.kv_heads, tokens, self.head_dim), self.dtype)

    def stride(self, tokens: int) -> int:
        """Bytes from one layer's block to the next one's."""
        return padded(self.block_bytes(tokens))


@dataclass(frozen=True, slots=True, eq=False)
class ChunkKV:
    """One chunk's KV as it is kept: per layer a block of layout.block_bytes(tokens); K carries no position.

    body: uint8 [layers, layout.stride(tokens)], contiguous, zero behind each block. Never written to after
    construction: a request copies into its own slots.
    """

    layout: KVLayout
    tokens: int
    body: Tensor

    @classmethod
    def pack(cls, layers: Sequence[Tensor], codec: str = "raw") -> ChunkKV:
        """Encodes per layer K and V, [2, kv_heads, tokens, head_dim] in the model's dtype."""
        _, kv_heads, tokens, head_dim = layers[0].shape
        layout = KVLayout(len(layers), kv_heads, head_dim, layers[0].dtype, codec)
        size, device = layout.layers * layout.stride(tokens), layers[0].device
        body = host_memory(size) if device.type == "cpu" else torch.empty(size, dtype=torch.uint8, device=device)
        kv = cls(layout, tokens, body.view(layout.layers, -1))
        kv.body[:, layout.block_bytes(tokens) :] = 0
        for index, layer in enumerate(layers):
            kv.block(index).copy_(CODECS[codec].encode(layer))
        return kv

    def recoded(self, codec: str) -> ChunkKV:
        """The same by another codec, of what this one has kept."""
        return self.pack([self.layer(index) for index in range(self.layout.layers)], codec)

    @property
    def shape(self) -> Shape:
        """Of one layer's K."""
        return Shape(self.layout.kv_heads, self.tokens, self.layout.head_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, without what pads them."""
        return self.layout.layers * self.layout.block_bytes(self.tokens)

    @property
    def resident(self) -> int:
        """Memory that is kept alive, which may be that of a whole entry."""
        return self.body.untyped_storage().nbytes()

    def block(self, index: int) -> Tensor:
        """A layer's block, uint8 [layout.block_bytes(tokens)]: a view."""
        return self.body[index, : self.layout.block_bytes(self.tokens)]

    def layer(self, index: int) -> Tensor:
        """A layer's K and V, [2, kv_heads, tokens, head_dim]: a view in the model's dtype for raw, else new, fp32."""
        return CODECS[self.layout.codec].decode(self.block(index), self.shape, self.layout.dtype)

    def unpack(self, index: int) -> Packed:
        """The parts of a layer's block, as views."""
        return CODECS[self.layout.codec].unpack(self.block(index), self.shape, self.layout.dtype)

    def read_into(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copies a layer's K and V into `k` and `v`, each [kv_heads, tokens, head_dim], of any dtype and device."""
        keys, values = self.layer(layer)
        k.copy_(keys)
        v.copy_(values)


@dataclass(slots=True)
class StoreStats:
    """Counters of one tier since start, and its present size. `service/metrics.py` exports them.

    read_bytes, read_seconds: of hits, so their quotient is the rate at which the tier gives entries back, verified.
    Time in which several were read at once counts once.
    """

    entries: int = 0
    nbytes: int = 0
    hits: int = 0
    misses: int = 0
    writes: int = 0
    dropped_writes: int = 0
    evictions: int = 0
    errors: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    rejected: Counter[str] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)
    _read_until: float = 0.0

    def count(self, name: str, amount: int = 1) -> None:
        """Adds to a counter. Thread-safe, as all of these."""
        with self._lock:
            setattr(self, name, getattr(self, name) + amount)

    def hit(self, nbytes: int, start: float) -> None:
        """Counts an entry that was found, whose reading began at `start` of time.perf_counter() and ends now."""
        with self._lock:
            end = time.perf_counter()
            self.hits += 1
            self.read_bytes += nbytes
            self.read_seconds += end - max(start, self._read_until)
            self._read_until = end

    def reject(self, reason: str) -> None:
        """Counts an entry that was not what its key claims."""
        with self._lock:
            self.rejected[reason] += 1


@dataclass(frozen=True, slots=True)
class Retention:
    """How long an entry is to be kept: pinned ones are not evicted, `seconds` after its writing it is gone."""

    pinned: bool = False
    seconds: float | None = None


KEEP = Retention()


class Landing(Protocol):
    """Where a read puts what it finds, and who hears how far it is."""

    def buffer(self, nbytes: int) -> Tensor:
        """Uninitialised host memory, uint8 [nbytes]. May wait until there is room for it."""

    def moving(self) -> None:
        """Some bytes have come, but no whole layer yet."""

    def arrived(self, kv: ChunkKV, layers: int) -> None:
        """The first `layers` layers of `kv` are there and verified; the others may follow."""


def host_memory(nbytes: int) -> Tensor:
    """Uninitialised memory, uint8 [nbytes], aligned as torch aligns.

    Not torch.empty: before 2.38 glibc does not use a freed block again for an aligned one of the same size, so the
    process would grow with each entry, and every page be a new one (1.2 GB/s instead of 2.2 in 64 loads at once).
    """
    block = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -block.ctypes.data % _ALIGNMENT
    return torch.from_numpy(block[start : start + nbytes])


class OwnMemory:
    """The landing of a read that nobody follows."""

    def buffer(self, nbytes: int) -> Tensor:
        """See Landing."""
        return host_memory(nbytes)

    def moving(self) -> None:
        """See Landing."""

    def arrived(self, kv: ChunkKV, layers: int) -> None:
        """See Landing."""


OWN_MEMORY: Landing = OwnMemory()


class KVStore(Protocol):
    """One tier, or several behind the same interface. Thread-safe.

    Every method may raise StoreUnavailable; a corrupt entry is removed, counted and reported as a miss.
    """

    name: str
    stats: StoreStats

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        """The chunk's verified KV, or None, also when only some of its layers arrived."""

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Which of the chunks are here, without loading or verifying any."""

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        """Publishes atomically: no reader ever sees a part of it."""

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        """Changes how long entries are kept, those that are here; a time to live counts from now."""

    def delete(self, keys: Iterable[str]) -> None:
        """Removes the entries; unknown keys are fine."""

    def close(self) -> None:
        """Releases threads, connections and files."""


class Arrival(Protocol):
    """A chunk that is being read; see cache_store.fetch.Fetch."""

    @property
    def kv(self) -> ChunkKV | None:
        """To be read up to the layers that have arrived; None when reading has failed."""

    @property
    def faults(self) -> tuple[str, ...]:
        """What failed on the way so far."""

    def wait(self, layer: int, seconds: float) -> bool:
        """True when the layer can be read or nothing more will arrive; waits for that up to `seconds`."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a computation yields when it cannot go on before a layer has arrived: others had better take their steps."""

    arrival: Arrival
    layer: int

    @property
    def over(self) -> bool:
        """It can go on."""
        return self.arrival.wait(self.layer, 0.0)


Pause = Waiting | None  # what computations yield between their steps


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A chunk's KV as found, or as it is being read, which `arrival` then tells.

    `tier` is where it came from ("computed" when nowhere), `faults` what failed on the way.
    """

    kv: ChunkKV
    tier: str
    faults: tuple[str, ...] = ()
    arrival: Arrival | None = None

    def read_into(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ChunkKV.read_into."""
        self.kv.read_into(layer, k, v)


class KVSource(Protocol):
    """What the engine loads from. Never misses: what no tier holds is computed."""

    def prefetch(self, chunks: Sequence[Chunk]) -> object:
        """Starts reading. What it returns is to be kept until the chunks were loaded: when it goes, reading ends."""

    def load(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """Yields between steps of device work, so that the caller may do something else or give up.

        Returns as soon as the first layer can be read. While it waits for that each step takes a few milliseconds.
        """

    def compute(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """The same without asking the tiers, for a chunk that is computed faster than read, or whose tier failed."""

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """The name of the tier that each chunk would come from now, without loading it; None where none holds it.

        And what failed on the way: a tier that cannot be asked holds nothing.
        """


class HeldChunks:
    """A KVSource of chunks that are in memory, by key."""

    def __init__(self, chunks: dict[str, ChunkKV]) -> None:
        self.chunks = chunks

    def prefetch(self, chunks: Sequence[Chunk]) -> object:
        """See KVSource.prefetch."""
        return None

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """See KVSource.locate_many."""
        return ["memory" if chunk.key in self.chunks else None for chunk in chunks], ()

    def load(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """See KVSource.load."""
        yield from ()
        return LoadedChunk(self.chunks[chunk.key], "memory")

    compute = load
