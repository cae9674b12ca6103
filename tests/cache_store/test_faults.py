"""Faults of the disk and of those who use the store: always the right bytes or a miss, and nothing left over."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import torch

from cache_store import entry
from cache_store.base import ALIGN, KEEP, OWN_MEMORY, Chunk, ChunkKV, Landing, OwnMemory, Retention, StoreStats
from cache_store.disk import DiskStore
from cache_store.fetch import Fetch, Room
from cache_store.memory import MemoryStore
from cache_store.redis import RedisStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from errors import StoreUnavailable
from tests.cache_store.conftest import LAYOUT, chunk_of, interleaved, kv_of, same, whole
from tests.conftest import RedisServer
from tests.tiny import run

ENTRY = entry.entry_bytes(LAYOUT, 10)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# The disk


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system with room for ten entries; where mounting is not allowed, one that says so when it is full."""
    folder = tmp_path / "small"
    folder.mkdir()
    size = 10 * ENTRY
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "kv", str(folder)], check=False).returncode == 0:
        yield folder
        subprocess.run(["umount", str(folder)], check=True)
        return
    write = os.writev

    def limited(file: int, pieces: Any) -> int:
        if sum(path.stat().st_size for path in folder.rglob("*.*")) + sum(map(len, pieces)) > size:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, pieces)

    monkeypatch.setattr(os, "writev", limited)
    yield folder


def test_a_full_disk_drops_writes_and_serves_reads(small_disk: Path) -> None:
    disk = DiskStore(small_disk, LAYOUT, 1 << 30)
    store = TieredStore([MemoryStore(0), disk])
    for number in range(30):
        store.put(chunk_of(number), kv_of(number))
        store.flush()
    held = [number for number in range(30) if same(store.lookup(chunk_of(number)).kv, kv_of(number))]
    assert 8 <= len(held) <= 10
    assert disk.stats.errors == 3  # then the tier was left alone, for writing only
    assert disk.stats.dropped_writes == 30 - len(held)
    assert len(files(small_disk)) == disk.stats.entries == len(held)  # no temporary file is left
    disk.delete([chunk_of(number).key for number in held[:5]])
    disk.put(chunk_of(99), kv_of(99))
    assert same(disk.get(chunk_of(99)), kv_of(99))
    store.close()


