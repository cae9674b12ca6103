"""Puts stored KV into a request's slots on a GPU: dequantise, turn K to its positions, scatter, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from engine.kernels.common import jit

_TILE_TOKENS = 16


@jit(do_not_specialize=["tokens"])
def _place_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    positions: tl.tensor,
    inv_freq: tl.tensor,
    key_slots: tl.tensor,
    value_slots: tl.tensor,
    tokens: tl.tensor,
    key_head: tl.tensor,
    key_token: tl.tensor,
    value_head: tl.tensor,
    value_token: tl.tensor,
    key_slots_head: tl.tensor,
    key_slot: tl.tensor,
    value_slots_head: tl.tensor,
    value_slot: tl.tensor,
    SCALED: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    head = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    live = token < tokens
    position = tl.load(positions + token, mask=live, other=0)
    dim = tl.arange(0, PADDED_DIM)
    half = tl.arange(0, PADDED_HALF)

    turning = live[:, None] & (half < HALF)[None, :]
    at = key + head * key_head + token[:, None] * key_token
    low = tl.load(at + half[None, :], mask=turning, other=0).to(tl.float32)
    high = tl.load(at + HALF + half[None, :], mask=turning, other=0).to(tl.float32)
    if SCALED:
        scales = key_scales + head * HEAD_DIM + half
        low *= tl.load(scales, mask=half < HALF, other=0.0)[None, :]
        high *= tl.load(scales + HALF, mask=half < HALF, other=0.0)[None, :]
    frequency = tl.load(inv_freq + half, mask=half < HALF, other=0.0)
    angle = position.to(tl.float32)[:, None] * frequency[None, :]
    cos, sin = tl.cos(angle), tl.sin(angle)
    to = key_slots + head * key_slots_head + position.to(tl.int64)[:, None] * key_slot
    kind = key_slots.dtype.element_ty
    tl.store(to + half[None, :], (low * cos - high * sin).to(kind), mask=turning)
    tl.store(to + HALF + half[None, :], (high * cos + low * sin).to(kind), mask=turning)
    if 2 * HALF < HEAD_DIM:  # partial rotary: the rest has no angle
        unturned = (dim >= 2 * HALF) & (dim < HEAD_DIM)
        rest = tl.load(at + dim[None, :], mask=live[:, None] & unturned[None, :], other=0).to(tl.float32)
        if SCALED:
            rest *= tl.load(key_scales + head * HEAD_DIM + dim, mask=unturned, other=0.0)[None, :]
        tl.store(to + dim[None, :], rest.to(kind), mask=live[:, None] & unturned[None, :])

    exists = live[:, None] & (dim < HEAD_DIM)[None, :]
    values = tl.load(value + head * value_head + token[:, None] * value_token + dim[None, :], mask=exists, other=0)
    values = values.to(tl.float32)
    if SCALED:
        values *= tl.load(value_scales + head * tokens + token, mask=live, other=0.0)[:, None]
    to = value_slots + head * value_slots_head + position.to(tl.int64)[:, None] * value_slot + dim[None, :]
    tl.store(to, values.to(value_slots.dtype.element_ty), mask=exists)


def place(
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    key_slots: Tensor,
    value_slots: Tensor,
    scales: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Writes one layer of a chunk's stored K and V into the slots at `positions`.

    key, value [kv_heads, tokens, head_dim] as stored, K at angle 0: floating point, or int8 with `scales`: K's per
    channel, fp32 [kv_heads, head_dim], and V's per token, fp32 [kv_heads, tokens], both contiguous. positions int32 or
    int64 [tokens]. K is turned in fp32 as engine.model.Model.rotation does, by inv_freq fp32 [at most head_dim / 2].
    key_slots, value_slots [kv_heads, capacity, head_dim] of any floating dtype. Strides are free but 1 in the last
    dimension.
    """
    kv_heads, tokens, head_dim = key.shape
    half = inv_freq.shape[0]
    assert key.stride(-1) == value.stride(-1) == key_slots.stride(-1) == value_slots.stride(-1) == 1
    key_scales, value_scales = scales or (inv_freq, inv_freq)  # unused then
    assert key_scales.is_contiguous()
    assert value_scales.is_contiguous()
    _place_kernel[(kv_heads, triton.cdiv(tokens, _TILE_TOKENS))](
        key,
        value,
        key_scales,
        value_scales,
        positions,
        inv_freq,
        key_slots,
        value_slots,
        tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_slots.stride()[:2],
        *value_slots.stride()[:2],
        SCALED=scales is not None,
        HALF=half,
        PADDED_HALF=triton.next_power_of_2(half),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        TILE_TOKENS=_TILE_TOKENS,
    )
