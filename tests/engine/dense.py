"""ProphetKV written out by hand on a Llama's weights: plain torch, fp64, explicit masks, no code of the engine."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class DenseLlama:
    """A Llama in fp64; rows of a prompt are computed against K and V lists that the caller owns."""

    def __init__(self, module: Any) -> None:
        config = module.config
        self.weights: dict[str, Tensor] = {name: value.double() for name, value in module.state_dict().items()}
        self.layers: int = config.num_hidden_layers
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads
        self.width: int = config.head_dim
        self.eps: float = config.rms_norm_eps
        base = config.rope_parameters["rope_theta"]
        # fp32 first, as the model's own buffer is: the angles must be the same numbers.
        exponent = torch.arange(0, self.width, 2, dtype=torch.float32) / self.width
        self.frequencies = (1.0 / base**exponent).double()

    def rows(
        self, ids: Tensor, positions: Tensor, keys: list[Tensor], values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs rows through all layers, writing their K and V (turned) into [kv_heads, slots, width] at `positions`.

        Returns the logits of all rows, and per layer the attention weights [heads, rows, slots].
        """
        hidden: Tensor = self.weights["model.embed_tokens.weight"][ids]
        maps = []
        for layer in range(self.layers):
            hidden, weights = self._layer(layer, hidden, positions, keys[layer], values[layer])
            maps.append(weights)
        return self._norm(hidden, "model.norm.weight") @ self.weights["lm_head.weight"].T, maps

    def turn(self, keys: Tensor, positions: Tensor) -> Tensor:
        """RoPE by complex numbers; keys [heads, rows, width]."""
        half = self.width // 2
        turned = torch.complex(keys[..., :half], keys[..., half:]) * torch.polar(
            torch.ones(len(positions), half, dtype=torch.float64), positions[:, None] * self.frequencies
        )
        joined: Tensor = torch.cat((turned.real, turned.imag), -1)
        return joined

    def _layer(
        self, layer: int, hidden: Tensor, positions: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        def weight(name: str) -> Tensor:
            return self.weights[f"model.layers.{layer}.{name}.weight"]

        def heads(name: str, count: int) -> Tensor:
            return (normed @ weight(f"self_attn.{name}").T).view(len(positions), count, self.width).transpose(0, 1)

        normed = self._norm(hidden, f"model.layers.{layer}.input_layernorm.weight")
        query = self.turn(heads("q_proj", self.heads), positions)
        keys[:, positions] = self.turn(heads("k_proj", self.kv_heads), positions)
        values[:, positions] = heads("v_proj", self.kv_heads)
        group = self.heads // self.kv_heads
        logits = query @ keys.repeat_interleave(group, 0).transpose(1, 2) / math.sqrt(self.width)
        hidden_keys = torch.arange(keys.shape[1])[None, :] > positions[:, None]
        weights = logits.masked_fill(hidden_keys, -math.inf).softmax(-1)
        out = (weights @ values.repeat_interleave(group, 0)).transpose(0, 1).reshape(len(positions), -1)
        hidden = hidden + out @ weight("self_attn.o_proj").T
        normed = self._norm(hidden, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate = normed @ weight("mlp.gate_proj").T
        inner = gate * gate.sigmoid() * (normed @ weight("mlp.up_proj").T)
        return hidden + inner @ weight("mlp.down_proj").T, weights

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        size: Tensor = (hidden.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return hidden / size * self.weights[name]

    def empty(self, slots: int) -> tuple[list[Tensor], list[Tensor]]:
        """K and V of nothing yet, NaN: whatever is read before it was written shows."""
        shape = self.kv_heads, slots, self.width
        made = [torch.full(shape, math.nan, dtype=torch.float64) for _ in range(2 * self.layers)]
        return made[: self.layers], made[self.layers :]


def prophetkv(
    model: DenseLlama, prefix: list[int], parts: list[tuple[list[int], list[int]]], suffix: list[int], budget: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The whole method of the paper: scores [context], selected [budget], the last row's logits [vocab].

    parts: glue and chunk in turn.
    """
    ids = [*prefix, *(token for glue, chunk in parts for token in (*glue, *chunk)), *suffix]
    tokens = torch.tensor(ids)
    keys, values = model.empty(len(ids))
    context: list[int] = []
    glued: list[int] = []
    at = len(prefix)
    for glue, chunk in parts:
        glued += range(at, at + len(glue))
        at += len(glue)
        alone_keys, alone_values = model.empty(len(prefix) + len(chunk))
        alone = torch.tensor(prefix + chunk)
        model.rows(alone, torch.arange(len(alone)), alone_keys, alone_values)
        here = torch.arange(at, at + len(chunk))
        for layer in range(model.layers):
            keys[layer][:, : len(prefix)] = alone_keys[layer][:, : len(prefix)]
            values[layer][:, : len(prefix)] = alone_values[layer][:, : len(prefix)]
            shift = here - torch.arange(len(prefix), len(alone))
            keys[layer][:, here] = model.turn(alone_keys[layer][:, len(prefix) :], shift)
            values[layer][:, here] = alone_values[layer][:, len(prefix) :]
        context += here.tolist()
        at += len(chunk)
    fresh = [*glued, *range(at, len(ids))]
    stage_one = [layer.clone() for layer in keys], [layer.clone() for layer in values]
    bare_keys, bare_values = model.empty(len(prefix) + len(glued))
    bare = torch.arange(len(prefix) + len(glued))
    model.rows(torch.tensor([*prefix, *(ids[index] for index in glued)]), bare, bare_keys, bare_values)
    for layer in range(model.layers):
        shift = torch.tensor(glued) - bare[len(prefix) :]
        stage_one[0][layer][:, glued] = model.turn(bare_keys[layer][:, len(prefix) :], shift)
        stage_one[1][layer][:, glued] = bare_values[layer][:, len(prefix) :]
    for tensor in (*stage_one[0], *stage_one[1], *keys, *values):
        tensor[tensor.isnan()] = 0.0  # rows still to come: masked, but 0 * NaN is NaN
    rows = torch.arange(at, len(ids))
    _, maps = model.rows(tokens[rows], rows, *stage_one)
    per_layer = [weights[:, :, context].sum(1).mean(0) for weights in maps]
    scores = torch.stack(per_layer).mean(0)
    order = sorted(range(len(context)), key=lambda index: (-float(scores[index]), index))
    selected = torch.tensor(sorted(order[:budget]))
    rows = torch.tensor(sorted([*fresh, *(context[index] for index in selected.tolist())]))
    logits, _ = model.rows(tokens[rows], rows, keys, values)
    return scores, selected, logits[-1]
