"""What the engine loads from: the store, and behind it the computation of what no tier holds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from weakref import WeakValueDictionary

from cache_store.base import Chunk, ChunkKV, LoadedChunk, Pause, Waiting
from cache_store.tiered import TieredStore

_PATIENCE_SECONDS = 0.005  # how long the device thread waits before it looks for something else to do

Encode = Callable[[Chunk], Generator[Pause, None, ChunkKV]]


class ChunkSource:
    """A KVSource that never misses. `encode` computes a chunk in steps; the service injects it.

    One computation per missing chunk: whoever needs a chunk that is being computed drives the same computation on, and
    it goes on with the others when one of them is aborted. All callers live on the one thread that owns the device.
    """

    def __init__(self, store: TieredStore, encode: Encode) -> None:
        self._store = store
        self._encode = encode
        self._running: WeakValueDictionary[str, _Computation] = WeakValueDictionary()

    def prefetch(self, chunks: Sequence[Chunk]) -> object:
        """See KVSource.prefetch."""
        return [self._store.fetch(chunk) for chunk in chunks]

    def load(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """See KVSource.load. The result is in the store, or on its way there."""
        found = self._store.fetch(chunk)
        while not found.wait(0, _PATIENCE_SECONDS):
            yield Waiting(found, 0)
        kv, tier = found.kv, found.tier
        if kv is not None and tier is not None:
            return LoadedChunk(kv, tier, found.faults, None if found.over else found)
        computed = yield from self.compute(chunk)
        return LoadedChunk(computed.kv, computed.tier, found.faults)

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """See KVSource.locate_many. What no tier holds counts as a miss of each: it will be computed, not asked for."""
        places, faults = self._store.locate_many(chunks)
        for store in (self._store, *self._store.tiers):
            store.stats.count("misses", places.count(None))
        return places, faults

    def compute(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """See KVSource.compute. The result is in the store, or on its way there."""
        computation = self._running.get(chunk.key)
        if computation is None:
            computation = _Computation(self._encode(chunk))
            self._running[chunk.key] = computation
        try:
            while not computation.step():
                yield None
        except Exception:
            # Others that drive this computation fail with it; whoever comes later starts anew. The traceback keeps the
            # computation alive, so the weak entry would not vanish by itself.
            if self._running.get(chunk.key) is computation:
                del self._running[chunk.key]
            raise
        assert computation.result is not None
        if computation.fresh():
            self._store.put(chunk, computation.result)
        return LoadedChunk(computation.result, "computed")


class _Computation:
    """A computation of one chunk's KV that several requests may drive, a step at a time."""

    def __init__(self, steps: Generator[Pause, None, ChunkKV]) -> None:
        self.result: ChunkKV | None = None
        self._steps = steps
        self._error: Exception | None = None
        self._taken = False

    def step(self) -> bool:
        """Takes one step, if any is left; True when the result is there. Raises what the computation raised."""
        if self._error is not None:
            raise self._error
        if self.result is None:
            try:
                next(self._steps)
            except StopIteration as stop:
                self.result = stop.value
            except Exception as error:
                self._error = error
                raise
        return self.result is not None

    def fresh(self) -> bool:
        """True once: for the driver that is to store the result."""
        taken, self._taken = self._taken, True
        return not taken
