"""Host memory tier: least recently used by bytes."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from cache_store.base import Chunk, ChunkKV, StoreStats


class MemoryStore:
    """Holds ChunkKV objects up to `budget` bytes; an entry larger than the budget is not kept."""

    name = "memory"

    def __init__(self, budget: int) -> None:
        self.stats = StoreStats()
        self._budget = budget
        self._entries: OrderedDict[str, ChunkKV] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, chunk: Chunk) -> ChunkKV | None:
        start = time.perf_counter()
        with self._lock:
            kv = self._entries.get(chunk.key)
            if kv is None:
                self.stats.misses += 1
                return None
            self._entries.move_to_end(chunk.key)
            self.stats.hits += 1
            self.stats.read_bytes += kv.nbytes
            self.stats.read_seconds += time.perf_counter() - start
            return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        with self._lock:
            return [chunk.key in self._entries for chunk in chunks]

    def put(self, chunk: Chunk, kv: ChunkKV) -> None:
        with self._lock:
            self._remove(chunk.key)
            if kv.nbytes > self._budget:
                self.stats.dropped_writes += 1
                return
            while self.stats.nbytes + kv.nbytes > self._budget:
                self._remove(next(iter(self._entries)))
                self.stats.evictions += 1
            self._entries[chunk.key] = kv
            self.stats.nbytes += kv.nbytes
            self.stats.entries += 1
            self.stats.writes += 1

    def delete(self, keys: Iterable[str]) -> None:
        with self._lock:
            for key in keys:
                self._remove(key)

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self.stats.entries = self.stats.nbytes = 0

    def _remove(self, key: str) -> None:
        kv = self._entries.pop(key, None)
        if kv is not None:
            self.stats.nbytes -= kv.nbytes
            self.stats.entries -= 1
