"""A request's KV slots.

Slot index equals position, always; what is not yet written is garbage that nobody attends to.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention import QueryRows


class Slots:
    """K and V of one request: [layers, 2, kv_heads, capacity, head_dim] in the model's dtype on its device."""

    def __init__(
        self, layers: int, kv_heads: int, capacity: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.data = torch.empty(layers, 2, kv_heads, capacity, head_dim, dtype=dtype, device=device)

    @property
    def capacity(self) -> int:
        """Positions that fit."""
        return self.data.shape[3]

    def write(self, layer: int, rows: QueryRows, key: Tensor, value: Tensor) -> None:
        """Stores rows' K and V, each [1, kv_heads, rows, head_dim], at their positions."""
        if rows.contiguous:
            run = slice(rows.first, rows.visible)
            self.data[layer, 0, :, run] = key[0]
            self.data[layer, 1, :, run] = value[0]
        else:
            self.data[layer, 0].index_copy_(1, rows.positions, key[0])
            self.data[layer, 1].index_copy_(1, rows.positions, value[0])

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """One layer's K and V, each [1, kv_heads, capacity, head_dim]; views."""
        return self.data[layer, 0][None], self.data[layer, 1][None]
