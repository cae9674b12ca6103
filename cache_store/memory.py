"""Memory tiers: on the host, pinned when a GPU is to copy from it, or on the device itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

import torch

from cache_store.base import KEEP, OWN_MEMORY, Chunk, ChunkKV, Landing, Retention, StoreStats
from cache_store.ledger import Ledger, Policy
from errors import StoreUnavailable

_HOST = torch.device("cpu")


class MemoryStore:
    """Holds ChunkKV objects up to `budget` bytes; an entry larger than the budget is not kept.

    `device`: where the blocks lie. `pinned`: host memory is page-locked, so that a GPU can copy it by itself.
    """

    def __init__(
        self,
        budget: int,
        policy: Policy = "lru",
        name: str = "memory",
        device: torch.device = _HOST,
        pinned: bool = False,
    ) -> None:
        self.name = name
        self.stats = StoreStats()
        self._device = device
        self._pinned = pinned
        self._ledger = Ledger(budget, policy)
        self._entries: dict[str, ChunkKV] = {}
        self._lock = threading.Lock()

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        start = time.perf_counter()
        with self._lock:
            if not self._ledger.touch(chunk.key):
                self._remove(chunk.key)
            kv = self._entries.get(chunk.key)
            if kv is None:
                self.stats.count("misses")
                return None
            self.stats.hit(kv.nbytes, start)
            return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        with self._lock:
            return [chunk.key in self._entries and not self._ledger.overdue(chunk.key) for chunk in chunks]

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        kv = self._moved(kv)
        with self._lock:
            for key in self._ledger.expired():
                self._remove(key)
            if self._ledger.admit(chunk.key, kv.resident, kv.tokens, retention, self._evict) is None:
                self._remove(chunk.key)
                self.stats.count("dropped_writes")
                return
            self._entries[chunk.key] = kv
            self.stats.count("writes")
            self._take_stock()

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        self._ledger.retain(keys, retention)

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

    def close(self) -> None:
        self.delete(list(self._entries))

    def _moved(self, kv: ChunkKV) -> ChunkKV:
        try:
            if self._pinned and not kv.body.is_pinned():
                return ChunkKV(kv.layout, kv.tokens, kv.body.pin_memory())
            if kv.body.device != self._device:
                return ChunkKV(kv.layout, kv.tokens, kv.body.to(self._device))
            return kv
        except (RuntimeError, MemoryError) as error:  # torch has the one for memory of every kind
            self.stats.count("errors")
            raise StoreUnavailable(f"{self.name} tier: {type(error).__name__}: {error}") from error

    def _evict(self, key: str) -> None:
        del self._entries[key]
        self.stats.count("evictions")

    def _remove(self, key: str) -> None:
        self._entries.pop(key, None)
        self._ledger.forget(key)
        self._take_stock()

    def _take_stock(self) -> None:
        self.stats.entries, self.stats.nbytes = len(self._entries), self._ledger.nbytes
