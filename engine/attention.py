"""Attention of scattered query rows over all slots, and the column sums that Stage I scores with.

Slot index equals position, so causality is `key slot <= query position` for any set of rows. Sorted rows are cut
into blocks. All rows of a block see the keys up to the block's first position, which needs no mask; only the short
stretch up to its last position does. The two parts are merged by their log-sum-exp, so no rows x keys mask ever
exists.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

BLOCK_ROWS = 128  # measured on CPU at 4K and 8K keys: 64 to 256 are within 10 % of each other
_BLOCK_SPAN = 2048  # positions a block may span, which bounds its mask to 1 MiB however sparse the rows are
_SCORE_KEYS = 2048  # keys per step of the column sums; bounds the memory of the weights


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """Rows [start, stop) and the keys they see.

    Keys [begin, low) are visible to all of them; `mask` tells about keys [low, high), None if there are none.
    """

    start: int
    stop: int
    begin: int
    low: int
    high: int
    mask: Tensor | None  # additive, [1, 1, rows, high - low]


class QueryRows:
    """The sorted positions of the rows of one pass, prepared once and used by every layer.

    positions: int64 [rows] on the device. contiguous: they are one run, from `first` to `visible` - 1. causal: that
    run begins at 0. Keys 0..visible-1 exist for this pass.
    """

    def __init__(self, positions: Tensor, device: torch.device, dtype: torch.dtype) -> None:
        """`positions`: int64 [rows] on the CPU, strictly increasing. `dtype`: of the attention's masks."""
        self.host_positions = positions
        self.positions = positions.to(device)
        self.first = int(positions[0])
        self.visible = int(positions[-1]) + 1
        self.contiguous = self.visible - self.first == len(positions)
        self.causal = self.contiguous and self.first == 0 and len(positions) > 1
        self._dtype = dtype
        self._blocks: dict[int | None, tuple[QueryBlock, ...]] = {}

    def __len__(self) -> int:
        return self.positions.shape[0]

    @property
    def pairs(self) -> int:
        """Query-key pairs attended to without a sliding window."""
        return int((self.host_positions + 1).sum())

    def blocks(self, window: int | None = None) -> tuple[QueryBlock, ...]:
        """The rows in blocks. With a window a row sees itself and the `window` - 1 positions before it."""
        if window is not None and self.visible <= window:
            window = None
        if window not in self._blocks:
            self._blocks[window] = tuple(self._cut(window))
        return self._blocks[window]

    def _cut(self, window: int | None) -> Iterator[QueryBlock]:
        values = self.host_positions.tolist()
        start = 0
        while start < len(values):
            stop = min(start + BLOCK_ROWS, len(values), bisect_left(values, values[start] + _BLOCK_SPAN))
            rows = self.host_positions[start:stop, None]
            begin, low, high = 0, values[start] + 1, values[stop - 1] + 1
            if window is not None and high > window:
                begin = low = max(0, low - window)
            mask = None
            if high > low:
                keys = torch.arange(low, high)[None]
                hidden = keys > rows
                if window is not None:
                    hidden |= keys <= rows - window
                mask = torch.zeros(hidden.shape, dtype=self._dtype).masked_fill_(hidden, float("-inf"))
                if low > begin:
                    # The first row sees nothing here. A row of -inf alone would give NaN; `attend` gives it no weight.
                    mask[0] = 0.0
                mask = mask[None, None].to(self.positions.device)
            yield QueryBlock(start, stop, begin, low, high, mask)
            start = stop


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: QueryRows,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Softmax attention under `key slot <= query position`.

    query [1, heads, rows, head_dim]; key and value [1, kv_heads, >= rows.visible, head_dim], heads a multiple of
    kv_heads. `window`: how many positions a row sees, itself included; None for all. `softcap`: the logits' bound
    c in c * tanh(logits / c), as in Gemma 2. Returns the output, like query, and the log-sum-exp of the logits,
    fp32 [1, heads, rows].
    """
    if query.device.type == "cuda":
        from engine.kernels import cuda  # here, for it needs triton, which a CPU build of torch does not bring

        return cuda.attend(query, key, value, rows, scaling, window, softcap)
    if rows.causal and softcap is None and (window is None or rows.visible <= window):
        visible = slice(0, rows.visible)
        return _partial(query, key[:, :, visible], value[:, :, visible], scaling, causal=True)
    outputs, sums = [], []
    for block in rows.blocks(window):
        part = query[:, :, block.start : block.stop]
        out, lse = None, None
        if block.low > block.begin:
            seen = slice(block.begin, block.low)
            out, lse = _unmasked(part, key[:, :, seen], value[:, :, seen], scaling, softcap)
        if block.mask is not None:
            tail = slice(block.low, block.high)
            tail_out, tail_lse = _partial(
                part, key[:, :, tail], value[:, :, tail], scaling, mask=block.mask, softcap=softcap
            )
            if out is None or lse is None:
                out, lse = tail_out, tail_lse
            else:
                tail_lse[:, :, 0] = float("-inf")
                out = torch.lerp(out, tail_out, torch.sigmoid(tail_lse - lse)[..., None].to(out.dtype))
                lse = torch.logaddexp(lse, tail_lse)
        assert out is not None
        assert lse is not None
        outputs.append(out)
        sums.append(lse)
    if len(outputs) == 1:
        return outputs[0], sums[0]
    return torch.cat(outputs, dim=2), torch.cat(sums, dim=2)


def _unmasked(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention over keys that every row sees: with a GQA group's heads below each other a key serves more rows."""
    packed = query.reshape(1, key.shape[1], -1, query.shape[-1])
    out, lse = _partial(packed, key, value, scaling, softcap=softcap)
    return out.reshape(query.shape), lse.reshape(query.shape[:-1])


