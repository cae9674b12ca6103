"""What the Triton kernels share: the softmax that grows key by key, and the merge of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED: bool = triton.knobs.runtime.interpret  # TRITON_INTERPRET=1: kernels run on the CPU, slowly, for tests

jit: Callable[..., Callable[..., Any]] = triton.jit  # triton is untyped

_LOG2_E = math.log2(math.e)  # exp2 is one instruction on a GPU, exp is not
_LN_2 = tl.constexpr(math.log(2.0))

_MIN_SPLIT_KEYS = 256  # a shorter stretch of keys costs more to merge than it saves
_MAX_SPLITS = 32


class Tile(NamedTuple):
    """Shape of one step of a kernel, and how a GPU runs it."""

    rows: int  # query rows times heads of a group
    keys: int
    warps: int
    stages: int  # loads in flight


@jit
def capped(dots: tl.tensor, inner: tl.tensor) -> tl.tensor:
    """tanh(dots * inner), the soft cap of a logit but for its outer factor."""
    return 2.0 * tl.sigmoid(2.0 * inner * dots) - 1.0


@jit
def grow(
    dots: tl.tensor, scale: tl.tensor, values: tl.tensor, peak: tl.tensor, total: tl.tensor, acc: tl.tensor
) -> tl.tensor:
    """Takes one more tile of keys into a softmax in base 2.

    dots fp32 [rows, keys], to be scaled, -inf where hidden; values [keys, head_dim]; peak, total fp32 [rows]; acc fp32
    [rows, head_dim]. Returns the new peak, total and acc. The first peak must be finite: then a row that sees nothing
    stays free of NaN.
    """
    higher = tl.maximum(peak, tl.max(dots, 1) * scale)
    weights = tl.exp2(dots * scale - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, 1)
    # tf32x3: fp32 operands keep their precision on tensor cores; it changes nothing for the others.
    acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None], input_precision="tf32x3")
    return higher, total, acc


@jit
def finish(peak: tl.tensor, total: tl.tensor, acc: tl.tensor) -> tl.tensor:
    """The output and its natural log-sum-exp, from what `grow` left. A row that saw nothing gets 0 and -inf."""
    saw = total > 0.0
    safe = tl.where(saw, total, 1.0)
    return acc / safe[:, None], tl.where(saw, (peak + tl.log2(safe)) * _LN_2, float("-inf"))


@jit(do_not_specialize=["rows"])
def _merge_kernel(
    parts: tl.tensor,
    part_lses: tl.tensor,
    out: tl.tensor,
    lse: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    out_head: tl.tensor,
    out_row: tl.tensor,
    SPLITS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
) -> None:
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    split, dim = tl.arange(0, PADDED_SPLITS), tl.arange(0, PADDED_DIM)
    at = (split.to(tl.int64) * heads + head) * rows + row
    lses = tl.load(part_lses + at, mask=split < SPLITS, other=float("-inf"))
    peak = tl.max(lses, 0)
    weights = tl.exp(lses - peak)
    total = tl.sum(weights, 0)
    exists = (split[:, None] < SPLITS) & (dim[None, :] < HEAD_DIM)
    part = tl.load(parts + at[:, None] * HEAD_DIM + dim[None, :], mask=exists, other=0.0)
    merged = tl.sum(part * weights[:, None], 0) / total
    tl.store(out + head * out_head + row * out_row + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)
    tl.store(lse + head * rows + row, peak + tl.log(total))


def merge(parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merges attention over several stretches of keys by their log-sum-exp.

    parts fp32 [splits, heads, rows, head_dim] and part_lses fp32 [splits, heads, rows], -inf where a part saw nothing,
    both contiguous; writes out [heads, rows, head_dim] and lse fp32 [heads, rows], contiguous.
    """
    splits, heads, rows, head_dim = parts.shape
    _merge_kernel[(rows, heads)](
        parts,
        part_lses,
        out,
        lse,
        rows,
        heads,
        out.stride(0),
        out.stride(1),
        SPLITS=splits,
        PADDED_SPLITS=triton.next_power_of_2(splits),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim(head_dim),
    )


def logit_scales(scaling: float, softcap: float | None) -> tuple[float, float]:
    """What a kernel multiplies by on the way to logits in base 2: within the soft cap, and at last."""
    return (1.0, scaling * _LOG2_E) if softcap is None else (scaling / softcap, softcap * _LOG2_E)


def padded_dim(head_dim: int) -> int:
    """A tile's extent along the head dimension: a power of two, and what a matrix product takes at least."""
    return max(16, int(triton.next_power_of_2(head_dim)))


def choose_splits(programs: int, slots: int, device: torch.device) -> int:
    """Few rows are few programs: then the keys are split too, until there are about two programs a multiprocessor."""
    wanted = 2 * _processors(device) // programs
    return max(1, min(wanted, slots // _MIN_SPLIT_KEYS, _MAX_SPLITS))


def product_dtype(tensor: Tensor) -> Any:
    """The dtype that operands of a matrix product have: the tensor's own on a GPU.

    Triton's interpreter multiplies bfloat16 as if it were an integer; there it is fp32.
    """
    names = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
    return tl.float32 if INTERPRETED else names[tensor.dtype]


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of a multiprocessor's shared memory; the interpreter has as much as a Hopper GPU."""
    if device.type != "cuda":
        return 228 * 1024
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
