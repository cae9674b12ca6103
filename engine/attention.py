"""Attention of scattered query rows over all slots, and the column sums that Stage I scores with.

Slot index equals position, so causality is `key slot <= query position` for any set of rows. Sorted rows are cut
into blocks. All rows of a block see the keys up to the block's first position, which needs no mask; only the short
stretch up to its last position does. The two parts are merged by their log-sum-exp, so no rows x keys mask ever
exists.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ROWS = 128  # measured on CPU at 4K and 8K keys: 64 to 256 are within 10 % of each other
_BLOCK_SPAN = 2048  # positions a block may span, which bounds its mask to 1 MiB however sparse the rows are
_SCORE_KEYS = 2048  # keys per step of the column sums; bounds the memory of the weights


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Rows [start, stop).

    Keys below `low` are visible to all of them; `mask` covers keys [low, high), None if empty.
    """

    start: int
    stop: int
    low: int
    high: int
    mask: Tensor | None  # additive, [1, 1, rows, high - low]


@dataclass(frozen=True, slots=True)
class QueryRows:
    """The sorted positions of the rows of one pass, prepared once and used by every layer."""

    positions: Tensor  # int64 [rows], on the device
    blocks: tuple[QueryBlock, ...]
    causal: bool  # rows are positions 0..rows-1: plain causal attention
    contiguous: bool  # rows are one run of positions
    first: int
    visible: int  # keys 0..visible-1 exist for this pass

    def __len__(self) -> int:
        return self.positions.shape[0]

    @classmethod
    def of(cls, positions: Tensor, device: torch.device, dtype: torch.dtype) -> QueryRows:
        """`positions`: int64 [rows] on the CPU, strictly increasing."""
        rows = len(positions)
        first, last = int(positions[0]), int(positions[-1])
        contiguous = last - first == rows - 1
        causal = contiguous and first == 0 and rows > 1
        blocks = () if causal else tuple(_blocks(positions, device, dtype))
        return cls(positions.to(device), blocks, causal, contiguous, first, last + 1)

    @property
    def pairs(self) -> int:
        """Query-key pairs attended to."""
        return int((self.positions + 1).sum())


def _blocks(positions: Tensor, device: torch.device, dtype: torch.dtype) -> list[QueryBlock]:
    values = positions.tolist()
    blocks, start = [], 0
    while start < len(values):
        stop = min(start + BLOCK_ROWS, len(values), bisect_left(values, values[start] + _BLOCK_SPAN))
        rows = positions[start:stop]
        low, high = values[start] + 1, values[stop - 1] + 1
        mask = None
        if high > low:
            hidden = torch.arange(low, high)[None, :] > rows[:, None]
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            # The first row sees nothing here. A row of -inf alone would give NaN; `attend` gives it no weight.
            mask[0] = 0.0
            mask = mask[None, None].to(device)
        blocks.append(QueryBlock(start, stop, low, high, mask))
        start = stop
    return blocks


def attend(query: Tensor, key: Tensor, value: Tensor, rows: QueryRows, scaling: float) -> tuple[Tensor, Tensor]:
    """Softmax attention under `key slot <= query position`.

    query [1, heads, rows, head_dim]; key and value [1, kv_heads, >= rows.visible, head_dim], heads a multiple of
    kv_heads. Returns the output, like query, and the log-sum-exp of the scaled logits, fp32 [1, heads, rows].
    """
    if rows.causal:
        visible = slice(0, rows.visible)
        return _partial(query, key[:, :, visible], value[:, :, visible], scaling, causal=True)
    outputs, sums = [], []
    for block in rows.blocks:
        part = query[:, :, block.start : block.stop]
        out, lse = _partial(part, key[:, :, : block.low], value[:, :, : block.low], scaling)
        if block.mask is not None:
            tail = slice(block.low, block.high)
            tail_out, tail_lse = _partial(part, key[:, :, tail], value[:, :, tail], scaling, mask=block.mask)
            tail_lse[:, :, 0] = float("-inf")
            out = torch.lerp(out, tail_out, torch.sigmoid(tail_lse - lse)[..., None].to(out.dtype))
            lse = torch.logaddexp(lse, tail_lse)
        outputs.append(out)
        sums.append(lse)
    if len(outputs) == 1:
        return outputs[0], sums[0]
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _partial(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Attention over a stretch of keys, with its log-sum-exp."""
    if query.device.type == "cpu":
        # The kernel behind scaled_dot_product_attention on a CPU: GQA without repeating K and V.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
    return _partial_reference(query, key, value, scaling, mask, causal)


def _partial_reference(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations, for any device; materialises heads x rows x keys in fp32."""
    _, heads, rows, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    packed = query.view(1, kv_heads, heads // kv_heads, rows, head_dim)
    logits = torch.matmul(packed, key[:, :, None].transpose(-1, -2)).float() * scaling
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(1)
        logits.masked_fill_(hidden, float("-inf"))
    if mask is not None:
        logits += mask.float()[:, :, None]
    lse = torch.logsumexp(logits, dim=-1)
    out = torch.matmul(functional.softmax(logits, dim=-1).to(value.dtype), value[:, :, None])
    return out.view(1, heads, rows, head_dim), lse.view(1, heads, rows)


def add_column_sums(query: Tensor, key: Tensor, lse: Tensor, scaling: float, sums: Tensor) -> None:
    """Adds each key's softmax weights, summed over heads and rows, to `sums` (fp32 [keys]).

    query [1, heads, rows, head_dim] and lse [1, heads, rows] come from `attend`; key [1, kv_heads, >= keys, head_dim].
    All `keys` first keys must be visible to every row. The weights exist for 2048 keys at a time only.
    """
    _, heads, rows, head_dim = query.shape
    kv_heads = key.shape[1]
    packed = query.reshape(kv_heads, heads // kv_heads * rows, head_dim).float() * scaling
    norm = lse.reshape(kv_heads, heads // kv_heads * rows, 1).float()
    for start in range(0, sums.shape[0], _SCORE_KEYS):
        keys = key[0, :, start : min(start + _SCORE_KEYS, sums.shape[0])].float()
        weights = torch.matmul(packed, keys.transpose(1, 2)).sub_(norm).exp_()
        sums[start : start + keys.shape[1]] += weights.sum((0, 1))
