"""Budgets, eviction, pins and times to live: the books, and the tiers that keep them."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from cache_store.base import KEEP, Chunk, ChunkKV, KVStore, Retention
from cache_store.breaker import Breaker
from cache_store.disk import DiskStore
from cache_store.entry import entry_bytes
from cache_store.ledger import Ledger, Policy
from cache_store.memory import MemoryStore
from cache_store.redis import RedisStore
from cache_store.tiered import TieredStore
from errors import CorruptEntry, StoreUnavailable
from tests.cache_store.conftest import LAYOUT, chunk_of, kv_of, same

PINNED = Retention(pinned=True)
ENTRY = entry_bytes(LAYOUT, 10)
SIZE = kv_of(0).resident


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def filled(policy: Policy, *sizes: int, budget: int = 100) -> Ledger:
    ledger = Ledger(budget, policy)
    for number, size in enumerate(sizes):
        assert ledger.admit(str(number), size, cost=size) == []
    return ledger


def test_lru_evicts_in_order_of_use() -> None:
    ledger = filled("lru", 30, 30, 30)
    ledger.touch("0")
    assert ledger.admit("new", 60, 60) == ["1", "2"]
    assert ledger.nbytes == 90


def test_cost_keeps_what_is_used_more_although_it_was_used_earlier() -> None:
    ledger = filled("cost", 30, 30, 30)
    for _ in range(3):
        ledger.touch("0")
    ledger.touch("2")
    ledger.touch("1")
    ledger.touch("1")
    assert ledger.admit("new", 60, 60) == ["2", "1"]


def test_cost_keeps_what_is_dear_to_compute_for_its_bytes() -> None:
    ledger = Ledger(100, "cost")
    ledger.admit("raw", 40, cost=10)
    ledger.admit("packed", 40, cost=40)
    assert ledger.admit("new", 50, cost=50) == ["raw"]


def test_cost_forgets_what_was_popular_long_ago() -> None:
    ledger = filled("cost", 50)
    for _ in range(5):
        ledger.touch("0")
    evicted: list[str] = []
    for number in range(1, 12):
        evicted += ledger.admit(str(number), 50, cost=50) or []
    assert "0" in evicted


def test_pinned_entries_stay_and_bound_the_others() -> None:
    ledger = filled("lru", 40, 30)
    ledger.retain(["0", "unknown"], PINNED)
    assert ledger.admit("2", 50, 50) == ["1"]
    assert ledger.admit("3", 61, 61) is None
    assert "0" in ledger
    ledger.retain(["0"], KEEP)
    assert ledger.admit("3", 61, 61) == ["0", "2"]  # by the last use, which the pin was not


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_to_be_told_how_long_to_keep_is_no_use(policy: Policy) -> None:
    ledger = filled(policy, 30, 30, 30)
    ledger.touch("2")
    ledger.touch("1")
    ledger.touch("2")
    ledger.retain(["2", "1", "0"], KEEP)
    assert ledger.admit("3", 30, 90) == ["0"]
    assert ledger.admit("4", 30, 90) == ["1"]


def test_pinning_more_than_the_budget_refuses_instead_of_overflowing() -> None:
    ledger = Ledger(100, "lru")
    assert ledger.admit("0", 60, 1, PINNED) == []
    assert ledger.admit("1", 60, 1, PINNED) is None
    assert ledger.nbytes == 60


def test_what_cannot_be_removed_stays_in_the_books_and_is_tried_last() -> None:
    ledger = filled("lru", 30, 30, 30)
    removed: list[str] = []

    def remove(key: str) -> None:
        if key == "1":
            raise OSError("no")
        removed.append(key)

    with pytest.raises(OSError, match="no"):
        ledger.admit("new", 70, 70, remove=remove)
    assert (removed, ledger.nbytes, "new" in ledger) == (["0"], 60, False)
    assert ledger.admit("new", 70, 70, remove=remove) == ["2"]
    assert ledger.nbytes == 100


def test_what_is_there_anyway_counts_beyond_the_budget_until_there_is_a_reason_to_go() -> None:
    ledger = filled("lru", 60)
    ledger.enter("1", 60, 60)
    assert ledger.nbytes == 120
    assert ledger.admit("2", 10, 10) == ["0"]
    assert ledger.nbytes == 70


def test_a_replaced_entry_counts_once() -> None:
    ledger = filled("lru", 60)
    assert ledger.admit("0", 80, 80) == []
    assert (ledger.nbytes, len(ledger)) == (80, 1)


def test_a_time_to_live_runs_on_a_clock_that_does_not_jump() -> None:
    clock = Clock()
    ledger = Ledger(100, "lru", clock)
    ledger.admit("0", 10, 1, Retention(seconds=5))
    ledger.admit("1", 10, 1)
    clock.now += 4
    assert ledger.touch("0")
    assert ledger.expired() == []
    clock.now += 2
    assert not ledger.touch("0")
    assert ledger.expired() == ["0"]
    ledger.retain(["0"], Retention(seconds=5))
    assert ledger.touch("0")


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_the_books_are_right_after_any_sequence(policy: Policy) -> None:
    """Ten thousand random operations against a dictionary."""
    chance, clock = random.Random(0), Clock()
    ledger, sizes = Ledger(1000, policy, clock), dict[str, int]()
    pinned = set[str]()
    for _ in range(10_000):
        key = str(chance.randrange(40))
        act = chance.randrange(6)
        if act <= 2:
            size, pin = chance.randrange(1, 200), chance.random() < 0.1
            evicted = ledger.admit(key, size, chance.random(), Retention(pinned=pin))
            if evicted is None:
                assert size > 1000 - sum(sizes[name] for name in pinned - {key})
                continue
            assert not pinned & set(evicted)
            for gone in evicted:
                del sizes[gone]
            sizes[key] = size
            pinned = pinned | {key} if pin else pinned - {key}
        elif act == 3:
            ledger.touch(key)
        elif act == 4:
            assert ledger.forget(key) == (sizes.pop(key, None) is not None)
            pinned.discard(key)
        else:
            ledger.retain([key], KEEP)
            pinned.discard(key)
        assert ledger.nbytes == sum(sizes.values()) <= 1000
        assert len(ledger) == len(sizes)


TIERS: dict[str, Callable[[Path], KVStore]] = {
    "memory": lambda folder: MemoryStore(5 * SIZE, "cost"),
    "disk": lambda folder: DiskStore(folder, LAYOUT, 5 * ENTRY, "cost"),
}


def hammer(store: KVStore) -> None:
    def work(number: int) -> bool:
        store.put(chunk_of(number % 12), kv_of(number % 12))
        found = store.get(chunk_of(number % 5))
        return found is None or same(found, kv_of(number % 5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(400)))
    assert store.stats.entries == sum(store.holds([chunk_of(number) for number in range(12)]))


def test_the_memory_budget_holds_while_many_write() -> None:
    store = MemoryStore(5 * SIZE, "cost")
    hammer(store)
    held = [kv for number in range(12) if (kv := store.get(chunk_of(number))) is not None]
    assert store.stats.nbytes == sum(kv.resident for kv in held) <= 5 * SIZE


def test_the_disk_budget_holds_at_every_moment_while_many_write(tmp_path: Path) -> None:
    used: list[int] = []

    class Watched(DiskStore):
        def _publish(self, path: Path, pieces: list[memoryview]) -> int:
            written = super()._publish(path, pieces)
            used.append(sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.*")))
            return written

    store = Watched(tmp_path, LAYOUT, 5 * ENTRY, "cost")
    hammer(store)
    assert max(used) <= 5 * ENTRY
    assert store.stats.nbytes == sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.*"))


@pytest.mark.parametrize("kind", TIERS)
def test_tiers_keep_what_is_pinned_and_forget_what_has_expired(tmp_path: Path, kind: str) -> None:
    store = TIERS[kind](tmp_path)
    store.put(chunk_of(0), kv_of(0), PINNED)
    store.put(chunk_of(1), kv_of(1))
    store.retain([chunk_of(1).key], Retention(seconds=0.05))
    for number in range(2, 20):
        store.put(chunk_of(number), kv_of(number))
    assert same(store.get(chunk_of(0)), kv_of(0))
    store.put(chunk_of(1), kv_of(1), Retention(seconds=0.05))
    time.sleep(0.1)
    assert store.holds([chunk_of(0), chunk_of(1)]) == [True, False]
    assert store.get(chunk_of(1)) is None
    store.put(chunk_of(2), kv_of(2), Retention(seconds=0.05))
    time.sleep(0.1)
    store.put(chunk_of(3), kv_of(3))  # a write takes out what has expired
    assert store.holds([chunk_of(2)]) == [False]


def test_several_tiers_keep_a_retention_for_what_is_written_later(tmp_path: Path) -> None:
    memory, disk = MemoryStore(3 * SIZE), DiskStore(tmp_path, LAYOUT, 1 << 20)
    store = TieredStore([memory, disk])
    store.retain([chunk_of(0).key], PINNED)
    for number in range(10):
        store.put(chunk_of(number), kv_of(number))
    assert memory.holds([chunk_of(0)]) == [True]
    store.delete([chunk_of(0).key])
    for number in range(10):  # what was deleted and comes again is like any other
        store.put(chunk_of(number), kv_of(number))
    assert memory.holds([chunk_of(0)]) == [False]
    store.close()


class Noting(MemoryStore):
    """Notes what it is told of how long to keep entries."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.put_with: list[Retention] = []
        self.told: list[tuple[list[str], Retention]] = []

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        self.put_with.append(retention)
        super().put(chunk, kv, retention)

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        self.told.append((list(keys), retention))
        super().retain(self.told[-1][0], retention)


