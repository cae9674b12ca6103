"""Whether reuse pays, on paper: for a model's shape, a GPU and a medium, before any of them is there.

Times are those of a roofline: operations over the rate that kernels reach, or bytes over the memory's rate, whichever
is longer. The choice is the controller's own: chunks are loaded beside Stage I, which follows layer by layer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from engine.controller import choose
from errors import ConfigError

_CHUNK_TOKENS = 512
_QUERY_TOKENS = 64
_MAX_TOKENS = 1 << 20

# Of the vendor's peak: what kernels reach in linear layers, in causal attention and in attention of scattered rows (in
# useful operations), and of the memory's rate. FlashAttention-3's chart has 616 of 989 TFLOP/s for causal attention at
# head width 128 and 16K tokens on an H100, Triton about 400 (github.com/Dao-AILab/flash-attention); a full prefill of
# Llama-3.1-8B under vLLM on an H100 (blog.vllm.ai, KV offloading connector, 2026) is within 6 % of what these give.
_LINEAR, _CAUSAL, _SCATTERED, _MEMORY = 0.657, 0.607, 0.404, 0.9


@dataclass(frozen=True, slots=True)
class GPU:
    """Peak rates as the vendor states them: bf16 tensor TFLOP/s without sparsity, memory in TB/s."""

    tflops: float
    memory: float


# NVIDIA's data sheets of these products; RTX 4090: the Ada architecture whitepaper, with fp32 accumulation.
GPUS = {
    "b200": GPU(2250, 8.0),
    "h200": GPU(989, 4.8),
    "h100": GPU(989, 3.35),
    "a100": GPU(312, 2.04),
    "l40s": GPU(362, 0.864),
    "l4": GPU(121, 0.3),
    "a10": GPU(125, 0.6),
    "rtx-4090": GPU(165, 1.01),
}

# GB/s that a reader gets. Host memory: measured host-to-device copies over PCIe 5.0 and 4.0 x16. NVMe: data sheets of
# 5.0 and 4.0 x4 drives, sequential reads. Ethernet: the line's rate less protocol. Redis: a client that receives into
# the final buffer, and redis-py, one connection each, values of 2 to 4 MiB.
MEDIA = {
    "host-pcie5": 50.0,
    "host-pcie4": 25.0,
    "nvme-gen5": 12.0,
    "nvme-gen4": 6.5,
    "100gbe": 11.0,
    "25gbe": 2.8,
    "redis": 2.3,
    "redis-py": 0.45,
}

# Bytes of a stored value over those of bf16, scales included.
CODECS = {"raw": 1.0, "int8": 0.515, "fp8": 0.5, "int4": 0.28}


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a dense decoder decides its costs; the names are those of a configuration, shortened."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocab: int

    @property
    def parameters(self) -> int:
        """Of the layers' matrices."""
        projections = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (projections + 3 * self.hidden * self.mlp)

    @property
    def token_bytes(self) -> int:
        """KV of a token in bf16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


# From the models' published configurations.
SHAPES = {
    "llama-3.1-8b": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256),
    "mistral-7b": Shape(32, 4096, 32, 8, 128, 14336, 32768),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-14b": Shape(48, 5120, 40, 8, 128, 13824, 152064),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": Shape(40, 5120, 40, 8, 128, 17408, 151936),
    "qwen2.5-coder-0.5b-instruct": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-coder-1.5b-instruct": Shape(28, 1536, 12, 2, 128, 8960, 151936),
    "smollm2-135m-instruct": Shape(30, 576, 9, 3, 64, 1536, 49152),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Predicted seconds to the first token at one context length.

    `loaded`, `computed`: ProphetKV with every chunk from the medium, and with every chunk computed in isolation.
    `chosen` is what `auto` would run, which may load some chunks and compute others, and `auto` how long that takes.
    `break_even`: bytes per second above which reuse from a medium beats the full prefill; None where no medium would
    do.
    """

    tokens: int
    full: float
    loaded: float
    computed: float
    auto: float
    chosen: str
    break_even: float | None


