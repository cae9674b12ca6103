"""How a layer of chunk KV is written as bytes: as it is, or quantised.

K is quantised before rotation, for its outliers sit in channels, which rotation would mix; V is quantised by token.
A block is what one layer takes: the elements of K, those of V, then their scales.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32  # elements that share a scale and a minimum in int4
_FP16_MAX = 65504.0


class Shape(NamedTuple):
    """Of one layer's K, and of its V."""

    kv_heads: int
    tokens: int
    head_dim: int

    @property
    def numel(self) -> int:
        """Elements of K."""
        return self.kv_heads * self.tokens * self.head_dim


class Packed(NamedTuple):
    """A block's parts, as views. What a codec does not have is None; see the codec for shapes."""

    k: Tensor
    v: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    k_mins: Tensor | None = None
    v_mins: Tensor | None = None


class Codec(ABC):
    """One way to write a layer. `number` stands for it in stored headers, for good."""

    name: ClassVar[str]
    number: ClassVar[int]

    @abstractmethod
    def block_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """Exact size of a block; dtype is the model's."""

    @abstractmethod
    def encode(self, layer: Tensor) -> Tensor:
        """A block, uint8 [block_bytes], of K and V [2, kv_heads, tokens, head_dim] in the model's dtype."""

    @abstractmethod
    def unpack(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Packed:
        """The parts of a block, without a copy."""

    @abstractmethod
    def decode(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """K and V [2, kv_heads, tokens, head_dim]: in `dtype` and a view for raw, else new and fp32."""


class Raw(Codec):
    """As the model made them: no loss, no scales."""

    name = "raw"
    number = 0

    def block_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """See Codec."""
        return 2 * shape.numel * dtype.itemsize

    def encode(self, layer: Tensor) -> Tensor:
        """See Codec. Shares memory with a contiguous `layer`."""
        return layer.contiguous().view(-1).view(torch.uint8)

    def unpack(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Packed:
        """See Codec: k, v [kv_heads, tokens, head_dim] in `dtype`."""
        return Packed(*self.decode(block, shape, dtype))

    def decode(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        return block.view(dtype).view(2, *shape)


class _Eight(Codec):
    """One byte an element, fp32 scales: K's by channel, [kv_heads, head_dim], V's by token, [kv_heads, tokens]."""

    kind: ClassVar[torch.dtype]
    largest: ClassVar[float]

    def block_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """See Codec."""
        return 2 * shape.numel + 4 * shape.kv_heads * (shape.head_dim + shape.tokens)

    def encode(self, layer: Tensor) -> Tensor:
        """See Codec."""
        k, v = layer.float()
        k_scales, v_scales = self._scales(k, 1), self._scales(v, 2)
        parts = (
            self._cast(k / k_scales[:, None]),
            self._cast(v / v_scales[..., None]),
            k_scales,
            v_scales,
        )
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def unpack(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Packed:
        """See Codec: k, v [kv_heads, tokens, head_dim] in int8 or float8."""
        k, v, k_scales, v_scales = torch.split(
            block, [shape.numel, shape.numel, 4 * shape.kv_heads * shape.head_dim, 4 * shape.kv_heads * shape.tokens]
        )
        return Packed(
            k.view(self.kind).view(shape),
            v.view(self.kind).view(shape),
            k_scales.view(torch.float32).view(shape.kv_heads, shape.head_dim),
            v_scales.view(torch.float32).view(shape.kv_heads, shape.tokens),
        )

    def decode(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        packed = self.unpack(block, shape, dtype)
        assert packed.k_scales is not None
        assert packed.v_scales is not None
        return torch.stack((packed.k.float() * packed.k_scales[:, None], packed.v.float() * packed.v_scales[..., None]))

    def _scales(self, values: Tensor, dim: int) -> Tensor:
        # Zeroes get a scale of 1: nothing divides by zero.
        scales = values.abs().amax(dim) / self.largest
        return torch.where(scales > 0, scales, torch.ones_like(scales))

    @abstractmethod
    def _cast(self, scaled: Tensor) -> Tensor:
        """Rounds values within -largest..largest to `kind`."""


class Int8(_Eight):
    """Steps of equal width."""

    name = "int8"
    number = 1
    kind = torch.int8
    largest = 127.0

    def _cast(self, scaled: Tensor) -> Tensor:
        return scaled.round().clamp(-self.largest, self.largest).to(torch.int8)


class Fp8(_Eight):
    """float8 e4m3: three bits of mantissa, steps that shrink with the value."""

    name = "fp8"
    number = 2
    kind = torch.float8_e4m3fn
    largest = 448.0

    def _cast(self, scaled: Tensor) -> Tensor:
        return scaled.clamp(-self.largest, self.largest).to(torch.float8_e4m3fn)


class Int4(Codec):
    """Two elements a byte, the even channel in the low half; value = minimum + step * scale, both fp16, a group of 32.

    K's groups are 32 tokens of a channel, V's are 32 channels of a token; the last group may be shorter. Beyond the
    range of fp16 values are clipped.
    """

    name = "int4"
    number = 3

    def block_bytes(self, shape: Shape, dtype: torch.dtype) -> int:
        """See Codec."""
        return sum(self._sizes(shape))

    def encode(self, layer: Tensor) -> Tensor:
        """See Codec."""
        k, v = layer.float().clamp(-_FP16_MAX, _FP16_MAX)
        k_steps, k_scales, k_mins = _quantised(k.transpose(1, 2))
        v_steps, v_scales, v_mins = _quantised(v)
        parts = [_nibbles(k_steps.transpose(1, 2)), _nibbles(v_steps)]
        parts += [k_scales.transpose(1, 2), v_scales, k_mins.transpose(1, 2), v_mins]
        return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])

    def unpack(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Packed:
        """See Codec: k, v uint8 [kv_heads, tokens, head_dim / 2].

        k_scales, k_mins fp16 [kv_heads, groups, head_dim]; v_scales, v_mins fp16 [kv_heads, tokens, groups].
        """
        halves = (shape.kv_heads, shape.tokens, shape.head_dim // 2)
        k_groups = (shape.kv_heads, _groups(shape.tokens), shape.head_dim)
        v_groups = (shape.kv_heads, shape.tokens, _groups(shape.head_dim))
        k, v, *rest = torch.split(block, self._sizes(shape))
        k_scales, v_scales, k_mins, v_mins = (part.view(torch.float16) for part in rest)
        return Packed(
            k.view(halves),
            v.view(halves),
            k_scales.view(k_groups),
            v_scales.view(v_groups),
            k_mins.view(k_groups),
            v_mins.view(v_groups),
        )

    def decode(self, block: Tensor, shape: Shape, dtype: torch.dtype) -> Tensor:
        """See Codec."""
        k, v, k_scales, v_scales, k_mins, v_mins = self.unpack(block, shape, dtype)
        assert k_scales is not None
        assert v_scales is not None
        assert k_mins is not None
        assert v_mins is not None
        out = torch.stack((_steps(k), _steps(v)))
        for values, scales, mins, dim in ((out[0], k_scales, k_mins, 1), (out[1], v_scales, v_mins, 2)):
            spread = [part.float().repeat_interleave(GROUP, dim) for part in (scales, mins)]
            scale, least = (part.narrow(dim, 0, values.shape[dim]) for part in spread)
            values.mul_(scale).add_(least)
        return out

    @staticmethod
    def _sizes(shape: Shape) -> list[int]:
        k_scales = 2 * shape.kv_heads * _groups(shape.tokens) * shape.head_dim
        v_scales = 2 * shape.kv_heads * shape.tokens * _groups(shape.head_dim)
        return [shape.numel // 2, shape.numel // 2, k_scales, v_scales, k_scales, v_scales]


def _groups(count: int) -> int:
    return -(-count // GROUP)


def _quantised(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Steps 0..15 [..., n], and fp16 scales and minima [..., groups], of groups along the last dimension."""
    count = values.shape[-1]
    padded = functional.pad(values, (0, -count % GROUP), mode="replicate")
    grouped = padded.view(*padded.shape[:-1], -1, GROUP)
    mins = grouped.amin(-1).half()
    scales = ((grouped.amax(-1) - mins.float()) / 15).clamp(0, _FP16_MAX).half()
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales)).float()
    steps = ((grouped - mins.float()[..., None]) / divisors[..., None]).round().clamp(0, 15)
    return steps.flatten(-2)[..., :count].to(torch.uint8), scales, mins


def _nibbles(steps: Tensor) -> Tensor:
    return steps[..., 0::2] | (steps[..., 1::2] << 4)


def _steps(nibbles: Tensor) -> Tensor:
    return torch.stack((nibbles & 15, nibbles >> 4), -1).flatten(-2).float()


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Int8(), Fp8(), Int4())}
