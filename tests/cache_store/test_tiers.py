"""What is particular to each tier, and what the tiers do together when one of them is sick."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store import entry
from cache_store.base import KEEP, OWN_MEMORY, Chunk, ChunkKV, Landing, Retention, StoreStats
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.redis import RedisStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from errors import StoreUnavailable
from tests.cache_store.conftest import LAYOUT, chunk_of, interleaved, kv_of, same, whole
from tests.conftest import RedisServer
from tests.tiny import run

ENTRY = entry.entry_bytes(LAYOUT, 10)
SIZE = kv_of(0).resident


# Memory


def test_memory_evicts_the_least_recently_used_by_bytes() -> None:
    store = MemoryStore(3 * SIZE)
    for number in range(3):
        store.put(chunk_of(number), kv_of(number))
    assert store.get(chunk_of(0)) is not None
    store.put(chunk_of(3), kv_of(3))
    assert [store.get(chunk_of(number)) is not None for number in range(4)] == [True, False, True, True]
    assert (store.stats.nbytes, store.stats.entries, store.stats.evictions) == (3 * SIZE, 3, 1)


def test_memory_does_not_take_what_is_larger_than_its_budget() -> None:
    store = MemoryStore(3 * SIZE)
    store.put(chunk_of(1), kv_of(1))
    store.put(chunk_of(2, 100), kv_of(2, 100))
    assert store.get(chunk_of(2, 100)) is None
    assert same(store.get(chunk_of(1)), kv_of(1))
    assert store.stats.dropped_writes == 1


def test_memory_of_a_device_keeps_copies_of_its_own() -> None:
    """On torch's device without memory, which shows all but the bytes."""
    store = MemoryStore(2 * SIZE, name="device", device=torch.device("meta"))
    kvs = [kv_of(number) for number in range(3)]
    for number, kv in enumerate(kvs):
        store.put(chunk_of(number), kv)
    assert [store.get(chunk_of(number)) is not None for number in range(3)] == [False, True, True]
    found = store.get(chunk_of(1))
    assert found is not None
    assert (found.body.device.type, found.body.shape, found.layout) == ("meta", kvs[1].body.shape, LAYOUT)
    assert kvs[1].body.device.type == "cpu"
    assert (store.stats.nbytes, store.stats.entries, store.stats.evictions) == (2 * SIZE, 2, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["device", "pinned"])
def test_memory_for_a_gpu_gives_back_what_it_took(kind: str) -> None:
    gpu = torch.device("cuda")
    store = MemoryStore(1 << 20, device=gpu) if kind == "device" else MemoryStore(1 << 20, pinned=True)
    store.put(chunk_of(1), kv_of(1))
    found = store.get(chunk_of(1))
    assert found is not None
    assert (found.body.is_cuda, found.body.is_pinned()) == (kind == "device", kind == "pinned")
    assert torch.equal(found.body.cpu(), kv_of(1).body)


# Disk


def test_disk_keeps_its_budget_in_real_bytes_and_evicts_the_oldest(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LAYOUT, 4 * ENTRY)
    for number in range(4):
        store.put(chunk_of(number), kv_of(number))
    store.get(chunk_of(0))
    store.put(chunk_of(4), kv_of(4))
    store.put(chunk_of(5), kv_of(5))
    assert [store.get(chunk_of(n)) is not None for n in range(6)] == [True, False, False, True, True, True]
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*.kv"))
    assert used <= 4 * ENTRY
    assert store.stats.nbytes == used


def test_disk_survives_a_restart_with_its_recency(tmp_path: Path) -> None:
    first = DiskStore(tmp_path, LAYOUT, 1 << 20)
    for number in range(3):
        first.put(chunk_of(number), kv_of(number))
        os.utime(next(tmp_path.glob(f"*/{chunk_of(number).key}.kv")), (number, number))
    first.get(chunk_of(0))
    second = DiskStore(tmp_path, LAYOUT, 2 * ENTRY)
    assert second.stats.entries == 2
    assert same(second.get(chunk_of(0)), kv_of(0))
    assert second.get(chunk_of(1)) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "grow", "swap"])