class Paper:
    """One model on one GPU with one medium, in bf16."""

    def __init__(self, shape: Shape, gpu: GPU, rate: float, ratio: float, codec: str) -> None:
        """`rate`: of the medium, bytes per second; `ratio`: share of the context to recompute."""
        self.shape = shape
        self._ratio = ratio
        self.rate = rate
        self._stored = shape.token_bytes * CODECS[codec]
        self._linear, self._causal, self._scattered = (
            share * gpu.tflops * 1e12 for share in (_LINEAR, _CAUSAL, _SCATTERED)
        )
        self._memory = _MEMORY * gpu.memory * 1e12

    @property
    def chunk_break_even(self) -> float:
        """Bytes per second below which computing a chunk in isolation is faster than loading it, at any length."""
        return self._stored * self._linear / (2 * self.shape.parameters)

    def row(self, tokens: int) -> Row:
        """Times at a context of so many tokens."""
        count = max(1, tokens // _CHUNK_TOKENS)
        size = tokens / count
        full, (stage1, stage2) = self._full(tokens), self._stages(tokens)
        loading = size * self._stored / self.rate
        computing = self._passes(size) + self._attention(size * size / 2, self._causal)
        chosen, reuse, _ = choose([loading] * count, [computing] * count, stage1, stage2, full)
        spare = full - stage2
        return Row(
            tokens=tokens,
            full=full,
            loaded=max(count * loading, stage1) + stage2,
            computed=count * computing + stage1 + stage2,
            auto=full if chosen == "full" else reuse,
            chosen=chosen,
            break_even=tokens * self._stored / spare if spare > stage1 else None,
        )

    def pays_from(self) -> int | None:
        """The shortest context, in steps of a chunk, at which `auto` reuses; None when none does up to 1M tokens."""
        if self.row(_MAX_TOKENS).chosen == "full":
            return None
        low, high = 0, _MAX_TOKENS // _CHUNK_TOKENS
        while high - low > 1:
            middle = (low + high) // 2
            if self.row(middle * _CHUNK_TOKENS).chosen == "full":
                low = middle
            else:
                high = middle
        return high * _CHUNK_TOKENS

    def _full(self, tokens: int) -> float:
        rows = tokens + _QUERY_TOKENS
        return self._passes(rows) + self._head() + self._attention(rows * rows / 2, self._causal)

    def _stages(self, tokens: int) -> tuple[float, float]:
        """Placing and Stage I; Stage II and the first logits."""
        chosen, query = self._ratio * tokens, _QUERY_TOKENS
        kv = tokens * self.shape.token_bytes
        scored = max(self._attention(1.5 * query * tokens, self._scattered), 1.5 * kv / self._memory)
        pairs = chosen * tokens / 2 + query * (tokens + query / 2)
        recomputed = max(self._attention(pairs, self._scattered), kv / self._memory)
        placed = 2 * kv / self._memory
        return placed + self._passes(query) + scored, self._passes(chosen + query) + recomputed + self._head()

    def _passes(self, rows: float) -> float:
        """Linear layers: bound by operations, or by reading the weights."""
        return 2 * self.shape.parameters * max(rows / self._linear, 1 / self._memory)

    def _head(self) -> float:
        return 2 * self.shape.hidden * self.shape.vocab / self._memory

    def _attention(self, pairs: float, rate: float) -> float:
        return 4 * self.shape.layers * self.shape.heads * self.shape.head_dim * pairs / rate


def report(paper: Paper, lengths: Sequence[int], codec: str, medium: str) -> Iterator[Table | str]:
    """A table of predicted times at these context lengths, and what follows from it in words."""
    names = ("context", "full prefill", "reuse, loaded", "reuse, computed", "auto runs", "full / auto", "break-even")
    table = Table(*names)
    for row in map(paper.row, lengths):
        even = f"{row.break_even / 1e9:.2f} GB/s" if row.break_even is not None else "none"
        times = (f"{seconds * 1000:.0f} ms" for seconds in (row.full, row.loaded, row.computed))
        table.add_row(f"{row.tokens:,}", *times, row.chosen, f"{row.full / row.auto:.2f}x", even)
    yield table
    yield (
        f"{paper.shape.token_bytes / 1024:.0f} KiB of KV a token in bf16. Stored as {codec}, a chunk loads faster than "
        f"it is computed above {paper.chunk_break_even / 1e9:.2f} GB/s; {medium} gives {paper.rate / 1e9:.2f} GB/s."
    )
    shortest = paper.pays_from()
    verdict = "no" if shortest is None else f"yes, from about {shortest:,} tokens of context"
    yield f"Does reuse pay here? {verdict}."


def shape_of(model: str, cache: Path) -> Shape:
    """The shape of a known name, a folder with a config.json, such a file, or a model in the cache.

    Raises ConfigError.
    """
    if model.lower() in SHAPES:
        return SHAPES[model.lower()]
    for path in (Path(model), Path(model) / "config.json", cache / model / "config.json"):
        if path.is_file():
            return _read(path)
    raise ConfigError(f"no model {model!r}: give a folder, a config.json, or one of {', '.join(SHAPES)}")


def medium_rate(medium: str) -> float:
    """Bytes per second of a named medium or of a number of GB/s. Raises ConfigError."""
    try:
        rate = MEDIA[medium] if medium in MEDIA else float(medium)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate < float("inf"):
        raise ConfigError(f"no medium {medium!r}: give GB/s, or one of {', '.join(MEDIA)}")
    return rate * 1e9


def _read(path: Path) -> Shape:
    try:
        told: dict[str, Any] = json.loads(path.read_text())
        told = told.get("text_config", told)
        heads = told["num_attention_heads"]
        shape = Shape(
            layers=told["num_hidden_layers"],
            hidden=told["hidden_size"],
            heads=heads,
            kv_heads=told.get("num_key_value_heads", heads),
            head_dim=told.get("head_dim") or told["hidden_size"] // heads,
            mlp=told["intermediate_size"],
            vocab=told["vocab_size"],
        )
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not the configuration of a dense decoder: {error!r}") from error
    if any(told.get(sign) for sign in ("num_experts", "num_local_experts", "kv_lora_rank")):
        raise ConfigError(f"{path}: mixtures of experts and latent attention are not modelled")
    return shape
