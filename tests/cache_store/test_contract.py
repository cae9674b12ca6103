"""What every store promises, tier or tiers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from cache_store.base import KVStore
from cache_store.tiered import TieredStore
from tests.cache_store.conftest import chunk_of, kv_of, same


def test_gives_back_what_it_took(store: KVStore) -> None:
    for number, tokens in enumerate((1, 10, 333)):
        store.put(chunk_of(number, tokens), kv_of(number, tokens))
    for number, tokens in enumerate((1, 10, 333)):
        assert same(store.get(chunk_of(number, tokens)), kv_of(number, tokens))


def test_an_unknown_key_is_a_miss(store: KVStore) -> None:
    assert store.get(chunk_of(1)) is None
    assert store.stats.misses == 1


def test_tells_what_it_holds_and_how_fast_it_reads(store: KVStore) -> None:
    store.put(chunk_of(1), kv_of(1))
    assert store.holds([chunk_of(1), chunk_of(2)]) == [True, False]
    for _ in range(2):
        store.get(chunk_of(1))
    tiers = store.tiers if isinstance(store, TieredStore) else (store,)
    assert sum(tier.stats.read_bytes for tier in tiers) == 2 * kv_of(1).nbytes
    assert sum(tier.stats.read_seconds for tier in tiers) > 0


def test_a_second_put_replaces(store: KVStore) -> None:
    store.put(chunk_of(1), kv_of(1))
    store.put(chunk_of(1), kv_of(2))
    assert same(store.get(chunk_of(1)), kv_of(2))


def test_delete_removes_and_forgives(store: KVStore) -> None:
    store.put(chunk_of(1), kv_of(1))
    store.put(chunk_of(2), kv_of(2))
    store.delete([chunk_of(1).key, chunk_of(9).key])
    assert store.get(chunk_of(1)) is None
    assert same(store.get(chunk_of(2)), kv_of(2))


def test_reads_into_the_callers_buffers(store: KVStore) -> None:
    store.put(chunk_of(1), kv_of(1))
    found = store.get(chunk_of(1))
    assert found is not None
    slots = torch.zeros(2, 2, 30, 8, dtype=torch.float64)
    found.read_into(2, slots[0, :, 5:15], slots[1, :, 5:15])
    assert torch.equal(slots[:, :, 5:15].float(), kv_of(1).layer(2))
    assert float(slots[:, :, :5].abs().sum() + slots[:, :, 15:].abs().sum()) == 0


def test_many_threads_read_and_write(store: KVStore) -> None:
    def work(number: int) -> bool:
        store.put(chunk_of(number % 7), kv_of(number % 7))
        found = store.get(chunk_of(number % 7))
        return found is None or same(found, kv_of(number % 7))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))
