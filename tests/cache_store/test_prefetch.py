"""Loading ahead: who reads what, in which order, and what is left when a request ends. Order is made by gates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

import pytest

from cache_store.base import OWN_MEMORY, Chunk, ChunkKV, Landing
from cache_store.memory import MemoryStore
from cache_store.prefetch import Prefetcher
from cache_store.tiered import TieredStore
from tests.cache_store.conftest import chunk_of, kv_of, same


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

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        self.begun.append(chunk.key)
        assert self.gate.wait(20)
        return super().get(chunk, landing)


class Rig:
    def __init__(self, max_bytes: int = 100 * SIZE) -> None:
        self.tier = Gated()
        self.store = TieredStore([MemoryStore(0), self.tier])
        for number in range(9):
            self.tier.put(chunk_of(number), kv_of(number))
        self.worthless: set[str] = set()
        self.made = Prefetcher(self.store, TOKEN, max_bytes, lambda chunk, tier: chunk.key not in self.worthless)

    def begin(self, owner: str, numbers: Iterable[int], choosy: bool = False) -> None:
        self.made.begin(owner, [chunk_of(number) for number in numbers], choosy)
        self.settled()

    def settled(self) -> None:
        """What was asked for has been begun."""
        self.made._pool.submit(lambda: None).result(20)

    def begun(self) -> list[str]:
        return sorted(self.tier.begun)

    def close(self) -> None:
        self.tier.gate.set()
        self.made.close()
        self.store.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def keys(*numbers: int) -> list[str]:
    return [chunk_of(number).key for number in numbers]


def test_a_request_joins_what_was_begun_also_when_it_is_over(rig: Rig) -> None:
    rig.begin("a", [1, 2])
    fetch = rig.store.fetch(chunk_of(1))
    assert not fetch.wait(0, 0.01)  # on its way: others may run meanwhile
    rig.tier.gate.set()
    assert fetch.wait(99, 20)
    assert same(fetch.kv, kv_of(1))
    again = rig.store.fetch(chunk_of(2))
    assert again.wait(99, 20)
    assert same(again.kv, kv_of(2))
    assert rig.store.fetch(chunk_of(2)) is again
    assert rig.begun() == keys(1, 2)
    assert rig.made.held() == 2 * SIZE
    rig.made.end("a")
    assert rig.made.held() == 0


def test_what_a_request_no_longer_needs_is_not_read(rig: Rig) -> None:
    rig.begin("a", range(9))  # eight readers: one chunk waits
    rig.begin("b", [3])
    until(lambda: len(rig.tier.begun) == 8)
    rig.made.end("a")
    rig.made.end("nobody")
    assert rig.made.held() == SIZE
    rig.tier.gate.set()
    assert rig.store.fetch(chunk_of(3)).wait(99, 20)
    rig.begin("c", [1])
    assert rig.store.fetch(chunk_of(1)).wait(99, 20)
    assert chunk_of(8).key not in rig.tier.begun
    rig.made.end("b")
    rig.made.end("c")
    assert rig.made.held() == 0


def test_bytes_are_bounded() -> None:
    rig = Rig(max_bytes=3 * SIZE)
    rig.begin("a", range(5))
    assert rig.made.held() == 3 * SIZE
    rig.begin("b", [6])
    assert rig.made.held() == 3 * SIZE
    until(lambda: len(rig.tier.begun) == 3)
    assert rig.begun() == keys(0, 1, 2)
    rig.made.end("a")
    assert rig.made.held() == 0
    rig.close()


def test_only_what_is_stored_and_worth_it_is_read(rig: Rig) -> None:
    rig.worthless |= {chunk_of(2).key, chunk_of(4).key}
    rig.tier.gate.set()
    rig.begin("a", [2, 1, 20], choosy=True)
    # The one that is not worth it is read for nobody: it tells how fast the tier is now.
    until(lambda: rig.begun() == keys(1, 2))
    rig.begin("b", [21, 3, 4], choosy=True)
    until(lambda: rig.begun() == keys(1, 2, 3))
    rig.begin("c", [4], choosy=False)
    until(lambda: rig.begun() == keys(1, 2, 3, 4))


def test_a_slow_tier_is_tried_too_where_nothing_is_read_ahead() -> None:
    rig = Rig(max_bytes=0)
    rig.worthless |= {chunk_of(2).key, chunk_of(3).key}
    rig.tier.gate.set()
    rig.begin("a", [1, 2, 3], choosy=True)
    until(lambda: rig.begun() == keys(2))
    rig.begin("b", [2, 3], choosy=True)  # too soon for another trial
    rig.begin("c", [2, 3], choosy=False)
    assert rig.begun() == keys(2)
    assert rig.tier.stats.hits == 1
    rig.close()


def test_a_trial_holds_nothing_when_the_request_that_it_came_with_has_no_more_to_load(rig: Rig) -> None:
    rig.worthless.add(chunk_of(2).key)
    rig.begin("a", [2], choosy=True)
    until(lambda: rig.begun() == keys(2))
    rig.made.end("a")
    assert rig.made.held() == 0
    rig.tier.gate.set()
    until(lambda: rig.tier.stats.hits == 1)  # what was begun is read to its end
    until(lambda: not rig.store._fetches)  # and nobody keeps it
    assert rig.store.room.taken == 0
