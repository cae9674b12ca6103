"""Decode attention over pages of KV on a GPU: one query row a request, its keys split over the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import choose_splits, finish, grow, jit, logit_scales, merge, padded_dim, product_dtype


@jit(do_not_specialize=["requests"])
def _decode_kernel(
    query: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    block_table: tl.tensor,
    lengths: tl.tensor,
    parts: tl.tensor,
    part_lses: tl.tensor,
    requests: tl.tensor,
    scale: tl.tensor,
    query_request: tl.tensor,
    query_head: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRODUCT: tl.constexpr,
) -> None:
    kv_head, request = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    packed = tl.arange(0, TILE_ROWS)
    head = kv_head * GROUP + packed
    live = packed < GROUP
    dim = tl.arange(0, PADDED_DIM)
    slot = tl.arange(0, TILE_KEYS)
    in_head = dim < HEAD_DIM

    at_query = query + request * query_request + head[:, None] * query_head + dim[None, :]
    queries = tl.load(at_query, mask=live[:, None] & in_head[None, :], other=0.0).to(PRODUCT)
    peak = tl.full([TILE_ROWS], -1.0e30, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)

    length = tl.load(lengths + request).to(tl.int32)
    share = tl.cdiv(tl.cdiv(length, TILE_KEYS), splits) * TILE_KEYS
    begin = split * share
    end = tl.minimum(begin + share, length)
    for at in range(begin, end, TILE_KEYS):
        page = tl.load(block_table + request * table_stride + at // PAGE).to(tl.int64)
        base = page * page_stride + kv_head * head_stride + (at % PAGE) * slot_stride  # a tile lies in one page
        exists = at + slot < end
        at_key = key_pages + base + slot[None, :] * slot_stride + dim[:, None]
        at_value = value_pages + base + slot[:, None] * slot_stride + dim[None, :]
        keys = tl.load(at_key, mask=exists[None, :] & in_head[:, None], other=0.0).to(PRODUCT)
        values = tl.load(at_value, mask=exists[:, None] & in_head[None, :], other=0.0).to(PRODUCT)
        dots = tl.dot(queries, keys, input_precision="tf32x3")
        dots = tl.where(exists[None, :], dots, float("-inf"))
        peak, total, acc = grow(dots, scale, values, peak, total, acc)

    result, row_lse = finish(peak, total, acc)
    at_part = (split.to(tl.int64) * tl.num_programs(0) * GROUP + head) * requests + request
    tl.store(parts + at_part[:, None] * HEAD_DIM + dim[None, :], result, mask=live[:, None] & in_head[None, :])
    tl.store(part_lses + at_part, row_lse, mask=live)


def decode(
    query: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    scaling: float,
    *,
    splits: int | None = None,
) -> Tensor:
    """See engine.kernels.paged.decode_paged; page_size is a power of two from 16, `splits` as in `attend_rows`."""
    requests, heads, head_dim = query.shape
    page, kv_heads = key_pages.shape[1], key_pages.shape[2]
    group, device = heads // kv_heads, query.device
    assert query.stride(-1) == key_pages.stride(-1) == value_pages.stride(-1) == block_table.stride(-1) == 1
    assert key_pages.stride() == value_pages.stride()
    assert page >= 16
    assert page & (page - 1) == 0
    padded = padded_dim(head_dim)
    splits = splits or choose_splits(kv_heads * requests, block_table.shape[1] * page, device)
    parts = torch.empty(splits, heads, requests, head_dim, dtype=torch.float32, device=device)
    part_lses = torch.empty(splits, heads, requests, dtype=torch.float32, device=device)
    _decode_kernel[(kv_heads, requests, splits)](
        query,
        key_pages,
        value_pages,
        block_table,
        lengths,
        parts,
        part_lses,
        requests,
        logit_scales(scaling, None)[1],
        query.stride(0),
        query.stride(1),
        *key_pages.stride()[:3],
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        PAGE=page,
        TILE_ROWS=max(16, int(triton.next_power_of_2(group))),
        TILE_KEYS=min(page, 64 if padded <= 128 else 32),
        PRODUCT=product_dtype(query),
        num_warps=4,
        num_stages=3 if query.dtype != torch.float32 else 2,
    )
    out = torch.empty_like(query)
    lse = torch.empty(heads, requests, dtype=torch.float32, device=device)
    merge(parts, part_lses, out.transpose(0, 1), lse)
    return out
