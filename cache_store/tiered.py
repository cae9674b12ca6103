"""Several tiers as one store: reads through, promotes, writes behind, and turns a failing tier into a miss."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from cache_store.base import Chunk, ChunkKV, KVStore, StoreStats
from errors import StoreError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lookup:
    """Result of a read through the tiers: which tier answered (None: none), and which failed on the way."""

    kv: ChunkKV | None
    tier: str | None
    faults: tuple[str, ...]


class TieredStore:
    """A KVStore over KVStores, fastest first.

    `put` reaches the first tier at once and the others from a writer thread, whose backlog is bounded by
    `backlog_bytes`, one entry excepted: beyond it a write is dropped and counted, for a query must never wait for a
    slow medium.
    """

    name = "tiered"

    def __init__(self, tiers: Sequence[KVStore], backlog_bytes: int = 256 << 20) -> None:
        self.stats = StoreStats()
        self.tiers = tuple(tiers)
        self._backlog_bytes = backlog_bytes
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._pending_bytes = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write_behind, name="kv-writer", daemon=True)
        self._writer.start()

    def lookup(self, chunk: Chunk) -> Lookup:
        """Asks the tiers in order and promotes a hit into the faster ones."""
        faults = []
        for index, tier in enumerate(self.tiers):
            try:
                kv = tier.get(chunk)
            except StoreError as error:
                log.warning("kv tier %s failed: %s", tier.name, error)
                faults.append(str(error))
                continue
            if kv is not None:
                self.stats.hits += 1
                self._store(self.tiers[:index], chunk, kv)
                return Lookup(kv, tier.name, tuple(faults))
        self.stats.misses += 1
        return Lookup(None, None, tuple(faults))

    def locate(self, chunk: Chunk) -> str | None:
        """The name of the first tier that holds the chunk, without loading it; a tier that fails holds nothing."""
        return self.locate_many([chunk])[0]

    def locate_many(self, chunks: Sequence[Chunk]) -> list[str | None]:
        """`locate` of each chunk, with one question to each tier."""
        found: list[str | None] = [None] * len(chunks)
        for tier in self.tiers:
            missing = [index for index, name in enumerate(found) if name is None]
            if not missing:
                break
            try:
                held = tier.holds([chunks[index] for index in missing])
            except StoreError as error:
                log.warning("kv tier %s failed: %s", tier.name, error)
                continue
            for index, here in zip(missing, held, strict=True):
                found[index] = tier.name if here else None
        return found

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        return [name is not None for name in self.locate_many(chunks)]

    def get(self, chunk: Chunk) -> ChunkKV | None:
        return self.lookup(chunk).kv

    def put(self, chunk: Chunk, kv: ChunkKV) -> None:
        self._store(self.tiers, chunk, kv)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes the entries from every tier, after writes that are still in the backlog.

        Raises StoreError when a tier failed; the others are done all the same.
        """
        wanted = list(keys)
        self.flush()
        failed: StoreError | None = None
        for tier in self.tiers:
            try:
                tier.delete(wanted)
            except StoreError as error:
                failed = error
        if failed is not None:
            raise failed

    def flush(self) -> None:
        """Waits until the writer has nothing left to do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs and not self._busy)

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join()
        for tier in self.tiers:
            tier.close()

    def _store(self, tiers: Sequence[KVStore], chunk: Chunk, kv: ChunkKV) -> None:
        for tier in tiers:
            if tier is self.tiers[0]:
                self._attempt(tier, chunk, kv)
                continue
            with self._changed:
                if self._pending_bytes and self._pending_bytes + kv.nbytes > self._backlog_bytes:
                    tier.stats.dropped_writes += 1
                    continue
                self._pending_bytes += kv.nbytes
                self._jobs.append((kv.nbytes, partial(self._attempt, tier, chunk, kv)))
                self._changed.notify_all()

    def _attempt(self, tier: KVStore, chunk: Chunk, kv: ChunkKV) -> None:
        try:
            tier.put(chunk, kv)
        except StoreError as error:
            tier.stats.dropped_writes += 1
            log.warning("kv tier %s did not take a write: %s", tier.name, error)

    def _write_behind(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed)
                if not self._jobs:
                    return
                size, job = self._jobs.popleft()
                self._busy = True
            try:
                job()
            except Exception:
                log.exception("kv writer: unexpected error, write dropped")
            finally:
                with self._changed:
                    self._busy = False
                    self._pending_bytes -= size
                    self._changed.notify_all()
