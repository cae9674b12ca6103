"""Stage II attention of scattered rows on a GPU, without any mask in memory.

A program takes a block of rows for one KV head, with all query heads of its group packed into the rows of one tile, so
K and V are read once for all of them. Rows are sorted: keys up to the block's first position are visible to all of its
rows and need no mask; only the stretch up to its last position does. With a sliding window, short by nature, every
tile is masked.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import (
    Tile,
    capped,
    choose_splits,
    finish,
    grow,
    jit,
    logit_scales,
    merge,
    padded_dim,
    product_dtype,
    shared_memory,
)


@jit(do_not_specialize=["rows", "window"])
def _attend_kernel(
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    positions: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    window: tl.tensor,
    inner: tl.tensor,
    scale: tl.tensor,
    query_head: tl.tensor,
    query_row: tl.tensor,
    key_head: tl.tensor,
    key_slot: tl.tensor,
    value_head: tl.tensor,
    value_slot: tl.tensor,
    out_split: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    BLOCK: tl.constexpr = TILE_ROWS // GROUP
    kv_head = tl.program_id(0)
    split, splits = tl.program_id(2), tl.num_programs(2)
    # Programs start in the order of their ids. The last rows see the most keys: they go first.
    start = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK

    packed = tl.arange(0, TILE_ROWS)
    row = start + packed // GROUP
    head = (kv_head * GROUP + packed % GROUP).to(tl.int64)
    live = (packed < BLOCK * GROUP) & (row < rows)
    dim = tl.arange(0, PADDED_DIM)
    slot = tl.arange(0, TILE_KEYS)
    in_head = dim < HEAD_DIM

    position = tl.load(positions + row, mask=live, other=0)
    first = tl.load(positions + start).to(tl.int32)
    last = tl.load(positions + tl.minimum(start + BLOCK, rows) - 1).to(tl.int32)
    row64 = row.to(tl.int64)
    at_query = query + head[:, None] * query_head + row64[:, None] * query_row + dim[None, :]
    queries = tl.load(at_query, mask=live[:, None] & in_head[None, :], other=0.0).to(PRODUCT)
    at_key = key + kv_head.to(tl.int64) * key_head + slot[None, :] * key_slot + dim[:, None]
    at_value = value + kv_head.to(tl.int64) * value_head + slot[:, None] * value_slot + dim[None, :]

    peak = tl.full([TILE_ROWS], -1.0e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)

    # This split's share of the tiles: [begin, end), of which [begin, clear) needs no mask.
    low = 0
    if WINDOWED:
        low = tl.maximum(first - window + 1, 0) // TILE_KEYS * TILE_KEYS
    share = tl.cdiv(tl.cdiv(last + 1 - low, TILE_KEYS), splits) * TILE_KEYS
    begin = low + split * share
    end = tl.minimum(begin + share, last + 1)
    clear = begin
    if not WINDOWED:
        clear = tl.maximum(tl.minimum((first + 1) // TILE_KEYS * TILE_KEYS, end), begin)
    for at in range(begin, clear, TILE_KEYS):
        at64 = tl.cast(at, tl.int64)
        keys = tl.load(at_key + at64 * key_slot, mask=in_head[:, None], other=0.0).to(PRODUCT)
        values = tl.load(at_value + at64 * value_slot, mask=in_head[None, :], other=0.0).to(PRODUCT)
        dots = tl.dot(queries, keys, input_precision="tf32x3")
        if CAPPED:
            dots = capped(dots, inner)
        peak, total, acc = grow(dots, scale, values, peak, total, acc)
    for at in range(clear, end, TILE_KEYS):
        at64 = tl.cast(at, tl.int64)
        exists = at + slot < end  # beyond may lie slots that nobody has written
        visible = exists[None, :] & (at + slot[None, :] <= position[:, None])
        if WINDOWED:
            visible = visible & (at + slot[None, :] > position[:, None] - window)
        keys = tl.load(at_key + at64 * key_slot, mask=exists[None, :] & in_head[:, None], other=0.0).to(PRODUCT)
        values = tl.load(at_value + at64 * value_slot, mask=exists[:, None] & in_head[None, :], other=0.0).to(PRODUCT)
        dots = tl.dot(queries, keys, input_precision="tf32x3")
        if CAPPED:
            dots = capped(dots, inner)
        dots = tl.where(visible, dots, float("-inf"))
        peak, total, acc = grow(dots, scale, values, peak, total, acc)

    result, row_lse = finish(peak, total, acc)
    at_out = out + split.to(tl.int64) * out_split + head[:, None] * out_head + row64[:, None] * out_row + dim[None, :]
    tl.store(at_out, result.to(out.dtype.element_ty), mask=live[:, None] & in_head[None, :])
    heads = tl.num_programs(0) * GROUP
    tl.store(lse + (split.to(tl.int64) * heads + head) * rows + row64, row_lse, mask=live)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    *,
    splits: int | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention under `key slot <= query position`; see engine.attention.attend.

    query [1, heads, rows, head_dim] and key, value [1, kv_heads, slots, head_dim], fp32, fp16 or bf16, of any strides
    but 1 in the last dimension; positions int32 or int64 [rows], strictly increasing, below `slots`. Slots up to the
    last position must be finite; what lies beyond is not read. Returns the output, like query, and the natural
    log-sum-exp of the logits, fp32 [1, heads, rows].

    `splits` cuts the keys into so many stretches, attended in parallel and merged; None: as many as fill the device.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads, slots = key.shape[1], key.shape[2]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == positions.stride(0) == 1
    group = heads // kv_heads
    padded = padded_dim(head_dim)
    tile = tile or choose_tile(rows * group, padded, query.dtype, shared_memory(query.device))
    blocks = triton.cdiv(rows, tile.rows // group)
    splits = splits or choose_splits(blocks * kv_heads, min(slots, window or slots), query.device)

    # [rows, heads, head_dim] in memory: what the output projection reads.
    out = torch.empty(1, rows, heads, head_dim, dtype=query.dtype, device=query.device).transpose(1, 2)
    lse = torch.empty(1, heads, rows, dtype=torch.float32, device=query.device)
    parts, part_lses = out, lse
    if splits > 1:
        parts = torch.empty(splits, heads, rows, head_dim, dtype=torch.float32, device=query.device)
        part_lses = torch.empty(splits, heads, rows, dtype=torch.float32, device=query.device)
    _attend_kernel[(kv_heads, blocks, splits)](
        query,
        key,
        value,
        positions,
        parts,
        part_lses,
        rows,
        window or 0,
        *logit_scales(scaling, softcap),
        query.stride(1),
        query.stride(2),
        key.stride(1),
        key.stride(2),
        value.stride(1),
        value.stride(2),
        parts.stride(0),
        parts.stride(1),
        parts.stride(2),
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        TILE_ROWS=tile.rows,
        TILE_KEYS=tile.keys,
        WINDOWED=window is not None,
        CAPPED=softcap is not None,
        PRODUCT=product_dtype(query),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        merge(parts, part_lses, out[0], lse[0])
    return out, lse


def choose_tile(packed_rows: int, padded_dim: int, dtype: torch.dtype, shared_bytes: int) -> Tile:
    """The tile for so many rows times heads of a group, on a multiprocessor with that much shared memory.

    By what the compiler reports (registers without spills, shared memory), not by time: `benchmarks/gpu_check.py` times
    the alternatives.
    """
    rows = min(128, max(16, int(triton.next_power_of_2(packed_rows))))
    if dtype == torch.float32:  # three products for one, and twice the bytes
        most = 32 if padded_dim <= 128 else 16
        return Tile(min(rows, most), most, 4, 2)
    keys = 64 if padded_dim <= 128 else 32
    if shared_bytes < 160 * 1024:  # neither an A100 nor a Hopper GPU
        return Tile(min(rows, 64), keys, 4, 2)
    return Tile(rows, keys, 8 if rows == 128 else 4, 3)
