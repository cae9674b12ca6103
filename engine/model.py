"""The only module that touches transformers: loading, the layer loop, the attention hook, RoPE.

transformers gives the decoder layers; the loop over them is ours, so rows may shrink between layers, a layer's K
and V can be had without its attention and MLP, and the caller gets control between layers. Two seams carry it: a
`Step` passes as the layer's cache (it scatters K and V into the request's slots), and one registered attention
function computes from there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from cache_store.base import KVLayout
from cache_store.keys import digest_fields
from engine.attention import QueryRows, add_column_sums, attend
from engine.slots import Slots
from errors import UnsupportedModel

# Families and RoPE types for which the controls in tests/engine hold.
FAMILIES = ("llama", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ATTENTION = "split-lse-1"  # names the attention implementation in fingerprints; change it when its numbers change


class _Enough(Exception):
    """Leaves a layer early, when what the pass wants of it is there."""


@dataclass(slots=True)
class Scores:
    """Stage I's accumulator: softmax weights that each context key receives, summed over heads, rows and layers."""

    sums: Tensor  # fp32 [keys]; keys 0..len-1 must be visible to every scoring row
    rows: slice  # the rows of the pass that score


@dataclass(slots=True)
class Step:
    """One pass of rows through the layers. transformers calls `update` as it would a cache's."""

    rows: QueryRows
    slots: Slots
    scores: Scores | None = None
    kv_only: bool = False
    attention_only: bool = False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Scatters the rows' K (after RoPE) and V into the slots; returns the layer's slots to attend over."""
        self.slots.write(layer_idx, self.rows, key, value)
        if self.kv_only:
            raise _Enough
        return self.slots.read(layer_idx)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered attention function:

    query [1, heads, rows, head_dim] over all slots. Returns [1, rows, heads, head_dim].
    """
    out, lse = attend(query, key, value, step.rows, scaling)
    if step.scores is not None:
        rows = step.scores.rows
        add_column_sums(query[:, :, rows], key, lse[:, :, rows], scaling, step.scores.sums)
    if step.attention_only:
        raise _Enough
    return out.transpose(1, 2), None


AttentionInterface.register("prophetkv", _attention)


