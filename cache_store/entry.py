"""The stored form of a chunk's KV. A stored entry is a claim: a reader believes nothing it can compute itself.

    header, padded to 4 KiB     magic, version, codec, dtype, shape, key, one XXH3-128 per layer block; last its own
    layer block 0               as the codec writes it, little-endian; padded to 4 KiB
    layer block 1 ...

The size of an entry and every field but the checksums follow from the key, the layout and the token count, so a reader
checks them before it allocates or parses anything. Each block has a checksum of its own, padding included, so blocks
are verified one by one as they arrive. Checksums guard against accidents, not against an adversary who can write to the
medium.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from cache_store.base import ALIGN, Chunk, ChunkKV, KVLayout, Landing, padded
from cache_store.codec import CODECS
from errors import CorruptEntry

MAGIC = b"PROPHKV\0"
VERSION = 1
DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FIXED = struct.Struct("<8sHBBIIII32s")
_FIELDS = ("magic", "version", "codec", "dtype", "layers", "kv_heads", "tokens", "head_dim", "key")
_DIGEST = 16
# An entry that says more of itself is not one of ours; these bound what `examine` reads of it.
_MAX_LAYERS, _MAX_HEADS, _MAX_TOKENS, _MAX_DIM = 4096, 4096, 1 << 20, 4096

# Fills a buffer with an entry's next bytes, from its beginning on.
Fill = Callable[[memoryview], None]

assert sys.byteorder == "little", "entries are little-endian and read without conversion"


def header_bytes(layout: KVLayout) -> int:
    """Size of the header with its padding: where the first block begins."""
    return padded(_FIXED.size + _DIGEST * (layout.layers + 1))


def entry_bytes(layout: KVLayout, tokens: int) -> int:
    """Exact size of the entry of a chunk of `tokens` tokens."""
    return header_bytes(layout) + layout.layers * layout.stride(tokens)


def encode(chunk: Chunk, kv: ChunkKV) -> list[memoryview]:
    """The stored form of `kv` under `chunk.key`: the header and all that stands behind it, which is not copied."""
    assert kv.tokens == len(chunk.token_ids)
    body = _view(kv.body.cpu().view(-1))
    digests = [xxhash.xxh3_128_digest(block) for block in _blocks(body, kv.layout, kv.tokens)]
    header = bytearray(header_bytes(kv.layout))
    filled = _fixed(chunk, kv.layout) + b"".join(digests)
    header[: len(filled)] = filled
    header[-_DIGEST:] = xxhash.xxh3_128_digest(memoryview(header)[:-_DIGEST])
    return [memoryview(header), body]


def check_header(header: memoryview, chunk: Chunk, layout: KVLayout) -> list[bytes]:
    """The blocks' checksums. Raises CorruptEntry when anything differs from what `chunk` and `layout` demand."""
    if len(header) != header_bytes(layout):
        raise CorruptEntry("length", f"a header of {len(header)} bytes instead of {header_bytes(layout)}")
    fixed = _fixed(chunk, layout)
    if header[: _FIXED.size] != fixed:
        raise CorruptEntry(_difference(header[: _FIXED.size], fixed))
    return _digests(header, layout.layers)


def check_block(block: memoryview, digest: bytes, layer: int) -> None:
    """Raises CorruptEntry unless a block, with its padding, has this checksum."""
    if xxhash.xxh3_128_digest(block) != digest:
        raise CorruptEntry("block checksum", f"layer {layer}")


