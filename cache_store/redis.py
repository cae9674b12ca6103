"""Redis tier: an entry cut into values of at most 4 MiB, for larger ones are slow to move (a measured cliff at 8 MiB).

The server evicts by itself (`maxmemory`, `allkeys-lfu`); a missing slice makes the entry a miss. A tier that fails
three times in a row is left alone for five seconds, so that a sick Redis costs a query nothing after the first
moments.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cache_store import entry
from cache_store.base import Chunk, ChunkKV, KVLayout, StoreStats
from errors import CorruptEntry, StoreUnavailable

VALUE_BYTES = 4 << 20
MAX_SLICES = 256  # 1 GiB an entry; larger ones are not kept here
_FAILURES, _PAUSE_SECONDS = 3, 5.0

T = TypeVar("T")


class RedisStore:
    """Entries in the Redis at `url`; no operation waits longer than `timeout` seconds for a byte."""

    name = "redis"

    def __init__(self, url: str, layout: KVLayout, timeout: float = 0.25) -> None:
        self.stats = StoreStats()
        self._layout = layout
        self._client = redis.Redis.from_url(
            url,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=Retry(NoBackoff(), 0),
            decode_responses=False,
        )
        self._lock = threading.Lock()
        self._failures = 0
        self._paused_until = 0.0

    def get(self, chunk: Chunk) -> ChunkKV | None:
        start = time.perf_counter()
        size = entry.entry_bytes(self._layout, len(chunk.token_ids))
        count = -(-size // VALUE_BYTES)
        if count > MAX_SLICES:
            return None

        def fetch() -> list[bytes | None]:
            pipeline = self._client.pipeline(transaction=False)
            for index in range(count):
                pipeline.get(_name(chunk.key, index))
            return pipeline.execute()

        slices = [part for part in self._guarded(fetch) if part is not None]
        if len(slices) < count:
            self.stats.misses += 1
            return None
        try:
            kv = entry.decode(bytearray(b"".join(slices)), chunk, self._layout)
        except CorruptEntry as error:
            self.stats.rejected[error.reason] += 1
            self.stats.misses += 1
            self.delete([chunk.key])
            return None
        self.stats.hits += 1
        self.stats.read_bytes += kv.nbytes
        self.stats.read_seconds += time.perf_counter() - start
        return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        def ask() -> list[int]:
            pipeline = self._client.pipeline(transaction=False)
            for chunk in chunks:
                pipeline.exists(_name(chunk.key, 0))
            return pipeline.execute()

        return [bool(found) for found in self._guarded(ask)]

    def put(self, chunk: Chunk, kv: ChunkKV) -> None:
        data = memoryview(entry.encode(chunk, kv, self._layout))
        count = -(-len(data) // VALUE_BYTES)
        if count > MAX_SLICES:
            self.stats.dropped_writes += 1
            return
        for index in range(count):
            part = data[index * VALUE_BYTES : (index + 1) * VALUE_BYTES]
            self._guarded(partial(self._client.set, _name(chunk.key, index), part))
        self.stats.writes += 1

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            names = [_name(key, index) for index in range(MAX_SLICES)]
            self._guarded(partial(self._client.unlink, *names))

    def close(self) -> None:
        self._client.close()

    def _guarded(self, call: Callable[[], T]) -> T:
        """Runs `call`, maps its errors, and pauses the tier after repeated ones."""
        with self._lock:
            if time.monotonic() < self._paused_until:
                raise StoreUnavailable("redis tier: paused after repeated failures")
        try:
            result = call()
        except redis.RedisError as error:
            with self._lock:
                self.stats.errors += 1
                self._failures += 1
                if self._failures >= _FAILURES:
                    self._paused_until = time.monotonic() + _PAUSE_SECONDS
            raise StoreUnavailable(f"redis tier: {type(error).__name__}: {error}") from error
        self._failures = 0
        return result


def _name(key: str, index: int) -> str:
    # The hash tag keeps the slices of an entry in one cluster slot.
    return f"prophetkv:{{{key}}}:{index}"
