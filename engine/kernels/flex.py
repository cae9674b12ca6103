"""Stage II attention by FlexAttention: a second, independent source for what `attend_rows` computes.

The block mask is written down from the sorted positions. create_block_mask would build a rows x keys mask first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

_BLOCK = 128


def block_mask(positions: Tensor, keys: int) -> BlockMask:
    """Which blocks of 128 rows x 128 keys hold visible pairs under `key slot <= query position`.

    positions: int64 [rows], strictly increasing, below `keys`. Blocks visible throughout are marked full: they need no
    mask at all.
    """
    rows = positions.shape[0]
    blocks, key_blocks = -(-rows // _BLOCK), -(-keys // _BLOCK)
    # The last block's missing rows repeat the last position: FlexAttention evaluates the mask for them too.
    padded = torch.cat((positions, positions[-1:].expand(blocks * _BLOCK - rows)))
    first, last = padded[::_BLOCK], padded[_BLOCK - 1 :: _BLOCK]
    full = (first + 1) // _BLOCK
    partial = last // _BLOCK + 1 - full
    order = torch.arange(key_blocks, device=positions.device)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= padded[row]

    return BlockMask.from_kv_blocks(
        partial.int()[None, None],
        ((full[:, None] + order) % key_blocks).int()[None, None],  # only the first `partial` of a row count
        full.int()[None, None],
        order.expand(blocks, -1).int()[None, None].contiguous(),
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible,
        seq_lengths=(rows, keys),
        compute_q_blocks=False,  # for the backward pass only
    )


def attend_rows_flex(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scaling: float
) -> tuple[Tensor, Tensor]:
    """See `attend_rows`; `mask` is `block_mask(positions, key.shape[2])`, made once for all layers.

    Compiled on a GPU. Elsewhere it materialises the logits: a reference for tests.
    """
    on_gpu = query.device.type == "cuda"
    out, aux = _flex_attention(on_gpu)(
        query,
        key,
        value,
        block_mask=mask,
        scale=scaling,
        enable_gqa=True,
        # Left to itself it may take the kernel for few rows, which wants groups of a power of two.
        kernel_options={"BACKEND": "TRITON"} if on_gpu else None,
        return_aux=AuxRequest(lse=True),
    )
    return out, aux.lse


@cache
def _flex_attention(compiled: bool) -> Callable[..., Any]:
    run: Any = flex_attention
    return torch.compile(run, dynamic=True) if compiled else run