def test_a_damaged_file_is_a_miss_counted_and_removed(tmp_path: Path, damage: str) -> None:
    store = DiskStore(tmp_path, LAYOUT, 1 << 20)
    store.put(chunk_of(1), kv_of(1))
    store.put(chunk_of(2), kv_of(2))
    path = next(tmp_path.glob(f"*/{chunk_of(1).key}.kv"))
    data = bytearray(path.read_bytes())
    if damage == "flip":
        data[len(data) // 2] ^= 1
    elif damage == "swap":
        data = bytearray(next(tmp_path.glob(f"*/{chunk_of(2).key}.kv")).read_bytes())
    path.write_bytes({"truncate": data[:-1], "empty": bytearray(), "grow": data + b"x"}.get(damage, data))
    assert store.get(chunk_of(1)) is None
    assert not path.exists()
    assert store.stats.rejected.total() == 1
    assert store.stats.entries == 1
    assert same(store.get(chunk_of(2)), kv_of(2))


def test_disk_works_on_after_its_folder_was_deleted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path / "kv", LAYOUT, 1 << 20)
    store.put(chunk_of(1), kv_of(1))
    for path in sorted((tmp_path / "kv").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (tmp_path / "kv").rmdir()
    assert store.get(chunk_of(1)) is None
    assert store.stats.entries == 0
    store.put(chunk_of(1), kv_of(1))
    assert same(store.get(chunk_of(1)), kv_of(1))


def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    mine, other = (DiskStore(tmp_path, LAYOUT, 1 << 20) for _ in range(2))
    other.put(chunk_of(1), kv_of(1))
    assert same(mine.get(chunk_of(1)), kv_of(1))
    assert mine.stats.entries == 1
    other.delete([chunk_of(1).key])
    assert mine.get(chunk_of(1)) is None
    assert mine.stats.entries == 0


# Tiers together


class Sick:
    """A tier whose medium fails always."""

    name = "sick"

    def __init__(self) -> None:
        self.stats = StoreStats()

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        raise StoreUnavailable("sick tier: it burns")

    def holds(self, chunks: Any) -> list[bool]:
        raise StoreUnavailable("sick tier: it burns")

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        raise StoreUnavailable("sick tier: it burns")

    def retain(self, keys: Any, retention: Retention) -> None:
        raise StoreUnavailable("sick tier: it burns")

    def delete(self, keys: Any) -> None:
        raise StoreUnavailable("sick tier: it burns")

    def close(self) -> None:
        pass


def test_reads_through_and_promotes(tmp_path: Path, redis_server: RedisServer) -> None:
    memory, disk = MemoryStore(1 << 20), DiskStore(tmp_path, LAYOUT, 1 << 20)
    far = RedisStore(redis_server.url, LAYOUT)
    far.put(chunk_of(1), kv_of(1))
    store = TieredStore([memory, disk, far])
    assert [store.lookup(chunk_of(1)).tier for _ in range(2)] == ["redis", "memory"]
    store.flush()
    assert same(disk.get(chunk_of(1)), kv_of(1))
    memory.delete([chunk_of(1).key])
    assert store.lookup(chunk_of(1)).tier == "disk"
    store.close()


def test_a_failing_tier_is_a_miss_that_is_told(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, LAYOUT, 1 << 20)
    store = TieredStore([MemoryStore(0), Sick(), disk])
    store.put(chunk_of(1), kv_of(1))
    store.flush()
    found = store.lookup(chunk_of(1))
    assert same(found.kv, kv_of(1))
    assert (found.tier, found.faults) == ("disk", ("sick tier: it burns",))
    with pytest.raises(StoreUnavailable):
        store.delete([chunk_of(1).key])
    assert disk.get(chunk_of(1)) is None
    store.close()


def test_a_tier_that_has_everything_and_gives_nothing_is_left_alone() -> None:
    class Mute(Sick):
        def holds(self, chunks: Any) -> list[bool]:
            return [True] * len(chunks)

        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            self.stats.count("errors")
            raise StoreUnavailable("mute tier: Timeout")

    mute = Mute()
    store = TieredStore([MemoryStore(0), mute])
    for _ in range(20):
        store.locate_many([chunk_of(1), chunk_of(2)])
        store.lookup(chunk_of(1))
        store.lookup(chunk_of(2))
    assert mute.stats.errors == 3
    assert store.locate_many([chunk_of(1)]) == ([None], ("sick tier: paused after repeated failures",))
    store.close()


def test_what_is_deleted_while_it_is_read_does_not_come_back(tmp_path: Path) -> None:
    reading, deleted = threading.Event(), threading.Event()

    class Gated(DiskStore):
        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            found = super().get(chunk, landing)
            reading.set()
            assert deleted.wait(10)
            return found

    memory, disk = MemoryStore(1 << 20), Gated(tmp_path, LAYOUT, 1 << 20)
    disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([memory, disk])
    fetch = store.fetch(chunk_of(1))
    assert reading.wait(10)
    store.delete([chunk_of(1).key])
    deleted.set()
    assert fetch.wait(1 << 30, 10)
    assert same(fetch.kv, kv_of(1))  # who asked before may still have it
    assert memory.holds([chunk_of(1)]) == disk.holds([chunk_of(1)]) == [False]
    store.close()


def test_a_chunk_is_located_without_loading_it(tmp_path: Path, redis_server: RedisServer) -> None:
    memory, disk = MemoryStore(1 << 20), DiskStore(tmp_path, LAYOUT, 1 << 20)
    far = RedisStore(redis_server.url, LAYOUT)
    for tier, numbers in ((memory, (1,)), (disk, (1, 2)), (far, (1, 2, 3))):
        for number in numbers:
            tier.put(chunk_of(number), kv_of(number))
    store = TieredStore([memory, Sick(), disk, far])
    places, faults = store.locate_many([chunk_of(number) for number in (3, 1, 4, 2)])
    assert places == ["redis", "memory", None, "disk"]
    assert faults == ("sick tier: it burns",)
    assert sum(tier.stats.hits + tier.stats.misses for tier in store.tiers) == 0
    store.close()


def test_what_has_been_read_is_located_although_its_tier_has_lost_it(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, LAYOUT, 1 << 20)
    disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk])
    fetch = store.fetch(chunk_of(1))
    assert fetch.wait(1 << 30, 10)
    disk.delete([chunk_of(1).key])
    assert store.locate_many([chunk_of(1)]) == (["disk"], ())
    assert store.fetch(chunk_of(1)) is fetch
    del fetch
    assert store.locate_many([chunk_of(1)]) == ([None], ())
    store.close()


