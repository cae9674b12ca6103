"""How fast each tier gives and takes chunk KV, against the raw medium in the same run.

    memory   placing a chunk in the slots, K turned, against a plain copy of the same bytes
    disk     reading verified entries (page cache warm) against `readinto` and the same checksums
    redis    GET and SET over unix socket and TCP, against a bare RESP client with the same checksums, and redis-py

Everything is interleaved in one process. Rates are of the entry's bytes; CPU is this process's, not the server's.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from benchmarks.report import conditions, paired_ratio, publish
from cache_store import entry
from cache_store.base import Chunk, ChunkKV, KVLayout, KVStore, host_memory
from cache_store.codec import CODECS
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.redis import VALUE_BYTES, RedisStore
from cache_store.tiered import TieredStore
from engine import placing
from errors import ConfigError

# The goals of the design, as shares of the raw medium's rate, or times that of redis-py.
GOALS = {"memory": 0.8, "disk": 0.8, "redis get, unix": 0.85, "get over redis-py": 1.6, "set over redis-py": 4.0}
_TOKENS = 512
_LOADS = 64


@dataclass(frozen=True, slots=True)
class Plan:
    """`megabytes`: entry sizes; `rounds` of every way, interleaved; `codecs` and how many `chunks` to place."""

    megabytes: tuple[float, ...] = (1, 4, 12, 64)
    rounds: int = 15
    codecs: tuple[str, ...] = tuple(CODECS)
    chunks: int = 16


Way = Callable[[], None]


def measure(plan: Plan, folder: Path, command: str) -> dict[str, Any]:
    """Everything, in about a minute. `folder`: on the disk to be measured. Raises ConfigError without redis-server."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.resolve()) as place, _redis(Path(place)) as urls:
        told: dict[str, Any] = {"command": command, "conditions": conditions(), "goals": GOALS}
        told["memory"] = [
            _memory(codec, dtype, plan) for codec in plan.codecs for dtype in (torch.float32, torch.bfloat16)
        ]
        told["disk"] = [_disk(size, Path(place), plan) for size in plan.megabytes]
        told["redis"] = [_redis_rates(size, name, url, plan) for size in plan.megabytes for name, url in urls.items()]
        told["concurrent"] = _concurrent(Path(place) / "many", plan)
    return told


