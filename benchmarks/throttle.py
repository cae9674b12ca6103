"""A tier as slow as one likes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence

from cache_store.base import KEEP, OWN_MEMORY, Chunk, ChunkKV, KVStore, Landing, Retention, StoreStats


class TokenBucket:
    """Lets bytes through at a rate, with a burst of 10 ms."""

    def __init__(self, rate: float) -> None:
        """`rate`: bytes per second; infinity lets everything through."""
        self._rate = rate
        self._burst = self._left = rate * 0.01
        self._then = time.monotonic()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Waits until so many bytes may pass. Thread-safe: those who wait share the rate."""
        if self._rate == float("inf"):
            return
        with self._lock:
            now = time.monotonic()
            self._left = min(self._burst, self._left + (now - self._then) * self._rate) - nbytes
            self._then = now
            wait = -self._left / self._rate
        if wait > 0:
            time.sleep(wait)


class Throttled:
    """A tier behind a token bucket, which gives an entry layer by layer as media do.

    Only `held` is visible, and once it is frozen writes are dropped.
    """

    name = "disk"

    def __init__(self, inner: KVStore, rate: float) -> None:
        self.stats = StoreStats()
        self.held: set[str] = set()
        self.frozen = False
        self._inner = inner
        self._bucket = TokenBucket(rate)

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        """See KVStore.get."""
        start = time.perf_counter()
        kv = self._inner.get(chunk, landing) if chunk.key in self.held else None
        if kv is None:
            self.stats.misses += 1
            return None
        for layer in range(kv.layout.layers):
            self._bucket.take(kv.layout.block_bytes(kv.tokens))
            landing.arrived(kv, layer + 1)
        self.stats.hit(kv.nbytes, start)
        return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See KVStore.holds."""
        return [chunk.key in self.held for chunk in chunks]

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        """See KVStore.put."""
        if not self.frozen:
            self._inner.put(chunk, kv, retention)
            self.held.add(chunk.key)

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        """See KVStore.retain."""

    def delete(self, keys: Iterable[str]) -> None:
        """See KVStore.delete."""
        for key in keys:
            self.held.discard(key)

    def close(self) -> None:
        """See KVStore.close."""