def read(fill: Fill, chunk: Chunk, layout: KVLayout, landing: Landing, at_once: int) -> ChunkKV:
    """Reads an entry, whose length the caller has checked, layer by layer; `landing` hears of every verified one.

    at_once: bytes that are read before they are verified, as far as whole blocks fit. Raises CorruptEntry, and whatever
    `fill` raises.
    """
    header = memoryview(bytearray(header_bytes(layout)))
    fill(header)
    digests = check_header(header, chunk, layout)
    tokens = len(chunk.token_ids)
    step = layout.stride(tokens)
    body = landing.buffer(step * layout.layers)
    kv, view = ChunkKV(layout, tokens, body.view(layout.layers, step)), _view(body)
    together = max(1, at_once // step)
    for layer, digest in enumerate(digests):
        if layer % together == 0:
            fill(view[layer * step : (layer + together) * step])
        check_block(view[layer * step : (layer + 1) * step], digest, layer)
        landing.arrived(kv, layer + 1)
    return kv


def decode(entry: Tensor, chunk: Chunk, layout: KVLayout) -> ChunkKV:
    """The KV in a whole entry, uint8, without a copy. Raises CorruptEntry as the checks do."""
    tokens, start, view = len(chunk.token_ids), header_bytes(layout), _view(entry)
    if len(view) != entry_bytes(layout, tokens):
        raise CorruptEntry("length", f"{len(view)} bytes instead of {entry_bytes(layout, tokens)}")
    digests = check_header(view[:start], chunk, layout)
    for layer, (block, digest) in enumerate(zip(_blocks(view[start:], layout, tokens), digests, strict=True)):
        check_block(block, digest, layer)
    return ChunkKV(layout, tokens, entry[start:].view(layout.layers, -1))


def examine(entry: memoryview) -> str:
    """The key of a whole entry of any model, which is verified against what its own header says.

    Raises CorruptEntry. For maintenance: a reader that wants a chunk knows what the header must say.
    """
    if len(entry) < ALIGN:
        raise CorruptEntry("length", f"{len(entry)} bytes are no entry")
    magic, version, codec, dtype, layers, kv_heads, tokens, head_dim, key = _FIXED.unpack(entry[: _FIXED.size])
    if magic != MAGIC:
        raise CorruptEntry("magic")
    if version != VERSION:
        raise CorruptEntry("version", str(version))
    codecs = {kind.number: name for name, kind in CODECS.items()}
    dtypes = {number: kind for kind, number in DTYPES.items()}
    if codec not in codecs or dtype not in dtypes:
        raise CorruptEntry("codec" if codec not in codecs else "dtype")
    for name, value, most in (
        ("layers", layers, _MAX_LAYERS),
        ("kv_heads", kv_heads, _MAX_HEADS),
        ("tokens", tokens, _MAX_TOKENS),
        ("head_dim", head_dim, _MAX_DIM),
    ):
        if not 0 < value <= most:
            raise CorruptEntry(name, str(value))
    layout = KVLayout(layers, kv_heads, head_dim, dtypes[dtype], codecs[codec])
    if len(entry) != entry_bytes(layout, tokens):
        raise CorruptEntry("length", f"{len(entry)} bytes instead of {entry_bytes(layout, tokens)}")
    start = header_bytes(layout)
    digests = _digests(entry[:start], layers)
    for layer, (block, digest) in enumerate(zip(_blocks(entry[start:], layout, tokens), digests, strict=True)):
        check_block(block, digest, layer)
    return bytes(key).hex()


def _fixed(chunk: Chunk, layout: KVLayout) -> bytes:
    return _FIXED.pack(
        MAGIC,
        VERSION,
        CODECS[layout.codec].number,
        DTYPES[layout.dtype],
        layout.layers,
        layout.kv_heads,
        len(chunk.token_ids),
        layout.head_dim,
        bytes.fromhex(chunk.key),
    )


def _digests(header: memoryview, layers: int) -> list[bytes]:
    """The blocks' checksums in a header whose own checksum is checked here."""
    if header[-_DIGEST:] != xxhash.xxh3_128_digest(header[:-_DIGEST]):
        raise CorruptEntry("header checksum")
    told = bytes(header[_FIXED.size :])
    return [told[at : at + _DIGEST] for at in range(0, _DIGEST * layers, _DIGEST)]


def _view(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _blocks(body: memoryview, layout: KVLayout, tokens: int) -> Iterator[memoryview]:
    """With what pads them."""
    step = layout.stride(tokens)
    for start in range(0, len(body), step):
        yield body[start : start + step]


def _difference(found: memoryview, expected: bytes) -> str:
    """Names the first field in which the fixed header parts differ, for the metric."""
    pairs = zip(_FIELDS, _FIXED.unpack(found), _FIXED.unpack(expected), strict=True)
    return next(name for name, a, b in pairs if a != b)