def _memory(codec: str, dtype: torch.dtype, plan: Plan) -> dict[str, Any]:
    """Placing chunks of a model of the 0.5B class on one thread, as the compiled kernel does."""
    threads = torch.get_num_threads()
    layers, kv_heads, head_dim, chunks = 24, 2, 64, plan.chunks
    kv = [_kv(KVLayout(layers, kv_heads, head_dim, dtype, codec), _TOKENS, seed) for seed in range(chunks)]
    raw = [_kv(KVLayout(layers, kv_heads, head_dim, dtype), _TOKENS, seed) for seed in range(chunks)]
    views = [[chunk.layer(layer).unbind() for chunk in raw] for layer in range(layers)]
    slots = torch.zeros(layers, 2, kv_heads, chunks * _TOKENS, head_dim, dtype=dtype)
    angles = torch.arange(chunks * _TOKENS)[:, None] * torch.logspace(0, -4, head_dim // 2)
    turns = list(zip(*(torch.split(turn, _TOKENS) for turn in (angles.cos(), angles.sin())), strict=True))

    def placed(how: Callable[..., None]) -> Way:
        def run() -> None:
            for layer in range(layers):
                keys, values = slots[layer]
                for index, (chunk, (cos, sin)) in enumerate(zip(kv, turns, strict=True)):
                    at = slice(index * _TOKENS, (index + 1) * _TOKENS)
                    how(chunk, layer, cos, sin, keys[:, at], values[:, at])

        return run

    def copied() -> None:
        for layer in range(layers):
            keys, values = slots[layer]
            for index, (k, v) in enumerate(views[layer]):
                at = slice(index * _TOKENS, (index + 1) * _TOKENS)
                keys[:, at].copy_(k)
                values[:, at].copy_(v)

    def copied_by_all() -> None:
        torch.set_num_threads(threads)
        copied()
        torch.set_num_threads(1)

    ways: dict[str, Way] = {"copy": copied, "copy by all": copied_by_all, "plain": placed(placing.place_plain)}
    if placing.COMPILED:
        ways["compiled"] = placed(placing.place_compiled)
    nbytes = sum(chunk.nbytes for chunk in raw)
    torch.set_num_threads(1)
    times = _interleaved(ways, plan.rounds)
    torch.set_num_threads(threads)
    told = {"codec": codec, "dtype": str(dtype).removeprefix("torch."), "ways": _rates(times, nbytes)}
    return told | {"share": {name: _share(times["copy"], times[name]) for name in ways if name != "copy"}}


def _disk(megabytes: float, folder: Path, plan: Plan) -> dict[str, Any]:
    layout, tokens = _shape(megabytes)
    chunk, kv = _chunk(tokens), _kv(layout, tokens)
    store = DiskStore(folder / f"disk{megabytes}", layout, 1 << 40)
    store.put(chunk, kv)
    path = next((folder / f"disk{megabytes}").rglob("*.kv"))
    size, steps = entry.entry_bytes(layout, tokens), _blocks(layout, tokens)

    def raw() -> None:
        memory: Any = host_memory(size).numpy()
        view = memoryview(memory)
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < size:
                done += file.readinto(view[done:]) or 0
        _checked(view, steps)

    target = folder / "raw.bin"
    pieces = entry.encode(chunk, kv)

    def raw_write() -> None:
        _checked(memoryview(b"".join(pieces)), steps)
        target.unlink(missing_ok=True)
        with target.open("wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)

    gets = _interleaved({"raw": raw, "ours": lambda: _found(store, chunk)}, plan.rounds)
    puts = _interleaved({"raw": raw_write, "ours": lambda: store.put(chunk, kv)}, plan.rounds)
    told = {"bytes": size, "get": _rates(gets, size), "put": _rates(puts, size)}
    return told | {"share": _share(gets["raw"], gets["ours"])}


def _redis_rates(megabytes: float, transport: str, url: str, plan: Plan) -> dict[str, Any]:
    layout, tokens = _shape(megabytes)
    chunk, kv = _chunk(tokens), _kv(layout, tokens)
    size, steps = entry.entry_bytes(layout, tokens), _blocks(layout, tokens)
    ours, theirs = (RedisStore(url, layout, 10.0, direct=direct) for direct in (True, False))
    ours.put(chunk, kv)
    bare = _Bare(url)

    def raw() -> None:
        memory: Any = host_memory(size).numpy()
        view = memoryview(memory)
        bare.get(chunk.key, view)
        _checked(view, steps)

    gets = _interleaved(
        {"raw": raw, "ours": lambda: _found(ours, chunk), "redis-py": lambda: _found(theirs, chunk)}, plan.rounds
    )
    whole = memoryview(b"".join(entry.encode(chunk, kv)))

    def raw_set() -> None:
        _checked(whole, steps)
        bare.set(chunk.key, whole)

    sets = _interleaved(
        {"raw": raw_set, "ours": lambda: ours.put(chunk, kv), "redis-py": lambda: theirs.put(chunk, kv)}, plan.rounds
    )
    ours.delete([chunk.key])
    for closing in (ours, theirs, bare):
        closing.close()
    told = {"transport": transport, "bytes": size, "get": _rates(gets, size), "set": _rates(sets, size)}
    return told | {
        "share": _share(gets["raw"], gets["ours"]),
        "set_share": _share(sets["raw"], sets["ours"]),
        "get_over_redis_py": _share(gets["redis-py"], gets["ours"]),
        "set_over_redis_py": _share(sets["redis-py"], sets["ours"]),
    }


def _concurrent(folder: Path, plan: Plan) -> dict[str, Any]:
    """64 loads at once through a window of 32 MiB, each chunk dropped as soon as it is there: memory beyond that."""
    layout, tokens = _shape(4)
    disk = DiskStore(folder, layout, 1 << 40)
    chunks = [_chunk(tokens, number) for number in range(_LOADS)]
    kv = _kv(layout, tokens)
    for chunk in chunks:
        disk.put(chunk, kv)
    window = 32 << 20
    store = TieredStore([MemoryStore(0), disk], in_flight_bytes=window)
    growth, seconds = [], []
    for _ in range(plan.rounds):
        before, peak, over = _resident(), [0], threading.Event()

        def watch(peak: list[int] = peak, over: threading.Event = over) -> None:
            while not over.wait(0.001):
                peak[0] = max(peak[0], _resident())

        watcher = threading.Thread(target=watch)
        watcher.start()
        start = time.perf_counter()
        with ThreadPoolExecutor(_LOADS) as pool:
            assert all(pool.map(partial(_load, store), chunks))
        seconds.append(time.perf_counter() - start)
        over.set()
        watcher.join()
        growth.append(peak[0] - before)
    store.close()
    return {
        "loads": _LOADS,
        "bytes": _LOADS * kv.nbytes,
        "window": window,
        "in_flight_peak": store.room.peak,
        "resident_growth": growth,
        "gb_per_s": round(_LOADS * kv.nbytes / float(np.median(seconds)) / 1e9, 3),
    }


def _load(store: TieredStore, chunk: Chunk) -> bool:
    """Waits for a chunk and drops it."""
    fetch = store.fetch(chunk)
    while not fetch.over:
        fetch.wait(1 << 30, 60.0)
    return fetch.kv is not None


class _Bare:
    """The least that can be said to a Redis: what a socket and a buffer give."""

    def __init__(self, url: str) -> None:
        kind, _, where = url.partition("://")
        if kind == "unix":
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(where)
        else:
            host, _, port = where.partition(":")
            self._socket = socket.create_connection((host, int(port)))
        self._line = bytearray(64)

    def get(self, key: str, view: memoryview) -> None:
        """Fills `view` with an entry's values."""
        parts = self._parts(key, view)
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(name), name) for name, _ in parts))
        for _, part in parts:
            self._fill(memoryview(self._line)[: len(b"$%d\r\n" % len(part))])
            self._fill(part)
            self._fill(memoryview(self._line)[:2])

    def set(self, key: str, view: memoryview) -> None:
        """Stores an entry's values."""
        parts = self._parts(key, view)
        for name, part in parts:
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(name), name, len(part)))
            self._socket.sendall(part)
            self._socket.sendall(b"\r\n")
        self._fill(memoryview(bytearray(len(b"+OK\r\n") * len(parts))))

    def _parts(self, key: str, view: memoryview) -> list[tuple[bytes, memoryview]]:
        """The names and values that an entry has in Redis."""
        return [
            (b"prophetkv:{%s}:%d" % (key.encode(), index), view[start : start + VALUE_BYTES])
            for index, start in enumerate(range(0, len(view), VALUE_BYTES))
        ]

    def _fill(self, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._socket.recv_into(view[done:])

    def close(self) -> None:
        self._socket.close()


@contextmanager
def _redis(folder: Path) -> Iterator[dict[str, str]]:
    """URLs, by transport, of a server of our own."""
    binary = shutil.which("redis-server")
    if binary is None:
        raise ConfigError("redis-server is not installed; this benchmark starts one of its own")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = folder / "redis.sock"
    options = ["--port", str(port), "--unixsocket", str(path), "--save", "", "--appendonly", "no"]
    process = subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL, cwd=folder)
    try:
        while not path.exists():
            if process.poll() is not None:
                raise ConfigError(f"redis-server does not start below {folder}")
            time.sleep(0.02)
        yield {"unix": f"unix://{path}", "tcp": f"redis://127.0.0.1:{port}"}
    finally:
        process.kill()
        process.wait()


