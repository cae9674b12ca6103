"""Tiny random fp32 models: every family and RoPE type, GQA of 2, logits above 5: a wrong mask or angle shows."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from cache_store.base import Chunk, ChunkKV, LoadedChunk, Pause
from engine.base import GenerateRequest, Part, Sampling
from engine.encode import PrefixCache, encode_chunk
from engine.forward import run_steps
from engine.model import Model
from engine.prefill import Prefill
from engine.strategies import STRATEGIES

VOCAB = 97
_SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 256.0, "original_max_position_embeddings": 64}

# A window that the prompts exceed, on every second layer where the family mixes kinds.
_SLIDING: dict[str, Any] = {"sliding_window": 48}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

FAMILIES: dict[str, PretrainedConfig] = {
    "gemma2": Gemma2Config(**_SHAPE, **_MIXED, query_pre_attn_scalar=16, attn_logit_softcapping=5.0),
    "gemma3": Gemma3TextConfig(**_SHAPE, **_MIXED, query_pre_attn_scalar=16),
    "llama": LlamaConfig(**_SHAPE),
    "llama-llama3": LlamaConfig(**_SHAPE, rope_parameters=_LLAMA3),
    "llama-linear": LlamaConfig(**_SHAPE, rope_parameters=_LINEAR),
    "llama-yarn": LlamaConfig(**_SHAPE, rope_parameters=_YARN),
    "mistral": MistralConfig(**_SHAPE, sliding_window=None),
    "mistral-sliding": MistralConfig(**_SHAPE, **_SLIDING),
    "phi3": Phi3Config(**{**_SHAPE, "pad_token_id": 0}, rope_parameters=_PARTIAL),
    "phi3-sliding": Phi3Config(**{**_SHAPE, "pad_token_id": 0}, **_SLIDING),
    "qwen2": Qwen2Config(**_SHAPE),
    "qwen2-sliding": Qwen2Config(**_SHAPE, **_MIXED, use_sliding_window=True),
    "qwen3": Qwen3Config(**_SHAPE),
}


def plain_module(config: PretrainedConfig, attention: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """The transformers model itself, with random weights that `seed` decides; the same numbers in every dtype."""
    torch.manual_seed(seed)
    # A copy: transformers notes the attention implementation in the config that it is given.
    build: Any = AutoModelForCausalLM.from_config
    module = build(deepcopy(config), dtype=torch.float32, attn_implementation=attention)
    with torch.no_grad():
        module.lm_head.weight *= 4
    for layer in module.modules():
        if not type(layer).__name__.endswith("RotaryEmbedding"):  # its frequencies are fp32 in a loaded model, too
            for parameter in layer.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return module.eval()


def tiny_model(config: PretrainedConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    return Model(plain_module(config, "prophetkv", seed, dtype), tokenizer=None, fingerprint="tiny")


def save_tiny_model(tokenizer_folder: Path, folder: Path, seed: int = 0, **larger: int) -> Path:
    """A tiny Llama on disk with a real tokenizer. It knows no end of text, so answers are as long as they may be."""
    real = AutoConfig.from_pretrained(tokenizer_folder)
    shape = {**_SHAPE, "vocab_size": real.vocab_size, "num_hidden_layers": 2, **larger}
    plain_module(LlamaConfig(**shape), "sdpa", seed).save_pretrained(folder)
    _copy_tokenizer(tokenizer_folder, folder)
    return folder


def save_tiny_gpt2(tokenizer_folder: Path, folder: Path) -> Path:
    """A tiny GPT-2 on disk with a real tokenizer: it has no rotary positions."""
    size = AutoConfig.from_pretrained(tokenizer_folder).vocab_size
    config = GPT2Config(
        vocab_size=size, n_embd=32, n_layer=2, n_head=2, n_positions=4096, bos_token_id=None, eos_token_id=None
    )
    plain_module(config, "sdpa").save_pretrained(folder)
    _copy_tokenizer(tokenizer_folder, folder)
    return folder


def _copy_tokenizer(source: Path, folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder / name)


run = run_steps


def draw(count: int, seed: int, vocab: int = VOCAB) -> tuple[int, ...]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, vocab, (count,), generator=generator).tolist())


class Bench:
    """A model with a fixed prompt of chunks of unequal length, and what is needed to prefill it."""

    def __init__(
        self,
        model: Model,
        lengths: tuple[int, ...] = (37, 5, 64, 150, 1),
        prefix: int = 9,
        glue: int = 3,
        suffix: int = 11,
    ) -> None:
        self.model = model
        self.prefixes = PrefixCache(model)
        self.prefix = draw(prefix, 1, model.vocab_size)
        self.suffix = draw(suffix, 2, model.vocab_size)
        self.parts = tuple(
            Part(
                draw(glue, 100 + index, model.vocab_size),
                Chunk(f"{index:064x}", draw(length, index + 3, model.vocab_size)),
            )
            for index, length in enumerate(lengths)
        )
        self.encoded: dict[str, ChunkKV] = {}

    def prefetch(self, chunks: Sequence[Chunk]) -> object:
        """KVSource.prefetch: nothing is read."""
        return None

    def load(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """KVSource.load: everything is computed once and kept."""
        if chunk.key not in self.encoded:
            self.encoded[chunk.key] = yield from encode_chunk(self.model, self.prefixes, self.prefix, chunk)
            return LoadedChunk(self.encoded[chunk.key], "computed")
        return LoadedChunk(self.encoded[chunk.key], "memory")

    def compute(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """KVSource.compute."""
        self.encoded.pop(chunk.key, None)
        return (yield from self.load(chunk))

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """KVSource.locate_many."""
        return ["memory" if chunk.key in self.encoded else None for chunk in chunks], ()

    def request(self, strategy: str, ratio: float = 0.2, max_tokens: int = 16, **options: Any) -> GenerateRequest:
        return GenerateRequest(
            "test",
            self.prefix,
            self.parts,
            self.suffix,
            STRATEGIES[strategy](ratio=ratio, **options),
            Sampling(max_tokens),
            question=(2, 6),
        )

    def prefill(self, strategy: str = "full", ratio: float = 0.2, **options: Any) -> Prefill:
        return Prefill(self.model, self, self.prefixes, self.request(strategy, ratio, **options))

    def logits(self, strategy: str, ratio: float = 0.2, **options: Any) -> Tensor:
        return self.run(self.prefill(strategy, ratio, **options))

    @staticmethod
    def run(prefill: Prefill) -> Tensor:
        return run(prefill.request.strategy.prefill(prefill))
