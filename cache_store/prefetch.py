"""Loading ahead: what a request will need is read while its prompt is tokenised and while it waits for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from cache_store.base import Chunk
from cache_store.fetch import Fetch
from cache_store.tiered import TieredStore

_TRIAL_SECONDS = 10.0  # between reads of a tier that is not worth it


class Prefetcher:
    """Begins fetches and keeps them until the request has loaded its chunks or ends: who asks the store joins them.

    At most `max_bytes` are on their way or kept; what exceeds them is left to the request itself. Of a tier that is not
    worth it one chunk is read now and then all the same, beyond these bytes: else nobody would learn that it has become
    fast.
    """

    def __init__(
        self, store: TieredStore, token_bytes: int, max_bytes: int, worth: Callable[[Chunk, str], bool]
    ) -> None:
        """`token_bytes`: KV of a token. `worth`: whether a chunk had better be loaded from a tier than computed."""
        self._store = store
        self._token_bytes = token_bytes
        self._max_bytes = max_bytes
        self._worth = worth
        self._lock = threading.Lock()
        self._kept: dict[str, list[Fetch]] = {}
        self._tried: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(1, "kv-prefetch")  # asks where chunks lie, which may take a round trip

    def begin(self, owner: str, chunks: Sequence[Chunk], choosy: bool) -> None:
        """Begins to load, for `owner`. `choosy`: only what is worth loading. Returns at once."""
        with self._lock:
            self._kept[owner] = []
        self._pool.submit(self._run, owner, chunks, choosy)

    def end(self, owner: str) -> None:
        """Forgets what only this owner wanted; what has not begun is not read. Unknown owners are fine."""
        with self._lock:
            self._kept.pop(owner, None)

    def held(self) -> int:
        """Bytes on their way or kept."""
        with self._lock:
            return self._held()

    def close(self) -> None:
        """Begins nothing more."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, owner: str, chunks: Sequence[Chunk], choosy: bool) -> None:
        places, _ = self._store.locate_many(chunks)
        for chunk, place in zip(chunks, places, strict=True):
            if place is None:
                continue
            now, trial = time.monotonic(), choosy and not self._worth(chunk, place)
            if trial and now - self._tried.get(place, float("-inf")) < _TRIAL_SECONDS:
                continue
            with self._lock:
                kept = self._kept.get(owner)
                if kept is None:
                    return  # the request needs nothing any more
                if trial:
                    self._tried[place] = now
                elif self._held() + len(chunk.token_ids) * self._token_bytes > self._max_bytes:
                    continue
                kept.append(self._store.fetch(chunk))

    def _held(self) -> int:
        """Under the lock."""
        fetches = {id(fetch): fetch for kept in self._kept.values() for fetch in kept}
        return sum(len(fetch.chunk.token_ids) for fetch in fetches.values()) * self._token_bytes
