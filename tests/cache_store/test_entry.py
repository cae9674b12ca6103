"""An entry is a claim to verify: nothing but the very bytes that were written under that key is accepted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cache_store import entry
from cache_store.base import ALIGN, Chunk, ChunkKV, KVLayout
from errors import CorruptEntry
from tests.cache_store.conftest import LAYOUT, chunk_of, kv_of, same


def stored(chunk: Chunk, kv: ChunkKV) -> bytearray:
    return bytearray(b"".join(entry.encode(chunk, kv)))


def decoded(data: bytearray, chunk: Chunk, layout: KVLayout) -> ChunkKV:
    body = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return entry.decode(body, chunk, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 64, 100])
def test_round_trip_is_bit_exact_and_shares_the_buffer(dtype: torch.dtype, tokens: int) -> None:
    layout = replace(LAYOUT, dtype=dtype)
    kv = kv_of(1, tokens, layout)
    data = stored(chunk_of(1, tokens), kv)
    assert len(data) == entry.entry_bytes(layout, tokens)
    found = decoded(data, chunk_of(1, tokens), layout)
    assert same(found, kv)
    data[-ALIGN] ^= 0xFF
    assert not same(found, kv)


def test_blocks_are_aligned() -> None:
    data = stored(chunk_of(1), kv_of(1))
    assert len(data) % ALIGN == 0
    assert len(data) == ALIGN * (1 + LAYOUT.layers)


def test_random_mutations_are_all_refused() -> None:
    """3,000 seeded ones: flipped bits anywhere, padding too, cut and grown entries, swapped halves, zeroes."""
    chunk = chunk_of(1)
    data = stored(chunk, kv_of(1))
    chance = random.Random(0)
    for _ in range(3000):
        bad = bytearray(data)
        kind = chance.randrange(5)
        if kind == 0:
            bad[chance.randrange(len(bad))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del bad[chance.randrange(len(bad)) :]
        elif kind == 2:
            bad += bytes(chance.randrange(1, 5000))
        elif kind == 3:
            cut = chance.randrange(1, len(bad))
            bad = bad[cut:] + bad[:cut]
        else:
            start = chance.randrange(len(bad) - 1)
            stop = chance.randrange(start + 1, len(bad))
            bad[start:stop] = bytes(stop - start)
        if bad == data:
            continue
        with pytest.raises(CorruptEntry):
            decoded(bad, chunk, LAYOUT)


def test_every_byte_of_the_header_matters() -> None:
    data = stored(chunk_of(1), kv_of(1))
    for index in range(ALIGN):
        data[index] ^= 1
        with pytest.raises(CorruptEntry):
            decoded(data, chunk_of(1), LAYOUT)
        data[index] ^= 1
    decoded(data, chunk_of(1), LAYOUT)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 4, "kv_heads": 4}, "kv_heads"),
        ({"dtype": torch.float16, "head_dim": 16}, "dtype"),
        ({"layers": 4}, "length"),
    ],
)
def test_an_entry_of_another_layout_is_refused(change: dict[str, object], reason: str) -> None:
    data = stored(chunk_of(1), kv_of(1))
    with pytest.raises(CorruptEntry, match=reason):
        decoded(data, chunk_of(1), replace(LAYOUT, **change))  # type: ignore[arg-type]


def test_an_entry_under_another_key_is_refused() -> None:
    data = stored(chunk_of(1), kv_of(1))
    with pytest.raises(CorruptEntry, match="key"):
        decoded(data, Chunk(chunk_of(2).key, chunk_of(1).token_ids), LAYOUT)


def test_another_format_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "VERSION", 2)
    data = stored(chunk_of(1), kv_of(1))
    monkeypatch.undo()
    with pytest.raises(CorruptEntry, match="version"):
        decoded(data, chunk_of(1), LAYOUT)
