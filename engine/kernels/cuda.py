"""What engine/attention.py runs on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import QueryRows
from engine.kernels.attend import attend_rows


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: QueryRows,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """See engine.attention.attend.

    Flash attention where it applies, which is a plain prefill in half precision; the Triton kernel for all else.
    """
    if window is not None and rows.visible <= window:
        window = None
    plain = rows.causal and window is None and softcap is None
    if plain and query.dtype != torch.float32 and query.shape[-1] % 8 == 0:
        # The kernel behind scaled_dot_product_attention: GQA without repeating K and V.
        visible = slice(0, rows.visible)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key[:, :, visible], value[:, :, visible], 0.0, True, scale=scaling
        )
        return out, lse
    return attend_rows(query, key, value, rows.positions, scaling, window, softcap)