def _interleaved(ways: dict[str, Way], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Wall and CPU seconds of each way in each round; one more round warms up."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            wall, cpu = time.perf_counter(), time.process_time()
            way()
            if turn:
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def _rates(times: dict[str, list[tuple[float, float]]], nbytes: int) -> dict[str, dict[str, float]]:
    told = {}
    for name, samples in times.items():
        wall, cpu = np.array(samples).T
        told[name] = {
            "gb_per_s": round(nbytes / float(np.median(wall)) / 1e9, 3),
            "p50_ms": round(float(np.percentile(wall, 50)) * 1000, 3),
            "p99_ms": round(float(np.percentile(wall, 99)) * 1000, 3),
            "cpu_s_per_gb": round(float(cpu.mean()) / nbytes * 1e9, 3),
        }
    return told


def _share(reference: list[tuple[float, float]], ours: list[tuple[float, float]]) -> dict[str, Any]:
    """Our rate over the reference's, of paired rounds, with its interval."""
    found = paired_ratio([wall for wall, _ in reference], [wall for wall, _ in ours])
    return {"ratio": found["ratio"], "interval": found["interval"]}


def _checked(view: memoryview, steps: list[tuple[int, int]]) -> None:
    for start, stop in steps:
        xxhash.xxh3_128_digest(view[start:stop])


def _blocks(layout: KVLayout, tokens: int) -> list[tuple[int, int]]:
    """Where the blocks of an entry are that have checksums."""
    start, step = entry.header_bytes(layout), layout.stride(tokens)
    return [(start + layer * step, start + (layer + 1) * step) for layer in range(layout.layers)]


def _shape(megabytes: float) -> tuple[KVLayout, int]:
    """A layout of 24 layers, and how many tokens make about so many MB."""
    layout = KVLayout(layers=24, kv_heads=2, head_dim=64, dtype=torch.bfloat16)
    return layout, max(1, round(megabytes * (1 << 20) / layout.layers / layout.block_bytes(1)))


def _chunk(tokens: int, number: int = 0) -> Chunk:
    return Chunk(f"{number:064x}", (0,) * tokens)


def _kv(layout: KVLayout, tokens: int, seed: int = 0) -> ChunkKV:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, layout.kv_heads, tokens, layout.head_dim)
    return ChunkKV.pack(
        [torch.randn(shape, generator=generator).to(layout.dtype) for _ in range(layout.layers)], layout.codec
    )