def test_the_backlog_is_bounded_and_drops_are_counted() -> None:
    gate = threading.Event()

    class Slow(MemoryStore):
        name = "slow"

        def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
            gate.wait()
            super().put(chunk, kv, retention)

    slow = Slow(1 << 20)
    store = TieredStore([MemoryStore(1 << 20), slow], backlog_bytes=3 * SIZE)
    for number in range(6):
        store.put(chunk_of(number), kv_of(number))
    gate.set()
    store.flush()
    assert slow.stats.writes == 3
    assert slow.stats.dropped_writes == 3
    store.close()


def test_an_entry_larger_than_the_backlog_is_written_when_nothing_else_waits(tmp_path: Path) -> None:
    kv = kv_of(1)
    disk = DiskStore(tmp_path, LAYOUT, 1 << 30)
    store = TieredStore([MemoryStore(1 << 30), disk], backlog_bytes=kv.resident // 2)
    store.put(chunk_of(1), kv)
    store.flush()
    assert disk.get(chunk_of(1)) is not None
    store.close()


def test_delete_comes_after_pending_writes(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, LAYOUT, 1 << 30)
    store = TieredStore([MemoryStore(0), disk])
    for number in range(50):
        store.put(chunk_of(number), kv_of(number))
    store.delete([chunk_of(number).key for number in range(50)])
    assert disk.stats.entries == 0
    store.close()


# The source


class Encoder:
    """Encodes in three steps and counts."""

    def __init__(self) -> None:
        self.started = 0
        self.fail = False

    def __call__(self, chunk: Chunk) -> Generator[None, None, ChunkKV]:
        self.started += 1
        for _ in range(3):
            yield
        if self.fail:
            raise RuntimeError("device lost")
        return kv_of(int(chunk.key, 16))


def test_the_source_computes_on_a_miss_and_stores() -> None:
    encoder = Encoder()
    store = TieredStore([MemoryStore(1 << 20)])
    source = ChunkSource(store, encoder)
    assert [run(source.load(chunk_of(1))).tier for _ in range(3)] == ["computed", "memory", "memory"]
    assert same(store.get(chunk_of(1)), kv_of(1))
    assert encoder.started == 1
    store.close()


def test_interleaved_loads_share_one_computation() -> None:
    encoder = Encoder()
    store = TieredStore([MemoryStore(0)])  # keeps nothing: only the shared computation can help
    source = ChunkSource(store, encoder)
    asked = store.fetch(chunk_of(1))
    assert asked.wait(0, 10)  # that it is not there, all learn at the same time
    results = interleaved([source.load(chunk_of(1)) for _ in range(100)])
    assert encoder.started == 1
    assert all(same(whole(result), kv_of(1)) for result in results)
    store.close()


def test_a_dropped_load_leaves_its_computation_to_the_others() -> None:
    encoder = Encoder()
    store = TieredStore([MemoryStore(1 << 20)])
    source = ChunkSource(store, encoder)
    leader, follower = source.load(chunk_of(1)), source.load(chunk_of(1))
    next(leader)
    next(follower)
    leader.close()
    assert same(whole(run(follower)), kv_of(1))
    assert encoder.started == 1
    alone = source.load(chunk_of(2))
    next(alone)
    alone.close()
    del alone
    run(source.load(chunk_of(2)))
    assert encoder.started == 3  # nobody drove the first computation of chunk 2 any more: it was dropped
    store.close()


def test_a_failed_computation_is_tried_anew_by_the_next() -> None:
    encoder = Encoder()
    encoder.fail = True
    store = TieredStore([MemoryStore(1 << 20)])
    source = ChunkSource(store, encoder)
    with pytest.raises(RuntimeError, match="device lost"):
        run(source.load(chunk_of(1)))
    encoder.fail = False
    assert same(whole(run(source.load(chunk_of(1)))), kv_of(1))
    store.close()
