"""Codecs: exact sizes, bounded errors, and entries that keep the codec's bytes as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cache_store.base import ChunkKV, KVLayout
from cache_store.codec import CODECS

LOSSY = ("int8", "fp8", "int4")


def layers_of(dtype: torch.dtype = torch.float32, tokens: int = 70, head_dim: int = 64) -> list[Tensor]:
    """Two layers with what real KV has: channels of K with outliers and offsets, tokens of V of very unequal size."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(2):
        k, v = torch.randn(2, 2, tokens, head_dim, generator=generator)
        k[:, :, 3] = k[:, :, 3] * 2 + 80
        k[:, :, 5] = 0
        v = v * torch.logspace(-3, 1, tokens)[:, None]
        made.append(torch.stack((k, v)).to(dtype))
    return made


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 16), (33, 48), (512, 64)])
def test_a_block_has_the_size_that_was_said(codec: str, dtype: torch.dtype, tokens: int, head_dim: int) -> None:
    layers = layers_of(dtype, tokens, head_dim)
    kv = ChunkKV.pack(layers, codec)
    assert kv.layout == KVLayout(2, 2, head_dim, dtype, codec)
    assert [kv.block(layer).nbytes for layer in range(2)] == [kv.layout.block_bytes(tokens)] * 2
    assert kv.layer(0).shape == layers[0].shape
    assert bool(kv.layer(1).isfinite().all())


@pytest.mark.parametrize(("codec", "most"), [("raw", 1.0), ("int8", 0.53), ("fp8", 0.53), ("int4", 0.32)])
def test_what_a_codec_saves_of_bfloat16(codec: str, most: float) -> None:
    raw, packed = (KVLayout(24, 8, 128, torch.bfloat16, name).block_bytes(512) for name in ("raw", codec))
    assert packed <= most * raw


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_is_exact(dtype: torch.dtype) -> None:
    layers = layers_of(dtype)
    kv = ChunkKV.pack(layers)
    assert all(torch.equal(kv.layer(index), layer) for index, layer in enumerate(layers))


def test_int8_is_off_by_half_a_step_at_most() -> None:
    layers = layers_of()
    kv = ChunkKV.pack(layers, "int8")
    for index, (k, v) in enumerate(layers):
        found_k, found_v = kv.layer(index)
        assert bool(((found_k - k).abs() <= k.abs().amax(1, keepdim=True) / 127 * 0.501).all())
        assert bool(((found_v - v).abs() <= v.abs().amax(2, keepdim=True) / 127 * 0.501).all())


def test_fp8_is_off_by_a_sixteenth_at_most() -> None:
    layers = layers_of()
    kv = ChunkKV.pack(layers, "fp8")
    for index, (k, v) in enumerate(layers):
        for found, values, dim in zip(kv.layer(index), (k, v), (1, 2), strict=True):
            least = values.abs().amax(dim, keepdim=True) / 448 * 2**-9  # subnormal numbers have a fixed step
            assert bool(((found - values).abs() <= values.abs() / 16 + least).all())


def test_int4_is_off_by_half_a_step_of_its_group_at_most() -> None:
    layers = layers_of()
    kv = ChunkKV.pack(layers, "int4")
    for index, (k, v) in enumerate(layers):
        for found, values in zip(kv.layer(index), (k.transpose(1, 2), v), strict=True):
            found = found.transpose(1, 2) if values is not v else found
            for part, exact in zip(found.split(32, -1), values.split(32, -1), strict=True):
                step = (exact.amax(-1) - exact.amin(-1)) / 15
                # The minimum and the step are fp16 themselves.
                bound = 0.51 * step + exact.abs().amax(-1) * 2**-10 + 1e-6
                assert bool(((part - exact).abs().amax(-1) <= bound).all())


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("value", [0.0, 3.0, -1e-30, 1e30])
def test_values_without_spread_divide_nothing_by_zero(codec: str, value: float) -> None:
    kv = ChunkKV.pack([torch.full((2, 1, 5, 16), value)], codec)
    assert bool(kv.layer(0).isfinite().all())
    if abs(value) < 100:
        assert torch.allclose(kv.layer(0), torch.tensor(value), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("codec", CODECS)
def test_reading_converts_to_what_the_caller_has(codec: str) -> None:
    kv = ChunkKV.pack(layers_of(torch.bfloat16), codec)
    slots = torch.zeros(2, 2, 100, 64, dtype=torch.bfloat16)
    kv.read_into(1, slots[0, :, 10:80], slots[1, :, 10:80])
    assert torch.equal(slots[:, :, 10:80], kv.layer(1).to(torch.bfloat16))


def test_layouts_differ_by_codec() -> None:
    layout = KVLayout(2, 2, 16, torch.float32)
    assert layout != replace(layout, codec="int8")
