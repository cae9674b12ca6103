"""Loading ahead: what a request will need is read while its prompt is tokenised and while it waits for the device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field

from cache_store.base import Chunk
from cache_store.fetch import Fetch
from cache_store.tiered import TieredStore

_READERS = 4  # requests that are read for at a time; the chunks of one come in turn
_TRIAL_SECONDS = 10.0  # between reads of a tier that is not worth it
_SLICE_SECONDS = 0.01  # how long `take` waits at a time: a caller may give up in between


@dataclass(slots=True)
class _Load:
    chunk: Chunk
    nbytes: int
    owners: set[str]
    found: Future[Fetch] = field(default_factory=Future)


class Prefetcher:
    """Reads through a store on threads of its own, and keeps what it found until the request takes it or ends.

    At most `max_bytes` are on their way or kept; what exceeds them is left to the request itself. A read that has begun
    is not interrupted. Of a tier that is not worth it one chunk is read now and then all the same, for nobody: else
    nobody would learn that it has become fast.
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
        self._loads: dict[str, _Load] = {}
        self._owned: dict[str, list[str]] = {}
        self._nbytes = 0
        self._tried: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-prefetch")

    def begin(self, owner: str, chunks: Sequence[Chunk], choosy: bool) -> None:
        """Begins to load, for `owner`. `choosy`: only what is worth loading. Returns at once."""
        new = []
        with self._lock:
            keys = self._owned.setdefault(owner, [])
            for chunk in chunks:
                load = self._loads.get(chunk.key)
                if load is None:
                    nbytes = len(chunk.token_ids) * self._token_bytes
                    if self._nbytes + nbytes > self._max_bytes:
                        continue
                    load = self._loads[chunk.key] = _Load(chunk, nbytes, set())
                    self._nbytes += nbytes
                    new.append(load)
                load.owners.add(owner)
                keys.append(chunk.key)
        if new:
            self._pool.submit(self._run, new, choosy)

    def end(self, owner: str) -> None:
        """Forgets what only this owner wanted, and does not read what has not begun. Unknown owners are fine."""
        with self._lock:
            for key in self._owned.pop(owner, ()):
                load = self._loads.get(key)
                if load is not None:
                    load.owners.discard(owner)
                    if not load.owners:
                        self._drop(load)

    def take(self, chunk: Chunk) -> Generator[None, None, Fetch]:
        """`TieredStore.lookup`, read ahead if that has begun. Yields while a read is on its way."""
        with self._lock:
            load = self._loads.get(chunk.key)
        if load is None or load.found.cancel():  # nobody has begun: then it is quicker to read it here
            return self._store.lookup(chunk)
        while not wait_for([load.found], _SLICE_SECONDS).done:
            yield
        return load.found.result()

    def ready(self, chunk: Chunk) -> bool:
        """The chunk is here: taking it costs nothing."""
        with self._lock:
            load = self._loads.get(chunk.key)
        if load is None or load.found.cancelled() or not load.found.done():
            return False
        return load.found.exception() is None and load.found.result().kv is not None

    def held(self) -> int:
        """Bytes on their way or kept."""
        return self._nbytes

    def close(self) -> None:
        """Waits for reads that have begun."""
        self._pool.shutdown(cancel_futures=True)

    def _run(self, loads: list[_Load], choosy: bool) -> None:
        places = self._store.locate_many([load.chunk for load in loads])
        spurned: dict[str, Chunk] = {}  # a chunk of each tier that is not worth it
        for load, place in zip(loads, places, strict=True):
            worth = place is not None and (not choosy or self._worth(load.chunk, place))
            if not worth:
                with self._lock:
                    self._drop(load)
            if place is not None and not worth:
                spurned[place] = load.chunk
        for load in loads:
            if load.found.set_running_or_notify_cancel():
                try:
                    load.found.set_result(self._store.lookup(load.chunk))
                except Exception as error:
                    load.found.set_exception(error)
        for tier, chunk in spurned.items():
            if time.monotonic() - self._tried.get(tier, float("-inf")) >= _TRIAL_SECONDS:
                self._tried[tier] = time.monotonic()
                self._store.lookup(chunk)

    def _drop(self, load: _Load) -> None:
        """Under the lock."""
        load.found.cancel()
        if self._loads.get(load.chunk.key) is load:
            del self._loads[load.chunk.key]
            self._nbytes -= load.nbytes
