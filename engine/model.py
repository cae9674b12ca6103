"""The only module that touches transformers: loading, families, RoPE, the tokenizer.

The weights' own layers run one at a time (see forward.py); what differs between families is settled here: the kinds
of layers and their angles, soft caps, and which configurations are proven.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from cache_store.base import KVLayout
from cache_store.keys import digest_fields
from engine.attention import QueryRows
from engine.base import Work
from engine.forward import Angles, Step, attention
from engine.placing import turned
from engine.plain import PlainModel
from engine.slots import Slots
from errors import ModelError, UnsupportedModel

# Families and RoPE types for which the controls in tests/engine hold.
FAMILIES = ("gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# Signs in a configuration that say why its family is far from proven.
_UNPROVEN = {
    "is_encoder_decoder": " (encoder-decoder)",
    "kv_lora_rank": " (multi-head latent attention)",
    "linear_num_key_heads": " (hybrid with linear attention)",
    "mamba_d_state": " (hybrid with state space layers)",
    "state_size": " (state space model)",
}
ATTENTION = "split-lse-1"  # names the attention implementation in fingerprints; change it when its numbers change
# Fields of a configuration that no number follows: where it lies, who wrote it, what the weights were stored in.
_IDLE_FIELDS = ("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
_NAMED_WEIGHTS = 3  # of those that are wrong, in a message

AttentionInterface.register("prophetkv", attention)


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
        self._layers = list(module.model.layers)
        self._kinds = [getattr(layer.self_attn, "layer_type", None) or "" for layer in self._layers]
        # Gemma 3 turns its two kinds of layers by different angles; elsewhere one set of frequencies serves all.
        self._angles_by_kind = isinstance(module.model.rotary_emb, Gemma3RotaryEmbedding)
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._inv_freq = {kind: self._frequencies(kind) for kind in set(self._kinds)}
        if any(2 * len(frequencies) > head_dim for frequencies in self._inv_freq.values()):
            raise UnsupportedModel(
                "its rotary frequencies do not fit the heads: keys cannot be turned to new positions"
            )
        if not all(bool((freq.isfinite() & (freq > 0)).all()) for freq in self._inv_freq.values()):
            raise UnsupportedModel(
                "its rotary frequencies are not all finite and above 0: correct rope_parameters in its config.json"
            )
        self.layer_params: int = sum(p.numel() for p in self._layers[0].parameters())
        self.kv_params: int = 2 * self.layout.kv_heads * head_dim * config.hidden_size

    @classmethod
    def load(cls, folder: Path, device: str = "auto", dtype: str = "auto") -> Model:
        """Loads safetensors weights and the tokenizer from `folder`; nothing in it is executed.

        Raises UnsupportedModel for architectures, RoPE types or attention for which reuse is not proven, and for what
        cannot be loaded whole.
        """
        config = _read_config(folder)
        check_supported(config)
        with _explained(f"the model in {folder} cannot be loaded"):
            module = _load_module(folder, device, dtype, attn_implementation="prophetkv")
            return cls(module, load_tokenizer(folder), fingerprint(folder, config, module.dtype))

    @classmethod
    def random(cls, family: str, shape: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Model:
        """Random weights in the shapes of a configuration, made on the device, without a tokenizer: to measure with.

        `family`: a transformers model type; `shape`: its configuration's fields.
        """
        config = AutoConfig.for_model(family, **shape)
        build: Any = AutoModelForCausalLM.from_config
        with device:
            module = build(config, dtype=dtype, attn_implementation="prophetkv")
        return cls(module.eval(), None, "random")

    def new_slots(self, capacity: int) -> Slots:
        """Uninitialised slots for `capacity` positions."""
        layout = self.layout
        return Slots(layout.layers, layout.kv_heads, capacity, layout.head_dim, self.dtype, self.device)

    def rows(self, positions: Tensor) -> QueryRows:
        """The rows at `positions` (int64 on the CPU, strictly increasing), prepared for `forward`."""
        return QueryRows(positions, self.device, self.dtype)

    def embed(self, ids: Tensor, rows: QueryRows) -> tuple[Tensor, Angles]:
        """Hidden states [1, rows, hidden] of the tokens `ids` (int64 [rows]), and each kind of layer's cos and sin."""
        hidden = self._decoder.embed_tokens(ids.to(self.device)[None])
        positions, rotary = rows.positions[None], self._decoder.rotary_emb
        if self._angles_by_kind:
            return hidden, {kind: rotary(hidden, positions, kind) for kind in self._inv_freq}
        return hidden, dict.fromkeys(self._inv_freq, rotary(hidden, positions))

    def run_layer(self, layer: int, hidden: Tensor, angles: Angles, step: Step) -> Tensor:
        """One decoder layer over some rows' hidden states [1, rows, hidden]."""
        kind = self._kinds[layer]
        out: Tensor = self._layers[layer](hidden, position_embeddings=angles[kind], cache=step, step=step)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [..., vocab] of hidden states [..., hidden] behind the last layer."""
        logits: Tensor = self._module.lm_head(self._decoder.norm(hidden)).float()
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def plain_logits(self, ids: Tensor, attention: str = "sdpa") -> Tensor:
        """The transformers model itself, under SDPA or "eager": what `full` must equal and not trail.

        ids: int64 [tokens] or [batch, tokens]; returns the last row's logits, fp32 [vocab] or [batch, vocab].
        """
        # Gemma 2 caps its attention logits, which SDPA cannot.
        self._module.set_attn_implementation(attention if self._module._supports_sdpa else "eager")
        try:
            batch = ids.to(self.device).view(-1, ids.shape[-1])
            logits: Tensor = self._module(batch, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        finally:
            self._module.set_attn_implementation("prophetkv")
        return logits.view(*ids.shape[:-1], -1)

    def frequencies(self, layer: int) -> Tensor:
        """RoPE's inverse frequencies of a layer, fp32 [at most head_dim / 2], on the device."""
        return self._inv_freq[self._kinds[layer]]

    def rotation(self, positions: Tensor) -> Callable[[Tensor, int], Tensor]:
        """A function that turns a layer's keys [..., tokens, head_dim] by the angles of `positions` (int64 [tokens]).

        In fp32. Negative positions turn back. The raw inverse frequencies turn without scaling: the magnitude that
        YaRN puts on K stays in it, unchanged.
        """
        angles = self.angles(positions)
        return lambda keys, layer: turned(keys, *angles[self._kinds[layer]])

    def angles(self, positions: Tensor) -> Angles:
        """cos and sin of the angles of `positions` (int64 [tokens]), fp32 [tokens, at most head_dim / 2], by kind.

        By kind of layer, see `kind`.
        """
        at = positions[:, None].to(self.device).float()
        return {kind: (torch.cos(at * freq), torch.sin(at * freq)) for kind, freq in self._inv_freq.items()}

    def kind(self, layer: int) -> str:
        """What decides a layer's angles."""
        return self._kinds[layer]

    def flops(self, work: Work) -> int:
        """Floating point operations of passes through the layers: linear part, attention, and Stage I's second QK^T."""
        linear = self.layer_params * work.rows + self.kv_params * work.kv_rows
        return 2 * linear + 2 * self.heads * self.layout.head_dim * (2 * work.pairs + work.scored)

    def full_work(self, prompt: int) -> Work:
        """What a full prefill of `prompt` tokens does."""
        work = Work()
        work.add(prompt, prompt * (prompt + 1) // 2, causal=True, layers=self.layout.layers - 1)
        work.add_kv(prompt)
        work.add(1, prompt)
        return work

    def _frequencies(self, kind: str) -> Tensor:
        rotary = self._decoder.rotary_emb
        found: Tensor = getattr(rotary, f"{kind}_inv_freq") if self._angles_by_kind else rotary.inv_freq
        return found.float()


def load_model(folder: Path, device: str = "auto", dtype: str = "auto") -> Model | PlainModel:
    """The model, for reuse where that is proven, else as transformers runs it.

    Raises UnsupportedModel for what is no causal language model or cannot be loaded whole, with the reason.
    """
    config = _read_config(folder)
    try:
        check_supported(config)
    except UnsupportedModel as refused:
        plainly = f"{refused}; nor can it be served plainly"
        if getattr(config, "is_encoder_decoder", False):
            # transformers would load the decoder alone, which says nothing without an encoder's output.
            raise UnsupportedModel(f"{plainly}: an encoder-decoder is no causal language model") from refused
        with _explained(plainly):
            module = _load_module(folder, device, dtype)
            digest = fingerprint(folder, config, module.dtype)
            return PlainModel(module, load_tokenizer(folder), digest, _eos_ids(module), str(refused))
    return Model.load(folder, device, dtype)


def _read_config(folder: Path) -> Any:
    """Raises UnsupportedModel for a configuration that transformers refuses, or whose RoPE is none."""
    with _explained(f"config.json in {folder} describes no model that can be loaded"):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        ropes = _rope_parameters(config)
    for rope in ropes:
        for name in ("rope_theta", "factor"):
            value = rope.get(name, 1.0)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise UnsupportedModel(f"config.json in {folder}: RoPE's {name} is {value!r}; give a number above 0")
    return config


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raises UnsupportedModel with what transformers has to say: errors of any type, some of them a bare word."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise UnsupportedModel(f"{what}: {type(error).__name__}: {said}") from error


def _load_module(folder: Path, device: str, dtype: str, **options: Any) -> Any:
    """Raises UnsupportedModel unless the folder holds every weight: transformers makes up those that are not there."""
    target = resolve_device(device)
    kind = resolve_dtype(dtype, target)
    read: Any = AutoModelForCausalLM.from_pretrained
    with _quiet():
        module, info = read(
            folder,
            dtype=kind,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            **options,
        )
    wrong = {"lack": info["missing_keys"], "have in other shapes": {name for name, *_ in info["mismatched_keys"]}}
    for how, names in wrong.items():
        if names:
            raise UnsupportedModel(
                f"the weights in {folder} {how}: {_named(sorted(names))}; fetch them again, or correct its config.json"
            )
    return module.to(target).eval()


def _named(names: Sequence[str]) -> str:
    """The first few names, and how many there are besides."""
    more = len(names) - _NAMED_WEIGHTS
    return ", ".join(names[:_NAMED_WEIGHTS]) + (f" and {more} more" if more > 0 else "")


def check_supported(config: Any) -> None:
    """Raises UnsupportedModel, naming the reason, unless reuse is proven for the configuration."""
    family = getattr(config, "model_type", "?")
    if family not in FAMILIES:
        kind = next((kind for sign, kind in _UNPROVEN.items() if getattr(config, sign, None)), "")
        raise UnsupportedModel(f"model family {family!r}{kind} is not supported; supported are {', '.join(FAMILIES)}")
    for rope in {rope.get("rope_type", "default") for rope in _rope_parameters(config)}:
        if rope not in ROPE_TYPES:
            raise UnsupportedModel(f"RoPE type {rope!r} is not supported; supported are {', '.join(ROPE_TYPES)}")
    unknown = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if unknown:
        raise UnsupportedModel(f"layers of type {', '.join(sorted(unknown))} are not supported")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel("bidirectional attention is not supported")


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Of all kinds of layers. Gemma 3 states its parameters by kind."""
    stated = getattr(config, "rope_parameters", None) or {}
    return [value for value in stated.values() if isinstance(value, dict)] or [stated]


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
    # Every other field: which of them a family computes with, transformers alone knows.
    fields = {name: value for name, value in config.to_dict().items() if name not in _IDLE_FIELDS}
    shape = json.dumps(fields, sort_keys=True)
    return digest_fields("model", *digests, str(dtype), shape, ATTENTION, tokenizer_digest(folder))


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


def text_encoder(tokenizer: Any) -> Callable[[str], tuple[list[int], list[tuple[int, int]]]]:
    """A function that gives a text's token ids and their character offsets, from any thread.

    Text never becomes a special token, whatever it spells. A copy of the tokenizer does this alone, for in transformers
    that choice is a switch on the shared object, which another thread may turn.
    """
    own = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    own.no_truncation()
    own.no_padding()
    own.encode_special_tokens = True

    def encode(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = own.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    return encode


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
