from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cache_store.base import Chunk, ChunkKV, KVLayout, KVStore, LoadedChunk, Pause
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.redis import RedisStore
from cache_store.tiered import TieredStore
from tests.conftest import RedisServer

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, dtype=torch.float32)


def chunk_of(number: int, tokens: int = 10) -> Chunk:
    return Chunk(f"{number:064x}", tuple(range(tokens)))


def kv_of(number: int, tokens: int = 10, layout: KVLayout = LAYOUT) -> ChunkKV:
    generator = torch.Generator().manual_seed(number)
    shape = (2, layout.kv_heads, tokens, layout.head_dim)
    return ChunkKV.pack(
        [torch.randn(shape, generator=generator).to(layout.dtype) for _ in range(layout.layers)], layout.codec
    )


def same(found: ChunkKV | None, expected: ChunkKV) -> bool:
    return found is not None and torch.equal(found.body, expected.body)


def whole(loaded: LoadedChunk) -> ChunkKV | None:
    """A loaded chunk's KV when all of it has arrived."""
    if loaded.arrival is None:
        return loaded.kv
    assert loaded.arrival.wait(1 << 30, 10)
    return loaded.arrival.kv


KINDS = ("memory", "disk", "redis", "tiered")


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path, redis_server: RedisServer) -> Iterator[KVStore]:
    """Every kind of store, so that one contract is tested on all."""
    makers: dict[str, Callable[[], KVStore]] = {
        "memory": lambda: MemoryStore(1 << 20),
        "disk": lambda: DiskStore(tmp_path / "kv", LAYOUT, 1 << 20),
        "redis": lambda: RedisStore(redis_server.url, LAYOUT),
        "tiered": lambda: TieredStore([MemoryStore(1 << 20), DiskStore(tmp_path / "kv", LAYOUT, 1 << 20)]),
    }
    made = makers[request.param]()
    yield made
    made.close()


def interleaved(loads: list[Generator[Pause, None, Any]]) -> list[Any]:
    """Drives all in turn, as the device thread does."""
    results = []
    while loads:
        for load in list(loads):
            try:
                next(load)
            except StopIteration as stop:
                results.append(stop.value)
                loads.remove(load)
    return results
