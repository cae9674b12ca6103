"""What a chunk's KV is, what it is called, and what a store of it must do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of context to be loaded: its content-addressed key and its token ids."""

    key: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape and dtype of one model's KV. Sizes follow from it and the token count, never from stored bytes."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def layer_bytes(self, tokens: int) -> int:
        """Bytes of one layer's K and V for `tokens` tokens."""
        return 2 * self.kv_heads * tokens * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ChunkKV:
    """One chunk's KV: per layer a tensor [2 (K, V), kv_heads, tokens, head_dim]; K carries no position.

    Never written to after construction: a request copies into its own slots.
    """

    layers: tuple[Tensor, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return self.layers[0].shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def read_into(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Copies a layer's K and V into `k` and `v`, each [kv_heads, tokens, head_dim], of any dtype and device."""
        k.copy_(self.layers[layer][0])
        v.copy_(self.layers[layer][1])


@dataclass(slots=True)
class StoreStats:
    """Counters of one tier since start, and its present size. `service/metrics.py` exports them.

    read_bytes, read_seconds: of hits, so their quotient is the rate at which the tier gives entries back, verified.
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


class KVStore(Protocol):
    """One tier, or several behind the same interface. Thread-safe.

    Every method may raise StoreUnavailable; a corrupt entry is removed, counted and reported as a miss.
    """

    name: str
    stats: StoreStats

    def get(self, chunk: Chunk) -> ChunkKV | None:
        """The chunk's verified KV, or None."""

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        """Which of the chunks are here, without loading or verifying any."""

    def put(self, chunk: Chunk, kv: ChunkKV) -> None:
        """Publishes atomically: no reader ever sees a part of it."""

    def delete(self, keys: Iterable[str]) -> None:
        """Removes the entries; unknown keys are fine."""

    def close(self) -> None:
        """Releases threads, connections and files."""


@dataclass(frozen=True, slots=True)
class LoadedChunk:
    """A chunk's KV as found:

    `tier` is where it came from ("computed" when nowhere), `faults` what failed on the way.
    """

    kv: ChunkKV
    tier: str
    faults: tuple[str, ...] = ()

    def read_into(self, layer: int, k: Tensor, v: Tensor) -> None:
        """See ChunkKV.read_into."""
        self.kv.read_into(layer, k, v)


class KVSource(Protocol):
    """What the engine loads from. Never misses: what no tier holds is computed."""

    def load(self, chunk: Chunk) -> Generator[None, None, LoadedChunk]:
        """Yields between steps of device work, so that the caller may do something else or give up."""