@pytest.mark.parametrize("told", ["before", "with the entry"])
def test_what_moves_up_has_the_rest_of_its_time(tmp_path: Path, told: str) -> None:
    memory, disk = Noting(), DiskStore(tmp_path, LAYOUT, 1 << 20)
    store = TieredStore([memory, disk])
    day = Retention(seconds=86400)
    if told == "before":
        store.retain([chunk_of(0).key], day)
    time.sleep(0.1)
    store.put(chunk_of(0), kv_of(0), KEEP if told == "before" else day)
    store.flush()
    memory.delete([chunk_of(0).key])
    time.sleep(0.1)
    assert store.lookup(chunk_of(0)).tier == "disk"
    first, promoted = (retention.seconds for retention in memory.put_with)
    assert first is not None
    assert promoted is not None
    assert 86399.9 < first <= 86400  # counts from the writing
    assert promoted <= first - 0.1
    store.close()


def test_what_has_had_its_time_does_not_move_up(tmp_path: Path) -> None:
    memory, disk = Noting(), DiskStore(tmp_path, LAYOUT, 1 << 20)
    store = TieredStore([memory, disk])
    store.retain([chunk_of(0).key], Retention(seconds=0.01))
    disk.put(chunk_of(0), kv_of(0))  # as another server would
    time.sleep(0.05)
    assert store.lookup(chunk_of(0)).tier == "disk"
    assert memory.put_with == []
    store.close()


