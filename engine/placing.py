"""Puts stored KV into a request's slots on the CPU: dequantise, turn K to its positions, scatter.

By a compiled kernel in one pass over memory where the package was built with a C compiler, else by torch in several.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cache_store.base import ChunkKV, KVLayout
from cache_store.codec import CODECS, Shape

try:
    from engine.kernels import _place
except ImportError:  # built without a C compiler
    COMPILED = False
else:
    COMPILED = True

# As engine/kernels/place.c numbers them.
_KINDS = {"int8": 3, "fp8": 4, "int4": 5}
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


def place(kv: ChunkKV, layer: int, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes one layer of a chunk into `keys` and `values`, [kv_heads, tokens, head_dim] views of the slots.

    cos, sin: fp32 [tokens, at most head_dim / 2], of the angles of the chunk's positions; K is turned in fp32.
    """
    compiled = COMPILED and {kv.layout.dtype, keys.dtype} <= _DTYPES.keys()
    (place_compiled if compiled else place_plain)(kv, layer, cos, sin, keys, values)


def place_plain(kv: ChunkKV, layer: int, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> None:
    """`place` by torch."""
    k, v = kv.layer(layer)
    values.copy_(v)
    keys.copy_(turned(k, cos, sin))


def place_compiled(kv: ChunkKV, layer: int, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> None:
    """`place` by the kernel: the same numbers, bit for bit."""
    kv_heads, tokens, head_dim = kv.shape
    stride, offsets = _places(kv.layout, tokens)
    block = kv.body.data_ptr() + layer * stride
    assert keys.stride() == values.stride()
    assert keys.stride()[1:] == (head_dim, 1)
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    dtype = kv.layout.dtype
    _place.place(
        _KINDS.get(kv.layout.codec, _DTYPES[dtype]),
        _DTYPES[keys.dtype],
        *(0 if offset is None else block + offset for offset in offsets),
        cos.data_ptr(),
        sin.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        keys.stride(0),
        kv_heads,
        tokens,
        head_dim,
        cos.shape[1],
    )


@lru_cache
def _places(layout: KVLayout, tokens: int) -> tuple[int, tuple[int | None, ...]]:
    """Bytes from one block to the next, and from a block to each of its parts: views would take longer than placing."""
    block = torch.empty(layout.block_bytes(tokens), dtype=torch.uint8)
    parts = CODECS[layout.codec].unpack(block, Shape(layout.kv_heads, tokens, layout.head_dim), layout.dtype)
    offsets = (None if part is None else part.data_ptr() - block.data_ptr() for part in parts)
    return layout.stride(tokens), tuple(offsets)


def place_on_gpu(kv: ChunkKV, layer: int, positions: Tensor, frequencies: Tensor, keys: Tensor, values: Tensor) -> None:
    """Writes one layer of a chunk into the slots `keys` and `values`, [kv_heads, capacity, head_dim], at `positions`.

    By a Triton kernel, behind a copy to the device, as stored, unless the chunk is there already. positions: int64
    [tokens], frequencies: see Model.frequencies.
    """
    from engine.kernels.place import place as launch  # here, for a CPU build of torch does not bring triton

    block = kv.block(layer).to(keys.device, non_blocking=True)
    packed = CODECS[kv.layout.codec].unpack(block, kv.shape, kv.layout.dtype)
    launch(packed, positions, frequencies, keys, values)


def turned(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Keys [..., tokens, head_dim] turned by angles, in fp32; what is beyond 2 x the angles' width has no angle."""
    half = cos.shape[1]
    low, high, rest = torch.split(keys.float(), [half, half, keys.shape[-1] - 2 * half], dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)
