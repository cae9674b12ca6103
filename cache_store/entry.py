"""The stored form of a chunk's KV. A stored entry is a claim: `decode` believes nothing it can compute itself.

    header, padded to 4 KiB     magic, version, codec, dtype, shape, key, one XXH3-128 per layer block; last its own
    XXH3-128 layer block 0               K then V, [2, kv_heads, tokens, head_dim], raw little-endian; padded to 4
    KiB layer block 1 ...

The size of an entry and every field but the checksums follow from the key, the layout and the token count, so a reader
checks them before it allocates or parses anything. Checksums guard against accidents, not against an adversary who can
write to the medium.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import torch
import xxhash
from torch import Tensor

from cache_store.base import Chunk, ChunkKV, KVLayout
from errors import CorruptEntry

MAGIC = b"PROPHKV\0"
VERSION = 1
CODECS = {"raw": 0}
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ALIGN = 4096
_FIXED = struct.Struct("<8sHBBIIII32s")
_DIGEST = 16

assert sys.byteorder == "little", "entries are little-endian and read without conversion"


def _padded(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _header_bytes(layout: KVLayout) -> int:
    return _padded(_FIXED.size + _DIGEST * (layout.layers + 1))


def entry_bytes(layout: KVLayout, tokens: int) -> int:
    """Exact size of the entry of a chunk of `tokens` tokens."""
    return _header_bytes(layout) + layout.layers * _padded(layout.layer_bytes(tokens))


def _fixed(chunk: Chunk, layout: KVLayout) -> bytes:
    return _FIXED.pack(
        MAGIC,
        VERSION,
        CODECS["raw"],
        DTYPES[layout.dtype],
        layout.layers,
        layout.kv_heads,
        len(chunk.token_ids),
        layout.head_dim,
        bytes.fromhex(chunk.key),
    )


def encode(chunk: Chunk, kv: ChunkKV, layout: KVLayout) -> bytearray:
    """The stored form of `kv` under `chunk.key`."""
    tokens = len(chunk.token_ids)
    assert kv.tokens == tokens
    assert len(kv.layers) == layout.layers
    entry = bytearray(entry_bytes(layout, tokens))
    blocks = _blocks(entry, layout, tokens)
    for source, block in zip(kv.layers, blocks, strict=True):
        block.copy_(source)
    header = _fixed(chunk, layout) + b"".join(_block_digests(entry, layout, tokens))
    entry[: len(header)] = header
    end = _header_bytes(layout) - _DIGEST
    entry[end : end + _DIGEST] = xxhash.xxh3_128_digest(memoryview(entry)[:end])
    return entry


def decode(entry: bytearray, chunk: Chunk, layout: KVLayout) -> ChunkKV:
    """The KV in `entry`, without a copy: the tensors share its memory.

    Raises CorruptEntry when anything differs from what `chunk` and `layout` demand.
    """
    tokens = len(chunk.token_ids)
    if len(entry) != entry_bytes(layout, tokens):
        raise CorruptEntry("length", f"{len(entry)} bytes instead of {entry_bytes(layout, tokens)}")
    fixed = _fixed(chunk, layout)
    if entry[: _FIXED.size] != fixed:
        raise CorruptEntry(_difference(bytes(entry[: _FIXED.size]), fixed))
    end = _header_bytes(layout) - _DIGEST
    if entry[end : end + _DIGEST] != xxhash.xxh3_128_digest(memoryview(entry)[:end]):
        raise CorruptEntry("header checksum")
    for index, digest in enumerate(_block_digests(entry, layout, tokens)):
        start = _FIXED.size + _DIGEST * index
        if entry[start : start + _DIGEST] != digest:
            raise CorruptEntry("block checksum", f"layer {index}")
    return ChunkKV(tuple(_blocks(entry, layout, tokens)))


def _blocks(entry: bytearray, layout: KVLayout, tokens: int) -> list[Tensor]:
    """Views of the layer blocks in `entry`."""
    size, start = layout.layer_bytes(tokens), _header_bytes(layout)
    shape = (2, layout.kv_heads, tokens, layout.head_dim)
    return [
        torch.frombuffer(
            entry, dtype=layout.dtype, count=size // layout.dtype.itemsize, offset=start + index * _padded(size)
        ).view(shape)
        for index in range(layout.layers)
    ]


def _block_digests(entry: bytearray, layout: KVLayout, tokens: int) -> Iterator[bytes]:
    """Checksums of the layer blocks, padding included, so that no byte of an entry is unguarded."""
    size, start = _padded(layout.layer_bytes(tokens)), _header_bytes(layout)
    view = memoryview(entry)
    for index in range(layout.layers):
        yield xxhash.xxh3_128_digest(view[start + index * size : start + (index + 1) * size])


def _difference(found: bytes, expected: bytes) -> str:
    """Names the first field in which the fixed header parts differ, for the metric."""
    names = ("magic", "version", "codec", "dtype", "layers", "kv_heads", "tokens", "head_dim", "key")
    pairs = zip(names, _FIXED.unpack(found), _FIXED.unpack(expected), strict=True)
    return next(name for name, a, b in pairs if a != b)