def test_who_is_told_the_same_again_does_not_begin_anew() -> None:
    memory = Noting()
    store = TieredStore([memory])
    one, two = chunk_of(1).key, chunk_of(2).key
    hour, day = Retention(seconds=3600), Retention(seconds=86400)
    for keys, retention in (([one], day), ([one, two], day), ([one], hour), ([one], KEEP), ([one, two], KEEP)):
        store.retain(keys, retention)
    assert memory.told == [([one], day), ([two], day), ([one], hour), ([one], KEEP), ([two], KEEP)]
    store.close()


def test_a_pin_reaches_what_is_being_written_and_what_waits_for_it(tmp_path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()

    class Slow(DiskStore):
        def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
            writing.set()
            assert go_on.wait(30)
            super().put(chunk, kv, retention)

    disk = Slow(tmp_path, LAYOUT, 3 * ENTRY)
    store = TieredStore([MemoryStore(0), disk])
    for number in range(2):
        store.put(chunk_of(number), kv_of(number))
    assert writing.wait(30)
    store.retain([chunk_of(number).key for number in range(2)], PINNED)
    go_on.set()
    for number in range(2, 9):
        store.put(chunk_of(number), kv_of(number))
    store.flush()
    assert disk.holds([chunk_of(number) for number in range(3)]) == [True, True, False]
    store.close()


def test_how_long_to_keep_is_told_while_writing_is_paused_and_counts_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    disk = DiskStore(tmp_path, LAYOUT, 2 * ENTRY)
    away = RedisStore(f"unix://{tmp_path}/nobody", LAYOUT)
    store = TieredStore([MemoryStore(0), disk, away])
    disk.put(chunk_of(0), kv_of(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        for number in range(1, 5):
            store.put(chunk_of(number), kv_of(number))
        store.flush()
    failures = away.stats.errors
    store.retain([chunk_of(0).key], PINNED)
    assert (disk.stats.errors, away.stats.errors) == (3, failures + 1)
    for number in range(1, 5):
        disk.put(chunk_of(number), kv_of(number))
    assert disk.holds([chunk_of(0)]) == [True]
    store.close()


# The breaker


def test_a_breaker_waits_longer_each_time_and_lets_one_probe_through() -> None:
    clock = Clock()
    breaker = Breaker("thing", clock)

    def call(fails: bool) -> str:
        try:
            with breaker.guard():
                if fails:
                    raise StoreUnavailable("no")
        except StoreUnavailable as error:
            return str(error)
        return "fine"

    assert [call(True) for _ in range(5)] == ["no"] * 3 + ["thing: paused after repeated failures"] * 2
    waits = []
    for _ in range(8):
        start = clock.now
        while call(True) != "no":
            clock.now += 0.25
        waits.append(clock.now - start)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now += 60
    with breaker.guard():  # while one probes, others are refused
        assert "paused" in call(False)
    assert [call(True) for _ in range(4)][-1] == "thing: paused after repeated failures"
    clock.now += 1
    assert call(False) == "fine"


def test_an_answer_that_proves_nothing_heals_nothing_and_takes_no_turn() -> None:
    clock = Clock()
    breaker = Breaker("thing", clock)
    for _ in range(3):
        with breaker.guard(proves=False):
            pass
        with pytest.raises(StoreUnavailable, match="no"), breaker.guard():
            raise StoreUnavailable("no")
    with pytest.raises(StoreUnavailable, match="paused"), breaker.guard(proves=False):
        pass
    clock.now += 1
    with breaker.guard(proves=False):
        pass
    with breaker.guard():  # the probe is still to be made, and heals
        pass
    with breaker.guard():
        pass


def test_a_breaker_does_not_probe_while_a_call_hangs() -> None:
    """And what ends after it was given up on neither counts twice nor proves that the thing works."""
    clock = Clock()
    breaker = Breaker("thing", clock)
    with ExitStack() as stack:
        for call in [stack.enter_context(breaker.guard()) for _ in range(4)]:
            breaker.give_up(call)
        clock.now += 100
        with pytest.raises(StoreUnavailable), breaker.guard():
            pass
    with pytest.raises(StoreUnavailable), breaker.guard():  # the probe
        raise StoreUnavailable("no")
    clock.now += 1.5
    with pytest.raises(StoreUnavailable, match="paused"), breaker.guard():
        pass
    clock.now += 0.5  # that is twice the first pause, however many hung at once
    with breaker.guard():
        pass

    def hang() -> None:
        with breaker.guard() as call:
            breaker.give_up(call)
            raise StoreUnavailable("no")

    with pytest.raises(StoreUnavailable, match="no"):
        hang()
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match="no"), breaker.guard():
            raise StoreUnavailable("no")
    with pytest.raises(StoreUnavailable, match="paused"), breaker.guard():
        pass


def test_a_breaker_does_not_count_what_is_not_the_mediums_fault() -> None:
    breaker = Breaker("thing")
    for _ in range(10):
        with pytest.raises(CorruptEntry), breaker.guard():
            raise CorruptEntry("flip")
    with breaker.guard():
        pass


def test_what_went_for_an_entry_that_then_has_no_room_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are pinned while room is made: nothing stays that no budget counts."""
    size = kv_of(0).resident
    store = MemoryStore(4 * size)
    for number in range(4):
        store.put(chunk_of(number), kv_of(number))
    evict = MemoryStore._evict

    def pinned_meanwhile(store: MemoryStore, key: str) -> None:
        evict(store, key)
        store.retain([chunk_of(number).key for number in range(1, 4)], Retention(pinned=True))

    monkeypatch.setattr(MemoryStore, "_evict", pinned_meanwhile)
    store.put(chunk_of(9, 60), kv_of(9, 60))  # twice as large
    held = [store.get(chunk_of(number)) is not None for number in range(4)]
    assert held == [False, True, True, True]
    assert (store.stats.entries, store.stats.nbytes, store.stats.dropped_writes) == (3, 3 * size, 1)