def _found(store: KVStore, chunk: Chunk) -> None:
    assert store.get(chunk) is not None


def _resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def report(result: dict[str, Any], out: Path) -> None:
    """See benchmarks.report.publish."""

    def plot() -> None:
        from benchmarks.store_plots import plot_rates

        plot_rates(result, out.with_suffix(".png"))

    publish(result, out, markdown(result), plot)


def markdown(result: dict[str, Any]) -> str:
    """The result as tables with its conditions."""
    told = result["conditions"]
    lines = [
        "# Chunk KV store",
        "",
        f"`{result['command']}`, {told['cpu']}, {told['cores']} cores, {told['threads']} threads, "
        f"load {told['load']:.1f}, {told['date']}.",
        "Medians of interleaved rounds, ratios with 95 % bootstrap intervals; CPU is the client's.",
        "",
        "## Memory: into the slots, K turned, on one thread",
        "",
        "| codec | dtype | copy GB/s | compiled GB/s | of copy | torch GB/s | of copy | copy by all threads GB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["memory"]:
        cells = [row["codec"], row["dtype"], f"{row['ways']['copy']['gb_per_s']:.2f}"]
        for way in ("compiled", "plain"):
            known = way in row["ways"]
            cells += [f"{row['ways'][way]['gb_per_s']:.2f}", _ratio(row["share"][way])] if known else ["", "not built"]
        cells.append(f"{row['ways']['copy by all']['gb_per_s']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "## Disk (page cache warm) and Redis",
        "",
        "| medium | MB | op | client | GB/s | p50 ms | p99 ms | CPU s/GB | ours over it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [("disk", row, {"get": {"raw": "share"}, "put": {}}) for row in result["disk"]]
    over = {
        "get": {"raw": "share", "redis-py": "get_over_redis_py"},
        "set": {"raw": "set_share", "redis-py": "set_over_redis_py"},
    }
    rows += [(f"redis, {row['transport']}", row, over) for row in result["redis"]]
    for medium, row, shares in rows:
        for op, compared in shares.items():
            for client, found in row[op].items():
                ratio = _ratio(row[compared[client]]) if client in compared else ""
                figures = [f"{found[name]:.2f}" for name in ("gb_per_s", "p50_ms", "p99_ms", "cpu_s_per_gb")]
                lines.append(
                    f"| {medium} | {row['bytes'] / 1e6:.1f} | {op} | {client} | {' | '.join(figures)} | {ratio} |"
                )
    many = result["concurrent"]
    growth = [grown / 1e6 for grown in many["resident_growth"]]
    lines += [
        "",
        f"{many['loads']} loads at once, {many['bytes'] / 1e6:.0f} MB, at {many['gb_per_s']:.2f} GB/s: at most "
        f"{many['in_flight_peak'] / 1e6:.1f} MB in flight, the bound being {many['window'] / 1e6:.1f}; resident memory "
        f"grew by {np.median(growth):.1f} MB, the first time by {growth[0]:.1f}, at most by {max(growth):.1f} "
        f"({len(growth)} times).",
    ]
    return "\n".join(lines) + "\n"


def _ratio(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return f"{found['ratio']:.2f} [{low:.2f}, {high:.2f}]"
