"""Column sums on a GPU: what softmax weight each key receives, without the weights in memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import capped, jit, logit_scales, padded_dim, product_dtype

_LOG2_E = tl.constexpr(logit_scales(1.0, None)[1])


@jit(do_not_specialize=["rows", "slots", "window"])
def _column_sums_kernel(
    query: tl.tensor,
    key: tl.tensor,
    lse: tl.tensor,
    positions: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    slots: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    scale: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_head: tl.tensor,
    key_slot: tl.tensor,
    lse_head: tl.tensor,
    sums_head: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    kv_head = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * TILE_KEYS
    slot = start + tl.arange(0, TILE_KEYS)
    slot64 = slot.to(tl.int64)
    packed = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PADDED_DIM)
    in_head = dim < HEAD_DIM

    # Positions strictly increase, so row r lies at `last - rows + 1 + r` at most, and at `first + r` at least: rows
    # before `begin` see none of these keys, nor do rows from `end` on.
    last = tl.load(positions + rows - 1).to(tl.int32)
    begin = tl.maximum(start - (last - rows + 1), 0)
    end = rows
    if WINDOWED:
        first = tl.load(positions).to(tl.int32)
        end = tl.minimum(rows, start + TILE_KEYS - 1 + window - first)

    at_key = key + kv_head * key_head + slot64[:, None] * key_slot + dim[None, :]
    keys = tl.load(at_key, mask=(slot < slots)[:, None] & in_head[None, :], other=0.0).to(PRODUCT)
    acc = tl.zeros([TILE_KEYS, TILE_ROWS], tl.float32)
    for at in range(begin * GROUP, end * GROUP, TILE_ROWS):
        row = (at + packed) // GROUP
        live = row < rows
        row64 = row.to(tl.int64)
        head = kv_head * GROUP + (at + packed) % GROUP
        position = tl.load(positions + row, mask=live, other=-1)
        at_query = query + head[None, :] * query_head + row64[None, :] * query_row + dim[:, None]
        queries = tl.load(at_query, mask=live[None, :] & in_head[:, None], other=0.0).to(PRODUCT)
        norm = tl.load(lse + head * lse_head + row64, mask=live, other=0.0) * _LOG2_E
        dots = tl.dot(keys, queries, input_precision="tf32x3")
        if CAPPED:
            dots = capped(dots, inner)
        visible = slot[:, None] <= position[None, :]
        if WINDOWED:
            visible = visible & (slot[:, None] > position[None, :] - window)
        acc += tl.exp2(tl.where(visible, dots, float("-inf")) * scale - norm[None, :])
    at_sums = sums + kv_head * sums_head + slot64
    before = tl.load(at_sums, mask=slot < slots, other=0.0)
    tl.store(at_sums, before + tl.sum(acc, 1), mask=slot < slots)


def column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    positions: Tensor,
    scaling: float,
    sums: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Adds the softmax weights that each key receives, summed over rows and the heads of its group, to `sums`.

    See engine.attention.add_column_sums. query [1, heads, rows, head_dim], lse fp32 [1, heads, rows] and positions
    [rows] as in `attend_rows`; key [1, kv_heads, slots, head_dim]; sums fp32 [kv_heads, keys], keys at most the last
    position + 1. Strides are free but 1 in the last dimension. One program owns a sum: the same input gives the same
    bits.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads, slots = sums.shape
    assert query.stride(-1) == key.stride(-1) == lse.stride(-1) == sums.stride(-1) == positions.stride(0) == 1
    tile_rows, tile_keys = (64, 64) if query.dtype != torch.float32 else (32, 32)
    _column_sums_kernel[(kv_heads, triton.cdiv(slots, tile_keys))](
        query,
        key,
        lse,
        positions,
        sums,
        rows,
        slots,
        window or 0,
        *logit_scales(scaling, softcap),
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        lse.stride(1),
        sums.stride(0),
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        PRODUCT=product_dtype(query),
        num_warps=4,
        num_stages=2,
    )
