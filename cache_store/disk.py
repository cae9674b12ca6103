"""Disk tier: one file an entry, published by rename, least recently used within a byte budget.

No fsync: after a power loss a torn entry fails its checksum and is recomputed. Recency is the file's mtime, set on
every hit, so it survives a restart. Files of other models live in the same folder, age and are evicted like all
others.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from cache_store import entry
from cache_store.base import Chunk, ChunkKV, KVLayout, StoreStats
from errors import CorruptEntry, StoreUnavailable

_ABANDONED_SECONDS = 600.0  # a temporary file this old belongs to a process that died while publishing


class DiskStore:
    """Entries below `folder`, at most `budget` bytes as the file system counts them."""

    name = "disk"

    def __init__(self, folder: Path, layout: KVLayout, budget: int) -> None:
        self.stats = StoreStats()
        self._folder = folder
        self._layout = layout
        self._budget = budget
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # key -> bytes on disk, least recently used first
        self._scan()

    def get(self, chunk: Chunk) -> ChunkKV | None:
        start = time.perf_counter()
        try:
            kv = self._read(chunk)
        except FileNotFoundError:
            self._forget(chunk.key)
            self.stats.misses += 1
            return None
        except CorruptEntry as error:
            self.delete([chunk.key])
            self.stats.rejected[error.reason] += 1
            self.stats.misses += 1
            return None
        except OSError as error:
            self.stats.errors += 1
            raise StoreUnavailable(f"disk tier: {error}") from error
        self.stats.hits += 1
        self.stats.read_bytes += kv.nbytes
        self.stats.read_seconds += time.perf_counter() - start
        return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        return [self._path(chunk.key).exists() for chunk in chunks]

    def put(self, chunk: Chunk, kv: ChunkKV) -> None:
        path = self._path(chunk.key)
        temporary = path.with_name(f"{uuid.uuid4().hex}.tmp")
        size = entry.entry_bytes(self._layout, kv.tokens)
        if size > self._budget:
            self.stats.dropped_writes += 1
            return
        self._evict(self._budget - size)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(entry.encode(chunk, kv, self._layout))
                size = _bytes_on_disk(temporary.stat())
                temporary.replace(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            self.stats.errors += 1
            raise StoreUnavailable(f"disk tier: {error}") from error
        self._forget(chunk.key)
        with self._lock:
            self._sizes[chunk.key] = size
            self.stats.entries += 1
            self.stats.nbytes += size
            self.stats.writes += 1

    def delete(self, keys: Iterable[str]) -> None:
        try:
            for key in keys:
                self._path(key).unlink(missing_ok=True)
                self._forget(key)
        except OSError as error:
            self.stats.errors += 1
            raise StoreUnavailable(f"disk tier: {error}") from error

    def close(self) -> None:
        pass

    def _read(self, chunk: Chunk) -> ChunkKV:
        path = self._path(chunk.key)
        with path.open("rb", buffering=0) as file:
            expected = entry.entry_bytes(self._layout, len(chunk.token_ids))
            size = os.fstat(file.fileno()).st_size
            if size != expected:
                raise CorruptEntry("length", f"{size} bytes instead of {expected}")
            data = bytearray(size)
            view, done = memoryview(data), 0
            while done < size:
                count = file.readinto(view[done:])
                if not count:
                    raise CorruptEntry("length", f"ended after {done} of {size} bytes")
                done += count
        kv = entry.decode(data, chunk, self._layout)
        os.utime(path)
        with self._lock:
            if chunk.key in self._sizes:
                self._sizes.move_to_end(chunk.key)
            else:  # another process published it
                self._sizes[chunk.key] = size
                self.stats.entries += 1
                self.stats.nbytes += size
        return kv

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / f"{key}.kv"

    def _evict(self, target: int) -> None:
        """Removes the least recently used entries until at most `target` bytes are held."""
        while self.stats.nbytes > target:
            with self._lock:
                key = next(iter(self._sizes))
            self.delete([key])
            self.stats.evictions += 1

    def _forget(self, key: str) -> None:
        with self._lock:
            size = self._sizes.pop(key, None)
            if size is not None:
                self.stats.nbytes -= size
                self.stats.entries -= 1

    def _scan(self) -> None:
        """Takes stock of the folder: adopts entries, sweeps what a killed process left behind."""
        self._folder.mkdir(parents=True, exist_ok=True)
        found: list[tuple[float, str, int]] = []
        for path in self._folder.glob("*/*"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if path.suffix == ".kv":
                found.append((stat.st_mtime, path.stem, _bytes_on_disk(stat)))
            elif time.time() - stat.st_mtime > _ABANDONED_SECONDS:
                path.unlink(missing_ok=True)
        for _, key, size in sorted(found):
            self._sizes[key] = size
        self.stats.entries = len(found)
        self.stats.nbytes = sum(size for _, _, size in found)
        self._evict(self._budget)


def _bytes_on_disk(stat: os.stat_result) -> int:
    return max(stat.st_blocks * 512, stat.st_size)