def _partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a stretch of keys, with its log-sum-exp."""
    if query.device.type == "cpu" and softcap is None:
        # The kernel behind scaled_dot_product_attention on a CPU: GQA without repeating K and V.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[no-any-return]
            query, key, value, 0.0, causal, attn_mask=mask, scale=scaling
        )
    return _partial_reference(query, key, value, scaling, mask, causal, softcap)


def _partial_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    mask: Tensor | None = None,
    causal: bool = False,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain tensor operations, for any device; materialises heads x rows x keys in fp32."""
    _, heads, rows, head_dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    packed = query.reshape(1, kv_heads, heads // kv_heads, rows, head_dim)
    logits = _capped(torch.matmul(packed, key[:, :, None].transpose(-1, -2)).float().mul_(scaling), softcap)
    if causal:
        hidden = torch.ones(rows, keys, dtype=torch.bool, device=query.device).triu(1)
        logits.masked_fill_(hidden, float("-inf"))
    if mask is not None:
        logits += mask.float()[:, :, None]
    lse = torch.logsumexp(logits, dim=-1)
    out = torch.matmul(functional.softmax(logits, dim=-1).to(value.dtype), value[:, :, None])
    return out.view(1, heads, rows, head_dim), lse.view(1, heads, rows)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def add_column_sums(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    rows: QueryRows,
    scaling: float,
    sums: Tensor,
    window: int | None = None,
    softcap: float | None = None,
) -> None:
    """Adds the softmax weights that each key receives, summed over rows and the heads of its group, to `sums`.

    query [1, heads, rows, head_dim] and lse [1, heads, rows] as in `attend`; key [1, kv_heads, slots, head_dim]; sums
    fp32 [kv_heads, rows.visible] or shorter: keys behind its end are left out. The weights exist for 2048 keys and 128
    rows at a time only.
    """
    if query.device.type == "cuda":
        from engine.kernels.column_sums import column_sums

        column_sums(query, key, lse, rows.positions, scaling, sums, window, softcap)
        return
    kv_heads, counted = sums.shape
    for block in rows.blocks(window):
        part = query[0, :, block.start : block.stop]
        packed = part.reshape(kv_heads, -1, part.shape[-1]).float() * scaling  # GQA: a group's heads below each other
        norm = lse[0, :, block.start : block.stop].reshape(kv_heads, -1, 1).float()
        for start in range(block.begin, min(block.low, counted), _SCORE_KEYS):
            stop = min(start + _SCORE_KEYS, block.low, counted)
            keys = key[0, :, start:stop].float()
            weights = _capped(torch.matmul(packed, keys.transpose(1, 2)), softcap).sub_(norm).exp_()
            sums[:, start:stop] += weights.sum(1)
        if block.mask is None or block.low >= counted:
            continue
        stop = min(block.high, counted)
        logits = _capped(torch.matmul(packed, key[0, :, block.low : stop].float().transpose(1, 2)), softcap)
        seen = logits.view(kv_heads, -1, *block.mask.shape[2:3], stop - block.low)
        seen += block.mask[0, 0, :, : stop - block.low]
        weights = logits.sub_(norm).exp_()
        if block.low > block.begin:
            weights.view_as(seen)[:, :, 0] = 0.0  # the mask's row that `attend` overrules, too
        sums[:, block.low : stop] += weights.sum(1)
