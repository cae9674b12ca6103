"""Decode attention of several requests whose KV lies in pages, for a batch of decode steps.

torch.nn.attention.varlen.varlen_attn takes a block table too, but refuses one unless the separate FlashAttention 3
package is installed and activated: the FlashAttention 2 that torch brings has no pages. So a kernel of our own serves.
"""

from __future__ import annotations

import torch
from torch import Tensor


def decode_paged(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, block_table: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """Softmax attention of one new token a request over its keys so far, its own among them.

    query [requests, heads, head_dim]; key_pages, value_pages [pages, page_size, kv_heads, head_dim]; block_table int32
    [requests, most pages of a request]: where page i of a request lies, its tail of any value within the pages; lengths
    int32 [requests], at least 1: keys of a request. Returns the output, like query.
    """
    if query.device.type == "cuda":
        from engine.kernels.decode import decode

        return decode(query, key_pages, value_pages, block_table, lengths, scaling)
    return decode_reference(query, key_pages, value_pages, block_table, lengths, scaling)


def decode_reference(
    query: Tensor, key_pages: Tensor, value_pages: Tensor, block_table: Tensor, lengths: Tensor, scaling: float
) -> Tensor:
    """The same in plain tensor operations, request by request, for any device."""
    outputs = []
    for row, table, length in zip(query, block_table, lengths.tolist(), strict=True):
        keys, values = (pages[table].flatten(0, 1)[:length].transpose(0, 1)[None] for pages in (key_pages, value_pages))
        out = torch.nn.functional.scaled_dot_product_attention(
            row[None, :, None], keys, values, scale=scaling, enable_gqa=True
        )
        outputs.append(out[0, :, 0])
    return torch.stack(outputs)
