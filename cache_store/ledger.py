"""Which entries a tier holds, within a byte budget: who is evicted, who is pinned, who has expired.

Bytes are reserved before they are written, so the budget also holds while many write at once. Both policies keep a
priority for every entry and evict the lowest:

    lru     the moment of the last use
    cost    level + uses x recompute cost / bytes (GreedyDual-Size-Frequency, Cherkasova 1998). `level` is the priority
            of the last one evicted, so what was popular long ago ages. The cost of a chunk is its tokens: computing it
            is linear in them but for its short attention.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from cache_store.base import KEEP, Retention

Policy = Literal["lru", "cost"]


@dataclass(slots=True)
class _Record:
    nbytes: int
    cost: float
    pinned: bool
    expires: float
    uses: int = 0
    priority: float = 0.0


class Ledger:
    """Books of at most `budget` bytes. Thread-safe. `clock`: seconds that never jump."""

    def __init__(self, budget: int, policy: Policy, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget = budget
        self.nbytes = 0
        self._pinned = 0  # bytes of those entries that are not evicted
        self._policy = policy
        self._clock = clock
        self._lock = threading.Lock()
        self._records: dict[str, _Record] = {}
        self._order: list[tuple[float, int, str]] = []  # a heap; what a later use has overtaken stays until it is met
        self._tick = 0
        self._level = 0.0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def admit(
        self,
        key: str,
        nbytes: int,
        cost: float,
        retention: Retention = KEEP,
        remove: Callable[[str], object] = lambda key: None,
    ) -> list[str] | None:
        """Reserves room for an entry and returns the keys that went for it; the key itself may be held already.

        `remove` takes away what is to go. When it raises, that stays in the books, to be tried again after all others.
        None when the entry cannot have room: it is larger than what is not pinned.
        """
        evicted: list[str] = []
        while True:
            with self._lock:
                former = self._records.get(key)
                held = former.nbytes if former is not None else 0
                pinned = self._pinned - (held if former is not None and former.pinned else 0)
                if nbytes > self.budget - pinned:
                    return None
                if self.nbytes - held + nbytes <= self.budget:
                    self._enter(key, nbytes, cost, retention)
                    return evicted
                victim = self._lowest(key)
                self._level = max(self._level, self._records[victim].priority) if self._policy == "cost" else 0.0
            try:
                remove(victim)
            except BaseException:
                with self._lock:
                    if victim in self._records:
                        self._use(victim, self._records[victim])
                raise
            self.forget(victim)
            evicted.append(victim)

    def enter(self, key: str, nbytes: int, cost: float) -> None:
        """Takes up an entry that is there already, even beyond the budget."""
        with self._lock:
            self._enter(key, nbytes, cost, KEEP)

    def touch(self, key: str) -> bool:
        """Notes a use. False when the entry has expired: it is to be removed."""
        with self._lock:
            record = self._records.get(key)
            if record is None:
                return True
            if record.expires <= self._clock():
                return False
            self._use(key, record)
            return True

    def overdue(self, key: str) -> bool:
        """True when the entry has expired, to which nothing is done."""
        record = self._records.get(key)
        return record is not None and record.expires <= self._clock()

    def expired(self) -> list[str]:
        """The keys whose time has passed."""
        with self._lock:
            now = self._clock()
            return [key for key, record in self._records.items() if record.expires <= now]

    def resize(self, key: str, nbytes: int) -> None:
        """Corrects an entry's size to what it really takes."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                self.nbytes += nbytes - record.nbytes
                self._pinned += (nbytes - record.nbytes) * record.pinned
                record.nbytes = nbytes

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        """See KVStore.retain. It is no use: recency and popularity stay."""
        with self._lock:
            for key in keys:
                record = self._records.get(key)
                if record is not None:
                    if record.pinned and not retention.pinned:  # while it was pinned it may have left the order
                        heapq.heappush(self._order, (record.priority, self._tick, key))
                    self._pinned += record.nbytes * (retention.pinned - record.pinned)
                    record.pinned, record.expires = retention.pinned, self._end(retention)

    def forget(self, key: str) -> bool:
        """Takes an entry out of the books; False when it was not in them."""
        with self._lock:
            known = key in self._records
            if known:
                self._drop(key)
            return known

    def _enter(self, key: str, nbytes: int, cost: float, retention: Retention) -> None:
        former = self._records.get(key)
        if former is not None:
            self._drop(key)
        record = _Record(nbytes, cost, retention.pinned, self._end(retention), former.uses if former else 0)
        self._records[key] = record
        self.nbytes += nbytes
        self._pinned += nbytes * record.pinned
        self._use(key, record)

    def _end(self, retention: Retention) -> float:
        return float("inf") if retention.seconds is None else self._clock() + retention.seconds

    def _use(self, key: str, record: _Record) -> None:
        self._tick += 1
        record.uses += 1
        worth = record.uses * record.cost / max(record.nbytes, 1)
        record.priority = self._tick if self._policy == "lru" else self._level + worth
        if len(self._order) > 4 * len(self._records) + 64:
            self._order = [(record.priority, self._tick, key) for key, record in self._records.items()]
            heapq.heapify(self._order)
        heapq.heappush(self._order, (record.priority, self._tick, key))

    def _lowest(self, keep: str) -> str:
        """The key to evict: neither pinned nor `keep`. There is one, or `admit` would not ask."""
        while True:
            priority, _, key = heapq.heappop(self._order)
            record = self._records.get(key)
            if record is not None and record.priority == priority and not record.pinned and key != keep:
                return key

    def _drop(self, key: str) -> None:
        record = self._records.pop(key)
        self.nbytes -= record.nbytes
        self._pinned -= record.nbytes * record.pinned
