"""Loading ahead: who reads what, in which order, and what is left when a request ends. Order is made by gates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cache_store.base import OWN_MEMORY, Chunk, ChunkKV, Landing
from cache_store.memory import MemoryStore
from cache_store.prefetch import Prefetcher
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from errors import StoreUnavailable
from tests.cache_store.conftest import chunk_of, kv_of, same
from tests.tiny import run


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


SIZE = kv_of(0).nbytes
TOKEN = SIZE // 10


class Gated(MemoryStore):
    """A tier whose reads wait until the test lets them through."""

    def __init__(self) -> None:
        super().__init__(1 << 20, name="gated")
        self.begun: list[str] = []
        self.gate = threading.Event()
        self.entered = threading.Event()

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        self.begun.append(chunk.key)
        self.entered.set()
        assert self.gate.wait(20)
        if chunk == chunk_of(7):
            raise RuntimeError("bug")
        return super().get(chunk, landing)


class Rig:
    def __init__(self, max_bytes: int = 100 * SIZE) -> None:
        self.tier = Gated()
        self.store = TieredStore([MemoryStore(0), self.tier])
        for number in range(9):
            self.tier.put(chunk_of(number), kv_of(number))
        self.worthless: set[str] = set()
        self.made = Prefetcher(self.store, TOKEN, max_bytes, lambda chunk, tier: chunk.key not in self.worthless)

    def entered(self) -> None:
        assert self.tier.entered.wait(20)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.tier.gate.set()
    made.made.close()
    made.store.close()


def test_a_request_takes_what_was_begun_and_waits_while_it_is_on_its_way(rig: Rig) -> None:
    rig.made.begin("a", [chunk_of(1), chunk_of(2)], choosy=False)
    rig.entered()
    taking = rig.made.take(chunk_of(1))
    next(taking)  # on its way: others may run meanwhile
    rig.tier.gate.set()
    found = run(taking)
    assert same(found.kv, kv_of(1))
    assert found.tier == "gated"
    assert same(run(rig.made.take(chunk_of(2))).kv, kv_of(2))
    assert sorted(rig.tier.begun) == [chunk_of(1).key, chunk_of(2).key]
    rig.made.end("a")
    assert rig.made.held() == 0


def test_a_request_reads_itself_what_nobody_has_begun(rig: Rig) -> None:
    rig.made.begin("a", [chunk_of(1), chunk_of(2)], choosy=False)
    rig.entered()
    rig.tier.gate.set()
    found = run(rig.made.take(chunk_of(2)))  # begun or not: it is read once, and it is right
    assert same(found.kv, kv_of(2))
    assert same(run(rig.made.take(chunk_of(3))).kv, kv_of(3))
    run(rig.made.take(chunk_of(1)))
    assert sorted(rig.tier.begun) == [chunk_of(number).key for number in (1, 2, 3)]


def test_what_a_request_no_longer_needs_is_not_read(rig: Rig) -> None:
    rig.made.begin("a", [chunk_of(number) for number in range(5)], choosy=False)
    rig.made.begin("b", [chunk_of(3)], choosy=False)
    rig.entered()
    rig.made.end("a")
    rig.made.end("nobody")
    assert rig.made.held() == SIZE
    rig.tier.gate.set()
    assert same(run(rig.made.take(chunk_of(3))).kv, kv_of(3))
    assert rig.tier.begun == [chunk_of(0).key, chunk_of(3).key]
    rig.made.end("b")
    assert rig.made.held() == 0


def test_bytes_are_bounded() -> None:
    rig = Rig(max_bytes=3 * SIZE)
    rig.made.begin("a", [chunk_of(number) for number in range(5)], choosy=False)
    assert rig.made.held() == 3 * SIZE
    rig.made.begin("b", [chunk_of(0), chunk_of(6)], choosy=False)
    assert rig.made.held() == 3 * SIZE
    rig.tier.gate.set()
    until(lambda: rig.made.ready(chunk_of(2)))
    assert rig.tier.begun == [chunk_of(number).key for number in range(3)]
    rig.made.end("a")
    assert rig.made.held() == SIZE  # the one that b wants, too
    rig.made.end("b")
    assert rig.made.held() == 0
    rig.made.close()
    rig.store.close()


def test_only_what_is_stored_and_worth_it_is_read(rig: Rig) -> None:
    rig.worthless |= {chunk_of(2).key, chunk_of(4).key}
    rig.tier.gate.set()
    rig.made.begin("a", [chunk_of(2), chunk_of(1), chunk_of(20)], choosy=True)
    until(lambda: len(rig.tier.begun) == 2)
    # For nobody, and after what somebody waits for: it tells how fast the tier is now.
    assert rig.tier.begun == [chunk_of(1).key, chunk_of(2).key]
    rig.made.begin("b", [chunk_of(21), chunk_of(3), chunk_of(4)], choosy=True)
    until(lambda: rig.made.ready(chunk_of(3)))
    rig.made.begin("c", [chunk_of(2), chunk_of(22)], choosy=False)
    until(lambda: rig.made.ready(chunk_of(2)))
    assert rig.tier.begun[2:] == [chunk_of(3).key, chunk_of(2).key]
    assert rig.made.held() == 3 * SIZE
    assert not rig.made.ready(chunk_of(4))


def test_a_failure_reaches_the_request_that_takes_it(rig: Rig) -> None:
    rig.tier.gate.set()
    rig.made.begin("a", [chunk_of(7), chunk_of(1)], choosy=False)
    until(lambda: rig.made.ready(chunk_of(1)))
    assert not rig.made.ready(chunk_of(7))
    with pytest.raises(RuntimeError, match="bug"):
        run(rig.made.take(chunk_of(7)))


def test_a_source_knows_what_was_read_ahead(rig: Rig) -> None:
    def encode(chunk: Chunk) -> Iterator[None]:
        raise AssertionError("nothing is missing")

    source = ChunkSource(rig.store, encode, rig.made)  # type: ignore[arg-type]
    chunks = [chunk_of(1), chunk_of(2), chunk_of(20)]
    assert source.locate_many(chunks) == ["gated", "gated", None]
    rig.tier.gate.set()
    rig.made.begin("a", chunks[:1], choosy=False)
    until(lambda: rig.made.ready(chunks[0]))
    assert source.locate_many(chunks) == ["memory", "gated", None]
    loaded = run(source.load(chunk_of(1)))
    assert (loaded.tier, same(loaded.kv, kv_of(1))) == ("gated", True)


def test_a_tier_that_fails_is_told_to_the_request(rig: Rig) -> None:
    class Sick(MemoryStore):
        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            raise StoreUnavailable("sick")

    store = TieredStore([MemoryStore(0), Sick(0), rig.tier])
    rig.tier.gate.set()
    prefetcher = Prefetcher(store, TOKEN, 1 << 20, lambda chunk, tier: True)
    prefetcher.begin("a", [chunk_of(1)], choosy=False)
    until(lambda: prefetcher.ready(chunk_of(1)))
    found = run(prefetcher.take(chunk_of(1)))
    assert (found.tier, found.faults) == ("gated", ("sick",))
    prefetcher.close()
    store.close()