class Model:
    """A causal language model on one device, driven row by row."""

    def __init__(self, module: Any, tokenizer: Any, fingerprint: str) -> None:
        """`module`: a transformers causal LM of a supported family with the attention implementation "prophetkv"."""
        config = module.config
        check_supported(config)
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.name: str = getattr(config, "model_type", "?")
        self.window: int = config.max_position_embeddings
        self.vocab_size: int = config.vocab_size
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.layout = KVLayout(config.num_hidden_layers, config.num_key_value_heads, head_dim, self.dtype)
        self.heads: int = heads
        self.eos_ids = _eos_ids(module)
        self._module = module
        self._decoder = module.model
        self._head = module.lm_head
        self._inv_freq: Tensor = module.model.rotary_emb.inv_freq.float()
        self.layer_params: int = sum(p.numel() for p in self._decoder.layers.parameters())

    @classmethod
    def load(cls, folder: Path, device: str = "auto", dtype: str = "auto") -> Model:
        """Loads safetensors weights and the tokenizer from `folder`; nothing in it is executed.

        Raises UnsupportedModel for architectures, RoPE types or attention for which reuse is not proven.
        """
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        check_supported(config)
        target = resolve_device(device)
        kind = resolve_dtype(dtype, target)
        with _quiet():
            module: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=kind, attn_implementation="prophetkv", use_safetensors=True, trust_remote_code=False
            )
        module = module.to(target).eval()
        return cls(module, load_tokenizer(folder), fingerprint(folder, config, kind))

    def new_slots(self, capacity: int) -> Slots:
        """Uninitialised slots for `capacity` positions."""
        layout = self.layout
        return Slots(layout.layers, layout.kv_heads, capacity, layout.head_dim, self.dtype, self.device)

    def rows(self, positions: Tensor) -> QueryRows:
        """The rows at `positions` (int64 on the CPU, strictly increasing), prepared for `forward`."""
        return QueryRows.of(positions, self.device, self.dtype)

    def forward(self, ids: Tensor, step: Step) -> Generator[None, None, Tensor]:
        """Runs the rows of `step` with token `ids` (int64 [rows]) through all layers; yields between layers.

        Returns the last row's logits, fp32 [vocab]. In the last layer every row leaves its K and V, but only the
        last row goes on. With `step.kv_only` or `step.attention_only` set the last layer ends there, and the result
        is empty.
        """
        hidden, angles = self._enter(ids, step.rows)
        *layers, last = self._decoder.layers
        inner = Step(step.rows, step.slots, step.scores)
        for layer in layers:
            hidden = layer(hidden, position_embeddings=angles, cache=inner, step=inner)
            yield
        if step.kv_only or step.attention_only:
            self._leave_early(last, hidden, angles, step)
            return torch.empty(0, device=self.device)
        if len(step.rows) > 1:
            self._leave_early(last, hidden, angles, Step(step.rows, step.slots, kv_only=True))
            step = Step(self.rows(step.rows.positions[-1:].cpu()), step.slots)
            hidden, angles = hidden[:, -1:], (angles[0][:, -1:], angles[1][:, -1:])
        hidden = last(hidden, position_embeddings=angles, cache=step, step=step)
        logits: Tensor = self._head(self._decoder.norm(hidden))[0, -1].float()
        return logits

    def plain_logits(self, ids: Tensor) -> Tensor:
        """The transformers model itself under SDPA: what `full` must equal and not trail.

        ids: int64 [tokens] or [batch, tokens]; returns the last row's logits, fp32 [vocab] or [batch, vocab].
        """
        self._module.set_attn_implementation("sdpa")
        try:
            batch = ids.to(self.device).view(-1, ids.shape[-1])
            logits: Tensor = self._module(batch, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        finally:
            self._module.set_attn_implementation("prophetkv")
        return logits.view(*ids.shape[:-1], -1)

    def rotation(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that turns keys [..., tokens, head_dim] by the angles of `positions` (int64 [tokens]), in fp32.

        Negative positions turn back. The raw inverse frequencies turn without scaling: the magnitude that YaRN puts
        on K stays in it, unchanged.
        """
        angle = positions[:, None].to(self.device).float() * self._inv_freq
        cos, sin = torch.cos(angle), torch.sin(angle)
        half = angle.shape[1]

        def rotate(keys: Tensor) -> Tensor:
            low, high, rest = torch.split(keys.float(), [half, half, keys.shape[-1] - 2 * half], dim=-1)
            return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), dim=-1)

        return rotate

    def flops(self, rows: int, pairs: int) -> int:
        """Floating point operations of a pass through the layers: linear part and attention."""
        linear, attention = 2 * self.layer_params, 4 * self.layout.layers * self.heads * self.layout.head_dim
        return linear * rows + attention * pairs

    def _enter(self, ids: Tensor, rows: QueryRows) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        hidden = self._decoder.embed_tokens(ids.to(self.device)[None])
        return hidden, self._decoder.rotary_emb(hidden, rows.positions[None])

    @staticmethod
    def _leave_early(layer: Any, hidden: Tensor, angles: tuple[Tensor, Tensor], step: Step) -> None:
        try:
            layer(hidden, position_embeddings=angles, cache=step, step=step)
        except _Enough:
            return
        raise AssertionError("the layer did not ask its cache or the attention function")


def check_supported(config: Any) -> None:
    """Raises UnsupportedModel unless reuse is proven for the configuration."""
    family = getattr(config, "model_type", "?")
    if family not in FAMILIES:
        raise UnsupportedModel(f"model family {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise UnsupportedModel(f"RoPE type {rope!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise UnsupportedModel(f"layers of type {sorted(kinds - {'full_attention'})} are not supported")


def resolve_device(device: str) -> torch.device:
    """`auto`: CUDA when there is one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(device)


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """`auto`: bfloat16 where the device computes it in hardware, float32 elsewhere (software bf16 is far slower)."""
    if dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    fast = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def convert_gguf(gguf: Path, folder: Path, dtype: torch.dtype) -> None:
    """Dequantises a GGUF file once and writes safetensors and tokenizer to `folder`.

    The dtype should be the one the weights are used in: then loading maps the file and copies nothing.
    """
    options = {"gguf_file": gguf.name, "trust_remote_code": False}
    module = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=dtype, quantization_config=GgufConfig(dequantize=True), **options
    )
    module.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)


def fingerprint(folder: Path, config: Any, dtype: torch.dtype) -> str:
    """Digest of everything about the model that changes KV numbers or token ids."""
    weights = sorted(folder.glob("*.safetensors"))
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(_file_digest, weights))
    rope = json.dumps(getattr(config, "rope_parameters", None), sort_keys=True)
    return digest_fields("model", *digests, str(dtype), rope, config.model_type, ATTENTION, tokenizer_digest(folder))


def tokenizer_digest(folder: Path) -> str:
    """Digest of the tokenizer's own files."""
    names = ("tokenizer.json", "tokenizer_config.json")
    return digest_fields("tokenizer", *(_file_digest(folder / n) for n in names if (folder / n).exists()))


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _eos_ids(module: Any) -> frozenset[int]:
    found: set[int] = set()
    for config in (module.config, module.generation_config):
        value = getattr(config, "eos_token_id", None)
        found.update([value] if isinstance(value, int) else value or [])
    return frozenset(found)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own progress bar."""
    bars: Any = transformers.utils.logging
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer alone."""
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def encode_text(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids and their character offsets. Text never becomes a special token, whatever it spells."""
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)
    return encoded.input_ids, encoded.offset_mapping


def text_decoder(tokenizer: Any) -> Callable[[int], str]:
    """A function that takes tokens one by one and returns the text each completes:

    whole characters, no special tokens.
    """
    stream = DecodeStream(skip_special_tokens=True)

    def decode(token: int) -> str:
        return stream.step(tokenizer.backend_tokenizer, token) or ""

    return decode


def token_tensor(ids: Sequence[int]) -> Tensor:
    """int64 [len(ids)] on the CPU."""
    return torch.tensor(ids, dtype=torch.int64)
