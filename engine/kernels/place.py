"""Puts stored KV into a request's slots on a GPU: dequantise, turn K to its positions, scatter, in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cache_store.codec import GROUP, Packed
from engine.kernels.common import jit

_TILE_TOKENS = 16
_GROUP = tl.constexpr(GROUP)

# What is stored, by its dtype; any other is floating point as it is.
_STORED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}


@jit
def _from_fp8(bits: tl.tensor) -> tl.tensor:
    """The fp32 that the bits of a float8 e4m3 stand for; in integers, for not every GPU converts them itself."""
    magnitude = bits & 127
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    number = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    number = tl.where(magnitude == 127, float("nan"), number)
    return tl.where(bits > 127, -number, number)


@jit
def _elements(
    at: tl.tensor,
    scales: tl.tensor,
    mins: tl.tensor,
    head: tl.tensor,
    token: tl.tensor,
    dim: tl.tensor,
    live: tl.tensor,
    real: tl.tensor,
    tokens: tl.tensor,
    STORED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
) -> tl.tensor:
    """fp32 [tokens, dims] of K (scales by channel) or V (by token) as stored in the rows at `at` [tokens, 1].

    token, live [tokens, 1]; dim, real [1, dims]. See cache_store.codec for where a codec keeps its scales.
    """
    exists = live & real
    if STORED == "int4":
        bits = tl.load(at + dim // 2, mask=exists, other=0).to(tl.int32)
        if BY_TOKEN:
            group = (head * tokens + token) * tl.cdiv(HEAD_DIM, _GROUP) + dim // _GROUP
        else:
            group = (head * tl.cdiv(tokens, _GROUP) + token // _GROUP) * HEAD_DIM + dim
        scale = tl.load(scales + group, mask=exists, other=0.0).to(tl.float32)
        least = tl.load(mins + group, mask=exists, other=0.0).to(tl.float32)
        return ((bits >> (dim % 2 * 4)) & 15).to(tl.float32) * scale + least
    elements = tl.load(at + dim, mask=exists, other=0)
    if STORED == "floating":
        return elements.to(tl.float32)
    numbers = _from_fp8(elements.to(tl.int32)) if STORED == "fp8" else elements.to(tl.float32)
    if BY_TOKEN:
        return numbers * tl.load(scales + head * tokens + token, mask=live, other=0.0)
    return numbers * tl.load(scales + head * HEAD_DIM + dim, mask=real, other=0.0)


@jit(do_not_specialize=["tokens"])
def _place_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    key_mins: tl.tensor,
    value_mins: tl.tensor,
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
    STORED: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
) -> None:
    head = tl.program_id(0).to(tl.int64)
    token = (tl.program_id(1).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS))[:, None]
    live = token < tokens
    position = tl.load(positions + token, mask=live, other=0)
    dim = tl.arange(0, PADDED_DIM)[None, :]
    half = tl.arange(0, PADDED_HALF)[None, :]
    turns = half < HALF

    at = key + head * key_head + token * key_token
    low = _elements(at, key_scales, key_mins, head, token, half, live, turns, tokens, STORED, False, HEAD_DIM)
    high = _elements(at, key_scales, key_mins, head, token, half + HALF, live, turns, tokens, STORED, False, HEAD_DIM)
    angle = position.to(tl.float32) * tl.load(inv_freq + half, mask=turns, other=0.0)
    cos, sin = tl.cos(angle), tl.sin(angle)
    to = key_slots + head * key_slots_head + position.to(tl.int64) * key_slot
    kind = key_slots.dtype.element_ty
    tl.store(to + half, (low * cos - high * sin).to(kind), mask=live & turns)
    tl.store(to + HALF + half, (high * cos + low * sin).to(kind), mask=live & turns)
    if 2 * HALF < HEAD_DIM:  # partial rotary: the rest has no angle
        unturned = (dim >= 2 * HALF) & (dim < HEAD_DIM)
        rest = _elements(at, key_scales, key_mins, head, token, dim, live, unturned, tokens, STORED, False, HEAD_DIM)
        tl.store(to + dim, rest.to(kind), mask=live & unturned)

    at = value + head * value_head + token * value_token
    real = dim < HEAD_DIM
    values = _elements(at, value_scales, value_mins, head, token, dim, live, real, tokens, STORED, True, HEAD_DIM)
    to = value_slots + head * value_slots_head + position.to(tl.int64) * value_slot
    tl.store(to + dim, values.to(value_slots.dtype.element_ty), mask=live & real)


def place(packed: Packed, positions: Tensor, inv_freq: Tensor, key_slots: Tensor, value_slots: Tensor) -> None:
    """Writes one layer of a chunk's stored K and V into the slots at `positions`.

    packed: K at angle 0 and V, as any codec unpacks them; its k and v [kv_heads, tokens, ...] are of free strides but 1
    in the last dimension, scales and minima contiguous. positions int32 or int64 [tokens]. K is turned in fp32 as
    engine.model.Model.rotation does, by inv_freq fp32 [at most head_dim / 2]. key_slots, value_slots
    [kv_heads, capacity, head_dim] of any floating dtype, 1 in the last stride.
    """
    key, value, *spread = packed
    kv_heads, tokens, _ = key.shape
    head_dim, half = key_slots.shape[-1], inv_freq.shape[0]
    assert key.stride(-1) == value.stride(-1) == key_slots.stride(-1) == value_slots.stride(-1) == 1
    stored = _STORED.get(key.dtype, "floating")
    if stored == "fp8":
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    parts = [inv_freq if part is None else part for part in spread]  # what a codec has not is not read
    assert all(part.is_contiguous() for part in parts)
    _place_kernel[(kv_heads, triton.cdiv(tokens, _TILE_TOKENS))](
        key,
        value,
        *parts,
        positions,
        inv_freq,
        key_slots,
        value_slots,
        tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *key_slots.stride()[:2],
        *value_slots.stride()[:2],
        STORED=stored,
        HALF=half,
        PADDED_HALF=triton.next_power_of_2(half),
        HEAD_DIM=head_dim,
        PADDED_DIM=triton.next_power_of_2(head_dim),
        TILE_TOKENS=_TILE_TOKENS,
    )
