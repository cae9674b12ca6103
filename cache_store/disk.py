"""Disk tier: one file an entry, published by rename, within a byte budget.

No fsync: after a power loss a torn entry fails its checksum and is recomputed. Recency is the file's mtime, set on
every hit, so it survives a restart. Files of other models live in the same folder, age and are evicted like all others.
A reader that has opened a file reads it to its end, whoever evicts it meanwhile.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from cache_store import entry
from cache_store.base import KEEP, OWN_MEMORY, Chunk, ChunkKV, KVLayout, Landing, Retention, StoreStats
from cache_store.ledger import Ledger, Policy
from errors import CorruptEntry, StoreUnavailable

# In one system call, so that a slow disk shows that it moves, and before they are verified, while the CPU has them.
_READ_BYTES = 1 << 20
_MAX_PIECES = 512  # buffers in one system call; the system takes 1024


class DiskStore:
    """Entries below `folder`, at most `budget` bytes as the file system counts them."""

    name = "disk"

    def __init__(self, folder: Path, layout: KVLayout, budget: int, policy: Policy = "lru") -> None:
        self.stats = StoreStats()
        self._folder = folder
        self._layout = layout
        self._ledger = Ledger(budget, policy)
        self._writing = threading.RLock()  # whoever changes files holds it, so that books and folder agree
        with self._failures():
            self._scan()

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        start = time.perf_counter()
        kv = None
        with self._failures():
            try:
                if self._ledger.touch(chunk.key):
                    kv = self._read(chunk, landing)
                else:
                    self._discard(chunk.key)
            except FileNotFoundError:
                if chunk.key in self._ledger:
                    self._strike(chunk.key)
            except CorruptEntry as error:
                self.stats.reject(error.reason)
                self._discard(chunk.key)
        if kv is None:
            self.stats.count("misses")
            return None
        self.stats.hit(kv.nbytes, start)
        return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        with self._failures():
            return [not self._ledger.overdue(chunk.key) and _exists(self._path(chunk.key)) for chunk in chunks]

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        size = entry.entry_bytes(kv.layout, kv.tokens)
        pieces = entry.encode(chunk, kv)
        with self._failures(), self._writing:
            self._unlink([chunk.key])  # a former file goes first: the budget has no room for two
            for key in self._ledger.expired():
                self._discard(key)
            if self._ledger.admit(chunk.key, size, kv.tokens, retention, self._evict) is None:
                self.stats.count("dropped_writes")
                return
            try:
                self._ledger.resize(chunk.key, self._publish(Path(self._path(chunk.key)), pieces))
            except BaseException:
                self._strike(chunk.key)
                raise
            self.stats.count("writes")
            self._take_stock()

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        self._ledger.retain(keys, retention)

    def delete(self, keys: Iterable[str]) -> None:
        with self._failures(), self._writing:
            self._unlink(keys)

    def close(self) -> None:
        pass

    def _read(self, chunk: Chunk, landing: Landing) -> ChunkKV:
        expected = entry.entry_bytes(self._layout, len(chunk.token_ids))
        file = os.open(self._path(chunk.key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            if status.st_size != expected:
                raise CorruptEntry("length", f"{status.st_size} bytes instead of {expected}")
            kv = entry.read(partial(_fill, file, landing), chunk, self._layout, landing, _READ_BYTES)
            with suppress(OSError):  # what is read-only still serves, with the recency that it had
                os.utime(file)
        finally:
            os.close(file)
        if chunk.key not in self._ledger:
            self._adopt(chunk, _bytes_on_disk(status))
        return kv

    def _discard(self, key: str) -> None:
        """Removes what is of no use any more. To fail in that is no failure of what else is done."""
        with suppress(StoreUnavailable):  # it is counted; and a write under this key will fail of it
            self.delete([key])

    def _strike(self, key: str) -> None:
        """Takes out of the books what is not there any more: somebody else has removed it."""
        with self._writing:
            if not _exists(self._path(key)):
                self._forget(key)

    def _adopt(self, chunk: Chunk, nbytes: int) -> None:
        """Takes up what another process published, if it is still there."""
        with self._writing:
            if _exists(self._path(chunk.key)):
                self._take_up(chunk.key, nbytes, len(chunk.token_ids))

    def _take_up(self, key: str, nbytes: int, cost: float) -> None:
        """Counts a file that is there, also where nothing can be removed to make room for it."""
        try:
            if self._ledger.admit(key, nbytes, cost, remove=self._evict) is None:
                self._evict(key)
        except OSError:
            self.stats.count("errors")
            self._ledger.enter(key, nbytes, cost)
        self._take_stock()

    def _publish(self, path: Path, pieces: list[memoryview]) -> int:
        """Writes a file under another name and renames it when it is whole; returns its bytes on disk."""
        try:
            return _written(path, pieces)
        except FileNotFoundError:
            # Another process swept the file before its lock was taken, or somebody removed the folder.
            return _written(path, pieces)

    def _path(self, key: str) -> str:
        return f"{self._folder}/{key[:2]}/{key}.kv"  # a Path takes a fifth of the time of reading a megabyte

    def _evict(self, key: str) -> None:
        self._unlink([key])
        self.stats.count("evictions")

    def _unlink(self, keys: Iterable[str]) -> None:
        """Removes files. Those that cannot be removed stay in the books, and the last one's error is raised."""
        failed: OSError | None = None
        for key in keys:
            try:
                Path(self._path(key)).unlink(missing_ok=True)
            except OSError as error:
                failed = error
            else:
                self._forget(key)
        if failed is not None:
            raise failed

    def _forget(self, key: str) -> None:
        self._ledger.forget(key)
        self._take_stock()

    def _take_stock(self) -> None:
        self.stats.entries, self.stats.nbytes = len(self._ledger), self._ledger.nbytes

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.stats.count("errors")
            raise StoreUnavailable(f"disk tier: {error}") from error

    def _scan(self) -> None:
        """Takes stock of the folder: adopts entries, oldest first, and sweeps what a killed process left behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in [path for folder in self._folder.iterdir() for path in folder.glob("*.tmp")]:
            try:
                _sweep(path)
            except FileNotFoundError:
                pass
            except OSError:  # a read-only folder still serves
                self.stats.count("errors")
        token = self._layout.layers * self._layout.block_bytes(1)
        for path, size in stored_files(self._folder):
            self._take_up(path.stem, size, size / token)


def _exists(path: str) -> bool:
    """Raises OSError where that cannot be said, unlike os.path.exists."""
    try:
        os.stat(path)
    except FileNotFoundError:
        return False
    return True


def _sweep(temporary: Path) -> None:
    """Removes a file that nobody is writing: its writer would hold the lock, and a killed one cannot."""
    file = os.open(temporary, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        temporary.unlink()
    except BlockingIOError:
        pass
    finally:
        os.close(file)


def stored_files(folder: Path) -> list[tuple[Path, int]]:
    """The entries' files below `folder`, of whatever model, least recently used first, with their bytes on disk.

    What cannot be looked at comes first, with none.
    """
    found = []
    for path in folder.glob("*/*.kv"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        except OSError:
            found.append((0.0, path, 0))
        else:
            found.append((status.st_mtime, path, _bytes_on_disk(status)))
    return [(path, size) for _, path, size in sorted(found)]


def _fill(file: int, landing: Landing, view: memoryview) -> None:
    """Reads until `view` is full. Raises CorruptEntry where the file ends before."""
    done = 0
    while done < len(view):
        count = os.readv(file, [view[done : done + _READ_BYTES]])
        if not count:
            raise CorruptEntry("length", "the file ends early")
        done += count
        landing.moving()


def _written(path: Path, pieces: list[memoryview]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
    try:
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            _write(file, pieces)
            size = _bytes_on_disk(os.fstat(file))
            temporary.replace(path)
        finally:
            os.close(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size


def _write(file: int, pieces: list[memoryview]) -> None:
    rest = list(pieces)
    while rest:
        count = os.writev(file, rest[:_MAX_PIECES])
        while rest and count >= len(rest[0]):
            count -= len(rest.pop(0))
        if count:
            rest[0] = rest[0][count:]


def _bytes_on_disk(status: os.stat_result) -> int:
    return max(status.st_blocks * 512, status.st_size)