@contextmanager
def read_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes a `small_disk` read-only meanwhile."""
    with ExitStack() as stack:
        if subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=False).returncode == 0:
            stack.callback(subprocess.run, ["mount", "-o", "remount,rw", str(folder)], check=True)
        else:

            def refused(*arguments: Any, **options: Any) -> Any:
                raise OSError(errno.EROFS, "Read-only file system")

            patch = stack.enter_context(monkeypatch.context())
            for name in ("utime", "writev", "unlink", "replace", "mkdir"):
                patch.setattr(os, name, refused)
        yield


def used(folder: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in folder.rglob("*.kv"))


def test_what_is_read_only_serves_and_takes_nothing(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    DiskStore(small_disk, LAYOUT, 1 << 30).put(chunk_of(1), kv_of(1))
    with read_only(small_disk, monkeypatch):
        disk = DiskStore(small_disk, LAYOUT, 1 << 30)
        store = TieredStore([MemoryStore(0), disk])
        for _ in range(5):
            assert same(store.lookup(chunk_of(1)).kv, kv_of(1))
        assert disk.stats.errors == 0
        store.put(chunk_of(2), kv_of(2))
        store.flush()
        assert disk.stats.dropped_writes == 1
        with pytest.raises(StoreUnavailable, match="Read-only"):
            store.delete([chunk_of(1).key])
        assert same(store.lookup(chunk_of(1)).kv, kv_of(1))
        store.close()


def test_what_is_read_only_and_beyond_the_budget_serves_all_it_has(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DiskStore(small_disk, LAYOUT, 1 << 30)
    for number in range(4):
        first.put(chunk_of(number), kv_of(number))
    (small_disk / "00" / "dead.tmp").write_bytes(b"x")
    with read_only(small_disk, monkeypatch):
        disk = DiskStore(small_disk, LAYOUT, 2 * ENTRY)
        assert all(same(disk.get(chunk_of(number)), kv_of(number)) for number in range(4))
        assert disk.stats.nbytes == used(small_disk) == 4 * ENTRY
        assert disk.stats.errors == 3  # two that should have gone, and the leftover
    disk.put(chunk_of(4), kv_of(4))
    assert disk.stats.nbytes == used(small_disk) == 2 * ENTRY


def test_what_is_of_no_use_on_a_read_only_disk_is_a_miss_and_pauses_writing_only(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DiskStore(small_disk, LAYOUT, 1 << 30)
    for number in range(3):
        first.put(chunk_of(number), kv_of(number))
    next(small_disk.rglob(f"{chunk_of(0).key}.kv")).write_bytes(b"x")
    with read_only(small_disk, monkeypatch):
        disk = DiskStore(small_disk, LAYOUT, 1 << 30)
        store = TieredStore([MemoryStore(0), disk])
        disk.retain([chunk_of(1).key], Retention(seconds=0.01))
        time.sleep(0.05)
        for _ in range(5):
            found = [store.lookup(chunk_of(number)) for number in range(3)]
            assert [fetch.kv is not None for fetch in found] == [False, False, True]
            assert all(fetch.faults == () for fetch in found)
        assert (disk.stats.misses, disk.stats.rejected["length"], disk.stats.errors) == (10, 5, 10)
        for _ in range(5):
            store.put(chunk_of(0), kv_of(0))
        store.flush()
        assert (disk.stats.dropped_writes, disk.stats.errors) == (5, 13)
        assert same(store.lookup(chunk_of(2)).kv, kv_of(2))
        store.close()


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> Iterator[None]:
    """A call of the system fails meanwhile for one entry."""
    real = getattr(os, name)

    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        if key in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, name, call)
        yield


def test_what_cannot_be_removed_counts_and_keeps_no_other_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = DiskStore(tmp_path, LAYOUT, 4 * ENTRY)
    for number in range(4):
        disk.put(chunk_of(number), kv_of(number))
    with failing(monkeypatch, "unlink", chunk_of(1).key):
        with pytest.raises(StoreUnavailable):
            disk.put(chunk_of(9, 60), kv_of(9, 60))  # takes the room of two
        assert disk.stats.nbytes == used(tmp_path) == 3 * ENTRY
        disk.put(chunk_of(9, 60), kv_of(9, 60))
        assert [name in files(tmp_path) for name in (f"{chunk_of(n).key}.kv" for n in (0, 1, 2, 3, 9))] == [
            False, True, False, True, True
        ]  # fmt: skip
        assert disk.stats.nbytes == used(tmp_path) <= 4 * ENTRY
        with pytest.raises(StoreUnavailable):
            disk.delete([chunk_of(number).key for number in (1, 3, 9)])
        assert files(tmp_path) == [f"{chunk_of(1).key}.kv"]
        assert disk.stats.nbytes == ENTRY
        disk.retain([chunk_of(1).key], Retention(seconds=0.01))
        time.sleep(0.05)
        disk.put(chunk_of(2), kv_of(2))  # although what has expired is still there
    disk.put(chunk_of(3), kv_of(3))
    assert disk.stats.nbytes == used(tmp_path) == 2 * ENTRY


def test_what_another_process_wrote_counts_even_where_nothing_can_go_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = DiskStore(tmp_path, LAYOUT, 2 * ENTRY), DiskStore(tmp_path, LAYOUT, 1 << 20)
    for number in range(2):
        mine.put(chunk_of(number), kv_of(number))
    other.put(chunk_of(2), kv_of(2))
    with failing(monkeypatch, "unlink", chunk_of(0).key):
        assert same(mine.get(chunk_of(2)), kv_of(2))
        assert mine.stats.nbytes == used(tmp_path) == 3 * ENTRY
    assert mine.stats.errors == 1
    mine.put(chunk_of(3), kv_of(3))
    assert mine.stats.nbytes == used(tmp_path) == 2 * ENTRY


def test_a_disk_that_cannot_say_what_it_holds_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = DiskStore(tmp_path, LAYOUT, 1 << 20)
    disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk])
    with failing(monkeypatch, "stat", chunk_of(1).key):
        told = [store.locate_many([chunk_of(1)]) for _ in range(4)]
        assert all(places == [None] for places, _ in told)
        assert ["Input/output error" in fault for _, (fault,) in told] == [True] * 3 + [False]
        assert disk.stats.errors == 3
        next(tmp_path.rglob("*.kv")).rename(tmp_path / "away")
        with pytest.raises(StoreUnavailable):
            disk.get(chunk_of(1))
        assert disk.stats.entries == 1  # it may be there
    assert disk.get(chunk_of(1)) is None
    assert disk.stats.entries == 0
    store.close()


def test_a_folder_that_cannot_be_used_is_an_error_of_the_tier(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for folder in (tmp_path / "file", tmp_path / "file" / "kv"):
        with pytest.raises(StoreUnavailable, match=r"disk tier: .*file"):
            DiskStore(folder, LAYOUT, 1 << 20)


def test_a_file_that_cannot_be_looked_at_keeps_nobody_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DiskStore(tmp_path, LAYOUT, 1 << 20)
    for number in range(2):
        first.put(chunk_of(number), kv_of(number))
    with failing(monkeypatch, "stat", chunk_of(0).key):
        disk = DiskStore(tmp_path, LAYOUT, 1 << 20)
    assert all(same(disk.get(chunk_of(number)), kv_of(number)) for number in range(2))


OPERATIONS = ("open", "writev", "readv", "fstat", "stat", "utime", "close", "unlink", "replace", "mkdir")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_whichever_call_fails_the_store_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The first, second, third ... system call of what a request does fails, until none is left to fail."""
    real = {name: getattr(os, name) for name in OPERATIONS}
    left = [0]

    def counted(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "close":
                    real["close"](*arguments)
                raise OSError(code, os.strerror(code))
            return real[name](*arguments, **options)

        return call

    failures = 0
    for index in range(1, 100):
        folder = tmp_path / str(index)
        store = DiskStore(folder, LAYOUT, 1 << 20)
        with monkeypatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(os, name, counted(name))
            left[0] = index
            told = 0
            for what in ("put", "holds", "get", "get"):
                try:
                    if what == "put":
                        store.put(chunk_of(1), kv_of(1))
                    elif what == "holds":
                        store.holds([chunk_of(1)])
                    else:
                        found = store.get(chunk_of(1))
                        assert found is None or same(found, kv_of(1))
                except StoreUnavailable:
                    told += 1
            reached = left[0] <= 0
        if not reached:
            break
        assert told == store.stats.errors <= 1  # a recency that cannot be written is no error
        failures += told
        store.put(chunk_of(1), kv_of(1))
        assert same(store.get(chunk_of(1)), kv_of(1))
        assert files(folder) == [f"{chunk_of(1).key}.kv"]
        assert store.stats.nbytes == ENTRY
    assert failures >= 13


class During(OwnMemory):
    """A landing that does something as soon as the first layer is there."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act = act

    def arrived(self, kv: ChunkKV, layers: int) -> None:
        if layers == 1:
            self._act()


@pytest.mark.parametrize("by", ["eviction", "deletion", "another process"])
def test_a_file_that_goes_while_it_is_read_is_read_to_its_end(tmp_path: Path, by: str) -> None:
    store = DiskStore(tmp_path, LAYOUT, 2 * ENTRY)
    store.put(chunk_of(1), kv_of(1))

    def evict() -> None:
        for number in (2, 3):
            store.put(chunk_of(number), kv_of(number))

    acts: dict[str, Callable[[], object]] = {
        "eviction": evict,
        "deletion": lambda: store.delete([chunk_of(1).key]),
        "another process": lambda: next(tmp_path.rglob(f"{chunk_of(1).key}.kv")).unlink(),
    }
    assert same(store.get(chunk_of(1), During(acts[by])), kv_of(1))
    assert store.get(chunk_of(1)) is None
    assert store.stats.nbytes == store.stats.entries * ENTRY


def test_files_written_by_a_clock_that_is_a_day_off_are_entries_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = DiskStore(tmp_path, LAYOUT, 1 << 20)
    for number, shift in enumerate((-86400, 86400)):
        first.put(chunk_of(number), kv_of(number))
        then = time.time() + shift
        os.utime(next(tmp_path.rglob(f"{chunk_of(number).key}.kv")), (then, then))
    store = DiskStore(tmp_path, LAYOUT, 1 << 20)
    store.retain([chunk_of(0).key], Retention(seconds=3600))
    now = time.time
    for shift in (86400, -86400):
        monkeypatch.setattr(time, "time", lambda shift=shift: now() + shift)
        assert all(same(store.get(chunk_of(number)), kv_of(number)) for number in range(2))
    store.put(chunk_of(2), kv_of(2))
    assert store.stats.entries == 3


def test_a_temporary_file_is_swept_when_its_writer_is_dead_and_only_then(tmp_path: Path) -> None:
    folder = tmp_path / "00"
    folder.mkdir()
    (folder / "dead.tmp").write_bytes(b"x")
    with (folder / "alive.tmp").open("wb") as writing:
        fcntl.flock(writing, fcntl.LOCK_EX)
        DiskStore(tmp_path, LAYOUT, 1 << 20)
        assert files(tmp_path) == ["alive.tmp"]
    DiskStore(tmp_path, LAYOUT, 1 << 20)
    assert files(tmp_path) == []


def writer(folder: Path, budget: int, turns: int) -> int:
    """The id of another process that writes and reads there, and ends with status 1 when it read what is wrong."""
    kvs = [kv_of(number) for number in range(20)]
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        store = DiskStore(folder, LAYOUT, budget)
        for turn in range(turns):
            store.put(chunk_of(turn * 7 % 20), kvs[turn * 7 % 20])
            found = store.get(chunk_of(turn % 20))
            assert found is None or same(found, kvs[turn % 20])
        status = 0
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Waits for the process; its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_processes_that_share_a_folder_never_read_each_others_halves(tmp_path: Path) -> None:
    others = [writer(tmp_path, 12 * ENTRY, 400) for _ in range(2)]
    store = DiskStore(tmp_path, LAYOUT, 12 * ENTRY)
    for turn in range(400):
        store.put(chunk_of(turn * 3 % 20), kv_of(turn * 3 % 20))
        found = store.get(chunk_of(turn % 20))
        assert found is None or same(found, kv_of(turn % 20))
    assert [ended(other) for other in others] == [0, 0]
    assert store.stats.rejected.total() == 0
    assert all(name.endswith(".kv") for name in files(tmp_path))


def test_fifty_processes_killed_while_publishing_leave_whole_entries_only(tmp_path: Path) -> None:
    chance = random.Random(0)
    for _ in range(50):
        child = writer(tmp_path, 1 << 20, 1_000_000)
        time.sleep(chance.uniform(0, 0.1))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == -signal.SIGKILL
        store = DiskStore(tmp_path, LAYOUT, 1 << 20)
        assert all(name.endswith(".kv") for name in files(tmp_path))
        found = [store.get(chunk_of(number)) for number in range(20)]
        assert all(kv is None or same(kv, kv_of(number)) for number, kv in enumerate(found))
        assert store.stats.rejected.total() == 0
        assert store.stats.entries == len(files(tmp_path))


# Those who use the store


class Encoder:
    """Encodes in three steps and counts."""

    def __init__(self) -> None:
        self.started = 0

    def __call__(self, chunk: Chunk) -> Generator[None, None, ChunkKV]:
        self.started += 1
        for _ in range(3):
            yield
        return kv_of(int(chunk.key, 16))


class Gated(DiskStore):
    """A disk that gives nothing until its gate is opened."""

    def __init__(self, folder: Path, gate: threading.Event) -> None:
        super().__init__(folder, LAYOUT, 1 << 20)
        self._gate = gate
        self.asked = 0

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        self.asked += 1
        self._gate.wait()
        return super().get(chunk, landing)


@pytest.mark.parametrize("stored", [False, True])
def test_a_thousand_requests_for_one_chunk_read_it_or_compute_it_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    monkeypatch.setattr("cache_store.source._PATIENCE_SECONDS", 0.0)
    gate = threading.Event()
    disk, encoder = Gated(tmp_path, gate), Encoder()
    if stored:
        disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk])
    source = ChunkSource(store, encoder)
    loads = [source.load(chunk_of(1)) for _ in range(1000)]
    for load in loads:  # all ask before the first has its answer
        next(load)
    gate.set()
    for load in loads[::3]:  # a third is cancelled, the first, who drives, among them
        load.close()
    results = interleaved([load for index, load in enumerate(loads) if index % 3])
    assert len(results) == 666
    assert all(same(whole(result), kv_of(1)) for result in results)
    assert (disk.stats.hits, disk.stats.misses, encoder.started) == ((1, 0, 0) if stored else (0, 1, 1))
    store.close()


def test_threads_that_want_the_same_chunk_share_the_read(tmp_path: Path) -> None:
    gate = threading.Event()

    disk = Gated(tmp_path, gate)
    disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk])
    with ThreadPoolExecutor(32) as pool:
        fetches = list(pool.map(lambda _: store.fetch(chunk_of(1)), range(64)))
    assert len(set(map(id, fetches))) == 1
    assert not fetches[0].wait(0, 0.01)
    gate.set()
    assert fetches[0].wait(1 << 30, 10)
    assert same(fetches[0].kv, kv_of(1))
    assert disk.stats.hits == 1
    store.close()


def test_a_slow_tier_keeps_nobody_else_waiting(tmp_path: Path) -> None:
    """While one request waits for the disk another, whose chunk is in memory, goes all the way."""
    gate = threading.Event()

    memory, disk = MemoryStore(1 << 20), Gated(tmp_path, gate)
    memory.put(chunk_of(1), kv_of(1))
    disk.put(chunk_of(2), kv_of(2))
    store = TieredStore([memory, disk])
    source = ChunkSource(store, Encoder())
    waiting = source.load(chunk_of(2))
    for _ in range(3):
        next(waiting)
    assert run(source.load(chunk_of(1))).tier == "memory"
    gate.set()
    assert same(whole(run(waiting)), kv_of(2))
    store.close()


def test_a_disk_that_hangs_is_given_up_and_left_alone(tmp_path: Path) -> None:
    """Also for those whose turn has not come, and while nobody waits for the reads that hang."""
    before = set(threading.enumerate())
    gate, encoder = threading.Event(), Encoder()
    disk, memory = Gated(tmp_path, gate), MemoryStore(1 << 20)
    for number in range(12):
        disk.put(chunk_of(number), kv_of(number))
    store = TieredStore([memory, disk], patience={"disk": 0.3})
    source = ChunkSource(store, encoder)
    kept = source.prefetch([chunk_of(number) for number in range(12)])
    loaded = run(source.load(chunk_of(11)))
    assert (loaded.tier, len(loaded.faults)) == ("computed", 1)
    loaded = run(source.load(chunk_of(0)))
    assert (loaded.tier, loaded.faults) == ("computed", ("disk tier: no byte in 0.3 s",))
    asked = disk.asked
    assert 3 <= asked <= 10  # there are eight places; two more may take the place of the first two that are given up
    del kept
    memory.delete(chunk_of(number).key for number in range(12))
    for number in range(8, 12):
        assert run(source.load(chunk_of(number))).tier == "computed"
    assert disk.asked == asked
    gate.set()
    deadline = time.monotonic() + 30
    while not all(memory.holds([chunk_of(number) for number in range(min(asked, 8))])):  # what comes late is kept
        assert time.monotonic() < deadline
    store.close()
    assert store.room.taken == 0
    assert set(threading.enumerate()) <= before


def test_a_disk_that_hangs_when_asked_what_it_holds_is_given_up(tmp_path: Path) -> None:
    gate = threading.Event()

    class Mute(DiskStore):
        asked = 0

        def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
            self.asked += 1
            gate.wait()
            return super().holds(chunks)

    disk = Mute(tmp_path, LAYOUT, 1 << 20)
    disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk], patience={"disk": 0.1})
    told = [store.locate_many([chunk_of(1)]) for _ in range(5)]
    silent, paused = "disk tier: no answer in 0.1 s", "disk tier: paused after repeated failures"
    assert told == [([None], (fault,)) for fault in (silent, silent, silent, paused, paused)]
    assert disk.asked == 3
    gate.set()
    deadline = time.monotonic() + 30
    while store.locate_many([chunk_of(1)]) != (["disk"], ()):
        assert time.monotonic() < deadline
    store.close()


def test_a_disk_that_has_come_back_is_asked_again(tmp_path: Path) -> None:
    gate = threading.Event()
    disk = Gated(tmp_path, gate)
    disk.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk], patience={"disk": 0.1})
    source = ChunkSource(store, Encoder())
    for number in range(3):
        assert run(source.load(chunk_of(number))).tier == "computed"
    gate.set()
    deadline = time.monotonic() + 30
    while (loaded := run(source.load(chunk_of(1)))).tier != "disk":
        assert time.monotonic() < deadline
    assert same(whole(loaded), kv_of(1))
    store.close()


def test_patience_counts_from_the_last_byte_and_only_while_a_tier_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("cache_store.fetch.time", SimpleNamespace(monotonic=lambda: now[0]))
    room = Room(100)
    fetch = Fetch(chunk_of(1), room, pinned=False)

    def given_up_after(seconds: float) -> bool:
        for _ in range(round(seconds * 100)):
            now[0] += 0.01
            if fetch.give_up():
                return True
        return False

    assert not given_up_after(10)  # its turn has not come
    fetch.begin("redis", None)
    assert not given_up_after(10)  # Redis bounds its own waiting
    fetch.begin("disk", 0.25)
    steps: list[Callable[[], object]] = [lambda: fetch.buffer(80), fetch.moving, lambda: fetch.arrived(kv_of(1), 1)]
    for step in steps:
        assert not given_up_after(0.2)
        step()
    now[0] += 10  # nobody had a turn
    assert not fetch.give_up()
    fetch.moving()
    assert not given_up_after(0.2)
    other = Fetch(chunk_of(2), room, pinned=False)
    other.begin("disk", 0.25)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.buffer, 80)
        while other._looked is not None:
            time.sleep(0.001)
        now[0] += 0.2
        assert not other.give_up()
        assert given_up_after(0.06)
        assert (fetch.over, fetch.kv, fetch.faults) == (True, None, ("disk tier: no byte in 0.25 s",))
        waiting.result(10)  # the room is free again
    fetch.arrived(kv_of(1), 2)
    fetch.settle(kv_of(1), "disk", ())
    assert (fetch.kv, fetch.tier) == (None, None)


def test_an_entry_takes_room_until_who_waits_for_it_has_its_turn() -> None:
    room = Room(80)
    fetch = Fetch(chunk_of(1), room, pinned=False)
    fetch.buffer(80)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(fetch.wait, 0, 30.0)
        while fetch._turns < 2:
            time.sleep(0.001)
        with fetch._changed:  # so that the other cannot have its turn
            fetch.settle(kv_of(1), "disk", ())
            fetch.end()
            assert room.taken == 80
        assert waiting.result(30)
    assert room.taken == 0


def test_a_disk_shows_that_it_moves_within_a_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(OwnMemory):
        moves = 0

        def moving(self) -> None:
            self.moves += 1

    monkeypatch.setattr("cache_store.disk._READ_BYTES", 1000)
    store, landing = DiskStore(tmp_path, LAYOUT, 1 << 20), Counting()
    store.put(chunk_of(1), kv_of(1))
    assert same(store.get(chunk_of(1), landing), kv_of(1))
    assert landing.moves >= ENTRY // 1000


def test_bytes_in_flight_are_bounded_and_given_back(tmp_path: Path, redis_server: RedisServer) -> None:
    """Sixty-four loads at once through a window of four entries, some from a tier that fails in the middle."""
    body = ENTRY - ALIGN
    disk, far = DiskStore(tmp_path, LAYOUT, 1 << 30), RedisStore(redis_server.url, LAYOUT)
    for number in range(64):
        (disk if number % 2 else far).put(chunk_of(number), kv_of(number))
    for path in list(tmp_path.rglob("*.kv"))[::4]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    store = TieredStore([MemoryStore(0), disk, far], in_flight_bytes=4 * body)
    fetches = [store.fetch(chunk_of(number)) for number in range(64)]
    for fetch in fetches:
        assert fetch.wait(1 << 30, 30)
    found = [fetch for fetch in fetches if fetch.kv is not None]
    assert len(found) == 56
    assert all(same(fetch.kv, kv_of(int(fetch.chunk.key, 16))) for fetch in found)
    assert store.room.peak <= 4 * body
    store.close()
    assert store.room.taken == 0


def test_an_entry_larger_than_the_window_is_read_alone(tmp_path: Path) -> None:
    disk = DiskStore(tmp_path, LAYOUT, 1 << 30)
    for number in range(3):
        disk.put(chunk_of(number), kv_of(number))
    store = TieredStore([MemoryStore(0), disk], in_flight_bytes=100)
    fetches = [store.fetch(chunk_of(number)) for number in range(3)]
    assert all(fetch.wait(1 << 30, 30) and same(fetch.kv, kv_of(number)) for number, fetch in enumerate(fetches))
    assert store.room.peak == ENTRY - ALIGN
    store.close()


def test_reads_that_nobody_wants_any_more_are_not_made(tmp_path: Path) -> None:
    gate = threading.Event()

    disk = Gated(tmp_path, gate)
    for number in range(20):
        disk.put(chunk_of(number), kv_of(number))
    store = TieredStore([MemoryStore(0), disk])
    fetches = [store.fetch(chunk_of(number)) for number in range(20)]
    last = fetches[-1]
    del fetches[8:]  # as many as there are readers have begun
    gate.set()
    assert all(fetch.wait(1 << 30, 10) for fetch in [*fetches, last])
    assert disk.stats.hits == 9
    store.close()


def test_an_error_nobody_thought_of_is_a_failure_of_the_tier(tmp_path: Path) -> None:
    class Broken(DiskStore):
        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            landing.buffer(100)
            raise ZeroDivisionError("a bug")

        def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
            raise ZeroDivisionError("a bug")

        def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
            raise ZeroDivisionError("a bug")

        def delete(self, keys: Iterable[str]) -> None:
            raise ZeroDivisionError("a bug")

    broken, last = Broken(tmp_path / "1", LAYOUT, 1 << 20), DiskStore(tmp_path / "2", LAYOUT, 1 << 20)
    store = TieredStore([MemoryStore(0), broken, last])
    source = ChunkSource(store, Encoder())
    told, paused = "disk tier: ZeroDivisionError: a bug", "disk tier: paused after repeated failures"
    assert store.locate_many([chunk_of(9)]) == ([None], (told,))
    assert [run(source.load(chunk_of(n))).faults for n in range(5)] == [(told,)] * 2 + [(paused,)] * 3
    store.flush()
    assert (broken.stats.errors, broken.stats.dropped_writes) == (3 + 3, 5)
    assert (store.stats.misses, last.stats.writes) == (5, 5)
    with pytest.raises(StoreUnavailable, match="a bug"):
        store.delete([chunk_of(1).key])
    assert last.holds([chunk_of(1)]) == [False]
    store.close()
    assert store.room.taken == 0


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("no memory"), MemoryError()])
def test_memory_that_cannot_be_had_costs_neither_an_answer_nor_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refused(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    memory = MemoryStore(1 << 20, pinned=True)
    with pytest.raises(StoreUnavailable, match="memory tier"):
        memory.put(chunk_of(1), kv_of(1))
    store = TieredStore([memory, DiskStore(tmp_path, LAYOUT, 1 << 20)])
    source = ChunkSource(store, Encoder())
    assert run(source.load(chunk_of(1))).tier == "computed"
    store.flush()
    loaded = run(source.load(chunk_of(1)))
    assert (loaded.tier, loaded.faults) == ("disk", ())
    assert same(whole(loaded), kv_of(1))
    assert (memory.stats.errors, memory.stats.dropped_writes) == (3, 2)
    store.close()


def test_a_store_leaves_no_threads_and_no_open_files(tmp_path: Path, redis_server: RedisServer) -> None:
    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    before = counts()
    for _ in range(5):
        store = TieredStore(
            [MemoryStore(0), DiskStore(tmp_path, LAYOUT, 1 << 20), RedisStore(redis_server.url, LAYOUT)]
        )
        for number in range(5):
            store.put(chunk_of(number), kv_of(number))
        store.flush()
        with redis.Redis.from_url(redis_server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        fetches = [store.fetch(chunk_of(number)) for number in range(9)]
        assert all(fetch.wait(1 << 30, 10) for fetch in fetches)
        store.delete([chunk_of(number).key for number in range(5)])
        store.close()
    assert counts() == before


def test_a_tier_that_takes_over_never_takes_back_what_has_arrived(tmp_path: Path, redis_server: RedisServer) -> None:
    """The first fails behind two layers; whoever was told of these still reads them while the second catches up."""
    seen: list[bool] = []

    class Failing(DiskStore):
        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            return super().get(chunk, _Watched(landing, fail_at=2))

    class Following(RedisStore):
        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            return super().get(chunk, _Watched(landing, fail_at=99))

    class _Watched:
        def __init__(self, landing: Landing, fail_at: int) -> None:
            self._landing = landing
            self._fail_at = fail_at

        def buffer(self, nbytes: int) -> Any:
            return self._landing.buffer(nbytes).zero_()

        def moving(self) -> None:
            self._landing.moving()

        def arrived(self, kv: ChunkKV, layers: int) -> None:
            self._landing.arrived(kv, layers)
            for layer in range(3):
                if fetch.wait(layer, 0):
                    assert fetch.kv is not None
                    seen.append(bool((fetch.kv.block(layer) == kv_of(1).block(layer)).all()))
            if layers == self._fail_at:
                raise StoreUnavailable("disk tier: it burns")

    disk, far = Failing(tmp_path, LAYOUT, 1 << 20), Following(redis_server.url, LAYOUT)
    for tier in (disk, far):
        tier.put(chunk_of(1), kv_of(1))
    store = TieredStore([MemoryStore(0), disk, far])
    fetch = Fetch(chunk_of(1), store.room, pinned=False)
    assert store._search(fetch, slice(1, None))
    assert (fetch.tier, fetch.faults) == ("redis", ("disk tier: it burns",))
    assert len(seen) == 1 + 2 + 2 + 2 + 3
    assert all(seen)
    store.close()


def test_counts_are_right_whoever_counts() -> None:
    stats = StoreStats()

    def count() -> None:
        for _ in range(5000):
            stats.hit(2, time.perf_counter())
            stats.count("misses")
            stats.reject("a")

    with ThreadPoolExecutor(8) as pool:
        for _ in range(8):
            pool.submit(count)
    assert (stats.hits, stats.read_bytes, stats.misses, stats.rejected["a"]) == (40_000, 80_000, 40_000, 40_000)
