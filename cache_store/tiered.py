"""Several tiers as one store: reads through, promotes, writes behind, and turns a failing tier into a miss."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from cache_store.base import KEEP, OWN_MEMORY, Chunk, ChunkKV, KVStore, Landing, Retention, StoreStats
from cache_store.breaker import Breaker, Call
from cache_store.fetch import Fetch, Room
from cache_store.readers import Readers
from errors import StoreError, StoreUnavailable

log = logging.getLogger(__name__)

_READERS = 8  # chunks that are read at a time
_CLOSING_SECONDS = 5.0  # for reads that have begun


@dataclass(frozen=True, slots=True)
class _Term:
    """How long an entry is to be kept, from `begin` of time.monotonic() on."""

    retention: Retention
    begin: float

    def left(self) -> Retention:
        """How long from now on."""
        pinned, seconds = self.retention.pinned, self.retention.seconds
        return Retention(pinned, None if seconds is None else max(0.0, self.begin + seconds - time.monotonic()))


_KEPT = _Term(KEEP, 0.0)


class TieredStore:
    """A KVStore over KVStores, fastest first.

    Reads go through the tiers in order, in reader threads, at most `in_flight_bytes` of entries at a time. `put`
    reaches the first tier at once and the others from a writer thread, whose backlog is bounded by `backlog_bytes`, one
    entry excepted: beyond it a write is dropped and counted, for a query must never wait for a slow medium. A tier that
    fails repeatedly is left alone for a growing time, its reading apart from its writing: a full one still serves. One
    that hangs has failed: who waits for it gives up, and another thread takes the place of the one that reads.
    """

    name = "tiered"

    def __init__(
        self,
        tiers: Sequence[KVStore],
        backlog_bytes: int = 256 << 20,
        in_flight_bytes: int = 256 << 20,
        pinned: bool = False,
        patience: Mapping[str, float] | None = None,
        answer: Mapping[str, float] | None = None,
    ) -> None:
        """`pinned`: entries are read into page-locked memory, for a GPU to copy.

        patience: by tier, the seconds that a read may be without a byte; others bound their waiting themselves.
        answer: by tier, the seconds in which it must say what it holds, where these are not its patience.
        """
        self.stats = StoreStats()
        self.tiers = tuple(tiers)
        self.room = Room(in_flight_bytes)
        self._pinned = pinned
        self._reading = [Breaker(f"{tier.name} tier") for tier in tiers]
        self._writing = [Breaker(f"writes to the {tier.name} tier") for tier in tiers]
        self._terms: dict[str, _Term] = {}
        self._fetches: weakref.WeakValueDictionary[str, Fetch] = weakref.WeakValueDictionary()
        self._lock = threading.Lock()
        self._promoting = threading.Lock()  # held by who writes what was read, so that deletions come before or after
        self._deletions = 0
        self._patience = dict(patience or {})
        self._answer = {**self._patience, **(answer or {})}
        self._reads: dict[Fetch, tuple[Breaker, Call]] = {}  # that have begun
        self._readers = Readers(_READERS)
        self._backlog_bytes = backlog_bytes
        self._jobs: deque[tuple[int, Callable[[], None]]] = deque()
        self._pending_bytes = 0
        self._busy = False
        self._closed = False
        self._changed = threading.Condition()
        self._writer = threading.Thread(target=self._write_behind, name="kv-writer", daemon=True)
        self._writer.start()

    def fetch(self, chunk: Chunk) -> Fetch:
        """Starts looking for the chunk, unless somebody looks or has looked and still keeps the fetch: then that is it.

        What the first tier holds is there at once. A fetch that everybody has dropped before its turn is not made.
        """
        with self._lock:
            running = self._fetches.get(chunk.key)
            if running is not None:
                return running
            fetch = self._fetches[chunk.key] = Fetch(chunk, self.room, self._pinned, self._give_up_on_hung)
        if self._search(fetch, slice(0, 1)):
            fetch.end()
        else:
            self._readers.submit(partial(self._go_on, weakref.ref(fetch)))
        return fetch

    def lookup(self, chunk: Chunk) -> Fetch:
        """Asks the tiers in order, here and now, and promotes a hit into the faster ones. The fetch is over."""
        fetch = Fetch(chunk, self.room, self._pinned)
        try:
            self._search(fetch, slice(0, None))
        finally:
            fetch.end()
        return fetch

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """Of each chunk the first tier that holds it, with one question to each tier and no load; and what failed.

        A tier that fails holds nothing. What somebody has read, or is reading, is there even if its tier has failed or
        evicted it since.
        """
        found: list[str | None] = [None] * len(chunks)
        faults: tuple[str, ...] = ()
        for at, tier in enumerate(self.tiers):
            missing = [index for index, name in enumerate(found) if name is None]
            if not missing:
                break
            try:
                held = self._ask(at, [chunks[index] for index in missing])
            except StoreError as error:
                log.warning("kv tier %s failed: %s", tier.name, error)
                faults += (str(error),)
                continue
            for index, here in zip(missing, held, strict=True):
                found[index] = tier.name if here else None
        with self._lock:
            for index, name in enumerate(found):
                fetch = self._fetches.get(chunks[index].key)
                if name is None and fetch is not None and fetch.kv is not None:
                    found[index] = fetch.tier
        return found, faults

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        return [name is not None for name in self.locate_many(chunks)[0]]

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        return self.lookup(chunk).kv

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        self._forget_fetches([chunk.key])
        with self._lock:
            term = self._terms.get(chunk.key)
            self._begin(chunk.key, retention if term is None else term.retention)
        self._store(len(self.tiers), chunk, kv)

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        """As in KVStore, and holds for entries too that are written later; what has been told already changes nothing.

        A tier that fails goes on as before, until the next start tells it. Breakers are not asked: most tiers need no
        medium for it, and one whose writing pauses still gives.
        """
        with self._lock:
            changed = [key for key in keys if self._term(key).retention != retention]
            for key in changed:
                self._begin(key, retention)
        if not changed:
            return
        for tier in self.tiers:
            try:
                with _failures_of(tier):
                    tier.retain(changed, retention)
            except StoreError as error:
                log.warning("kv tier %s failed: %s", tier.name, error)

    def delete(self, keys: Iterable[str]) -> None:
        """Removes the entries from every tier, after writes that are still in the backlog.

        Raises StoreError when a tier failed; the others are done all the same.
        """
        wanted = list(keys)
        with self._lock:
            for key in wanted:
                self._terms.pop(key, None)
        self._forget_fetches(wanted)
        with self._promoting:
            self._deletions += 1
        self.flush()
        failed: StoreError | None = None
        for tier in self.tiers:
            try:
                with _failures_of(tier):
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
        self._readers.close(_CLOSING_SECONDS)
        self.flush()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._writer.join()
        for tier in self.tiers:
            tier.close()

    def _forget_fetches(self, keys: Iterable[str]) -> None:
        """What was found of them is not true any more for those who ask from now on."""
        with self._lock:
            for key in keys:
                self._fetches.pop(key, None)

    def _go_on(self, wanted: weakref.ref[Fetch]) -> None:
        """The rest of a search that the first tier could not end."""
        fetch = wanted()
        if fetch is None:
            return
        try:
            self._search(fetch, slice(1, None))
        except BaseException:
            fetch.failed("kv reader: unexpected error")
            log.exception("kv reader: unexpected error, taken for a miss")
        finally:
            fetch.end()

    def _ask(self, index: int, chunks: Sequence[Chunk]) -> list[bool]:
        """What a tier holds; in a thread of its own where asking may hang, for the device thread asks."""
        tier, seconds = self.tiers[index], self._answer.get(self.tiers[index].name)
        answer: Future[list[bool]] = Future()
        calls: list[Call] = []

        def ask() -> None:
            try:
                # Who says what there is may still not give it.
                with self._reading[index].guard(proves=False) as call, _failures_of(tier):
                    calls.append(call)
                    held = tier.holds(chunks)
                answer.set_result(held)
            except Exception as error:
                answer.set_exception(error)

        if seconds is None:
            ask()
        else:
            threading.Thread(target=ask, name="kv-asking", daemon=True).start()
        try:
            return answer.result(seconds)
        except TimeoutError:
            for call in calls:  # none when the thread has had no turn yet
                self._reading[index].give_up(call)
            raise StoreUnavailable(f"{tier.name} tier: no answer in {seconds:g} s") from None

    def _give_up_on_hung(self) -> None:
        """Of the reads that have begun, whoever wants them."""
        with self._lock:
            hung = [(fetch, *read) for fetch, read in self._reads.items() if fetch.give_up()]
            for fetch, breaker, call in hung:
                breaker.give_up(call)
                log.warning("kv read given up: %s", fetch.faults[-1])
            if hung:
                self._readers.add(len(hung))  # now that the breaker knows of all: the next would hang as well

    def _search(self, fetch: Fetch, which: slice) -> bool:
        """Asks some tiers in order; True, and the fetch is over, when one had the chunk.

        A fetch that was given up asks no further tier, but what comes late is kept all the same.
        """
        deletions = self._deletions
        for index in range(len(self.tiers))[which]:
            tier = self.tiers[index]
            try:
                with self._reading[index].guard() as call, _failures_of(tier):
                    kv = self._read(index, fetch, call)
            except StoreError as error:
                log.warning("kv tier %s failed: %s", tier.name, error)
                fetch.failed(str(error))
                kv = None
            if kv is not None:
                self.stats.count("misses" if fetch.given_up else "hits")
                with self._promoting:
                    if self._deletions == deletions:  # else it may be of these
                        self._store(index, fetch.chunk, kv)
                fetch.settle(kv, tier.name, fetch.faults)
                return True
            if fetch.given_up:
                break
        self.stats.count("misses", which.stop is None)
        return False

    def _read(self, index: int, fetch: Fetch, call: Call) -> ChunkKV | None:
        tier = self.tiers[index]
        with self._lock:
            self._reads[fetch] = self._reading[index], call
        fetch.begin(tier.name, self._patience.get(tier.name))
        try:
            return tier.get(fetch.chunk, fetch)
        finally:
            fetch.rest()
            with self._lock:
                del self._reads[fetch]
                self._readers.add(-fetch.given_up)  # back in its place

    def _begin(self, key: str, retention: Retention) -> None:
        """Under the lock: an entry is to be kept so from now on."""
        if retention == KEEP:
            self._terms.pop(key, None)
        else:
            self._terms[key] = _Term(retention, time.monotonic())

    def _term(self, key: str) -> _Term:
        return self._terms.get(key, _KEPT)

    def _store(self, count: int, chunk: Chunk, kv: ChunkKV) -> None:
        """Writes to the first `count` tiers."""
        for index in range(count):
            if index == 0:
                self._write(index, chunk, kv)
                continue
            with self._changed:
                if self._pending_bytes and self._pending_bytes + kv.resident > self._backlog_bytes:
                    self.tiers[index].stats.count("dropped_writes")
                    continue
                self._pending_bytes += kv.resident
                self._jobs.append((kv.resident, partial(self._write, index, chunk, kv)))
                self._changed.notify_all()

    def _write(self, index: int, chunk: Chunk, kv: ChunkKV) -> None:
        tier, term = self.tiers[index], self._term(chunk.key)
        left = term.left()
        if left.seconds == 0:
            return
        try:
            with self._writing[index].guard(), _failures_of(tier):
                tier.put(chunk, kv, left)
                if self._term(chunk.key).retention != term.retention:  # told before the tier had the entry
                    tier.retain([chunk.key], self._term(chunk.key).left())
        except StoreError as error:
            tier.stats.count("dropped_writes")
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


@contextmanager
def _failures_of(tier: KVStore) -> Iterator[None]:
    """An error that no tier should raise is a failure of the tier like others: counted, told, and heard by breakers."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        tier.stats.count("errors")
        log.exception("kv tier %s: unexpected error", tier.name)
        raise StoreUnavailable(f"{tier.name} tier: {type(error).__name__}: {error}") from error
