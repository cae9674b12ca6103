from __future__ import annotations

import json
import shutil
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    DeepseekV3Config,
    Gemma3Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3NextConfig,
    T5Config,
)

from cache_store.base import Chunk
from cache_store.keys import key_space
from engine.attention import _partial_reference
from engine.base import Finished, GenerateRequest, Part, Prefilled, Sampling, Token
from engine.model import (
    Model,
    check_supported,
    fingerprint,
    load_model,
    resolve_dtype,
    text_decoder,
    text_encoder,
    tokenizer_digest,
)
from engine.plain import PlainModel
from engine.strategies import SERVED, STRATEGIES, cacheblend, kvshare, prophetkv
from engine.strategies.base import top_tokens
from errors import NumericalFault, UnsupportedModel
from tests.tiny import FAMILIES, Bench, plain_module, tiny_model


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (GPT2Config(), "gpt2"),
        (DeepseekV3Config(), "'deepseek_v3' .multi-head latent attention."),
        (T5Config(), "'t5' .encoder-decoder."),
        (Qwen3NextConfig(), "'qwen3_next' .hybrid with linear attention."),
        (MambaConfig(), "'mamba' .state space model."),
        (Gemma3Config(), "'gemma3'"),
        (
            Phi3Config(
                pad_token_id=0,
                original_max_position_embeddings=4096,
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                    "short_factor": [1.0] * 48,
                    "long_factor": [1.0] * 48,
                },
            ),
            "longrope",
        ),
        (LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), "dynamic"),
        (Qwen2Config(layer_types=["chunked_attention"] * 32), "chunked_attention"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "bidirectional"),
    ],
)
def test_what_is_not_proven_is_refused_by_name(config: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        check_supported(config)


def test_the_fingerprint_follows_everything_that_changes_numbers(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = AutoConfig.from_pretrained(folder)
    seen = {fingerprint(folder, config, torch.float32)}
    seen.add(fingerprint(folder, config, torch.bfloat16))
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    seen.add(fingerprint(folder, config, torch.float32))
    config = AutoConfig.from_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    seen.add(fingerprint(folder, config, torch.float32))
    before = tokenizer_digest(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_digest(folder) != before
    seen.add(fingerprint(folder, config, torch.float32))
    assert len(seen) == 5
    spaces = {
        key_space(*fields) for fields in (("f", (1, 2), "t", "raw"), ("f", (1,), "t", "raw"), ("f", (1, 2), "u", "raw"))
    }
    assert len(spaces) == 3


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"rms_norm_eps": 1e-5}),
        ("gemma2", {"hidden_activation": "silu"}),
        ("gemma2", {"sliding_window": 47}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}),
        ("gemma2", {"attn_logit_softcapping": 4.0}),
        ("gemma2", {"query_pre_attn_scalar": 17}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        ("llama", {"hidden_act": "gelu"}),
    ],
)
def test_the_fingerprint_follows_the_configuration(tiny_folder: Path, family: str, change: dict[str, Any]) -> None:
    changed = deepcopy(FAMILIES[family])
    for name, value in change.items():
        assert getattr(changed, name) != value
        setattr(changed, name, value)
    assert fingerprint(tiny_folder, FAMILIES[family], torch.float32) != fingerprint(tiny_folder, changed, torch.float32)


def test_the_fingerprint_of_the_same_model_is_the_same_wherever_it_lies(tiny_folder: Path, tmp_path: Path) -> None:
    folder = _altered(tiny_folder, tmp_path, transformers_version="5.0.0", architectures=None, dtype="bfloat16")
    found = {Model.load(each, "cpu", "float32").fingerprint for each in (tiny_folder, tiny_folder, folder)}
    assert len(found) == 1


def test_text_never_becomes_a_special_token(smollm: Path) -> None:
    tokenizer = Model.load(smollm, "cpu", "float32").tokenizer
    ids, offsets = text_encoder(tokenizer)("a <|im_end|> b")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") not in ids
    assert [offsets[0][0], offsets[-1][1]] == [0, 14]


def test_the_decoder_gives_whole_characters(smollm: Path) -> None:
    tokenizer = Model.load(smollm, "cpu", "float32").tokenizer
    text = "naïve 🙂 漢字 <ok>"
    ids, _ = text_encoder(tokenizer)(text)
    decode = text_decoder(tokenizer)
    pieces = [decode(token) for token in ids]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert "" in pieces  # some character took more than one token


def test_dtype_auto_is_bf16_only_where_the_cpu_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for amx, avx512, expected in (
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
        (False, False, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda avx512=avx512: avx512)
        assert resolve_dtype("auto", torch.device("cpu")) == expected
    assert resolve_dtype("float16", torch.device("cpu")) == torch.float16


def test_the_reference_attention_equals_the_cpu_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path for devices without the CPU kernel, whole strategies through it."""
    bench = Bench(tiny_model(FAMILIES["qwen3"]))
    expected = {name: bench.logits(name, 0.3) for name in ("full", "naive", "prophetkv")}
    monkeypatch.setattr("engine.attention._partial", _partial_reference)
    for name, logits in expected.items():
        assert float((bench.logits(name, 0.3) - logits).abs().max()) < 1e-3


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bf16_stays_near_fp32(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every strategy, with the selection held fixed: within a few percent of the largest logit."""
    exact = Bench(tiny_model(FAMILIES[family]), lengths=(20, 30))
    half = Bench(tiny_model(FAMILIES[family], dtype=torch.bfloat16), lengths=(20, 30))
    selections: list[Tensor] = []

    def select(scores: Tensor, count: int) -> Tensor:
        selections.append(top_tokens(scores, count))
        return selections[-1]

    def select_the_same(scores: Tensor, count: int) -> Tensor:
        return selections.pop(0)

    for name in SERVED:
        for chosen in (prophetkv, cacheblend, kvshare):
            monkeypatch.setattr(chosen, "top_tokens", select)
        expected = exact.logits(name, 0.3)
        for chosen in (prophetkv, cacheblend, kvshare):
            monkeypatch.setattr(chosen, "top_tokens", select_the_same)
        assert float((half.logits(name, 0.3) - expected).abs().max()) < 0.08 * float(expected.abs().max()), name
        assert not selections


def test_a_model_of_another_family_runs_as_transformers_runs_it(gpt2_folder: Path) -> None:
    model = load_model(gpt2_folder, "cpu", "float32")
    assert isinstance(model, PlainModel)
    assert "gpt2" in model.refused
    parts = (Part((5,), Chunk("0" * 64, (6, 7, 8))),)
    request = GenerateRequest("x", (1, 2), parts, (9, 10), STRATEGIES["full"](), Sampling(max_tokens=8))
    events = [event for event in model.generate(request) if event is not None]
    first, *tokens, last = events
    assert isinstance(first, Prefilled)
    assert (first.usage.strategy, first.usage.prompt_tokens, first.usage.context_tokens) == ("full", 8, 3)
    plain: Any = AutoModelForCausalLM.from_pretrained(gpt2_folder, dtype=torch.float32)
    expected = plain.generate(torch.tensor([[1, 2, 5, 6, 7, 8, 9, 10]]), max_new_tokens=8, do_sample=False)[0, 8:]
    assert [event.id for event in tokens if isinstance(event, Token)] == expected.tolist()
    assert last == Finished("length")


def test_a_plain_model_that_overflows_fails_the_request(gpt2_folder: Path) -> None:
    model = load_model(gpt2_folder, "cpu", "float32")
    assert isinstance(model, PlainModel)
    model._module.transformer.ln_f.bias.data[0] = float("nan")
    request = GenerateRequest("x", (1, 2), (), (9, 10), STRATEGIES["full"](), Sampling(max_tokens=8))
    with pytest.raises(NumericalFault, match="NaN or infinite logits"):
        list(model.generate(request))


def test_what_is_no_causal_model_is_refused(tmp_path: Path) -> None:
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"'t5' .encoder-decoder.* nor can it be served plainly"):
        load_model(tmp_path)


def test_an_encoder_decoder_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    """transformers loads its decoder as a causal model, and makes up the output layer."""
    folder = _altered(tiny_folder, tmp_path)
    size: dict[str, Any] = {"d_model": 16, "vocab_size": AutoConfig.from_pretrained(folder).vocab_size}
    for side in ("encoder", "decoder"):
        size |= {f"{side}_layers": 1, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 16}
    BartForConditionalGeneration(BartConfig(**size)).save_pretrained(folder)
    with pytest.raises(UnsupportedModel, match=r"'bart' .encoder-decoder.* nor can it be served plainly"):
        load_model(folder, "cpu", "float32")


@pytest.mark.parametrize(
    ("fixture", "name"),
    [("tiny_folder", "model.layers.1.mlp.down_proj.weight"), ("gpt2_folder", "transformer.h.1.mlp.c_fc.weight")],
)
def test_weights_that_are_not_whole_are_refused_by_name(
    fixture: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """transformers warns, and makes up what is not there."""
    folder = _altered(request.getfixturevalue(fixture), tmp_path)
    weights = load_file(folder / "model.safetensors")
    whole = weights.pop(name)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"the weights in .* lack: {name}; fetch them again"):
        load_model(folder, "cpu", "float32")
    save_file(weights | {name: whole[:3].clone()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"the weights in .* have in other shapes: {name}; fetch them again"):
        load_model(folder, "cpu", "float32")


def test_only_the_first_of_many_missing_weights_are_named(tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"lack: model\.layers\.2\.[^,]*,[^,]*,[^,]* and 6 more; fetch"):
        load_model(_altered(tiny_folder, tmp_path, num_hidden_layers=3), "cpu", "float32")


_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rope_parameters": _LLAMA3}, "'llama3': {'factor'}"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn': {'factor'}"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}}, "RoPE's factor is 0.0"),
        ({"rope_parameters": {**_LLAMA3, "factor": 0.0}}, "RoPE's factor is 0.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": "10000"}}, "RoPE's rope_theta is '10000'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "RoPE's rope_theta is 0;"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1e4}}, "RoPE's rope_theta is -10000.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("inf")}}, "RoPE's rope_theta is inf"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "RoPE type 'spiral' is not supported.*; nor can it be served"),
        ({"rope_parameters": 3}, "rope_parameters"),
        ({"model_type": "nonesuch"}, "has model type `nonesuch`"),
        ({"model_type": None}, "describes no model that can be loaded"),
        ({"num_attention_heads": "4"}, "num_attention_heads"),
        ({"num_attention_heads": 0}, "describes no model that can be loaded"),
        ({"hidden_act": "nonesuch"}, "cannot be loaded: KeyError: 'nonesuch'"),
    ],
)
def test_a_bad_configuration_is_refused_with_its_reason(
    tiny_folder: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        load_model(_altered(tiny_folder, tmp_path, **change), "cpu", "float32")


def test_a_configuration_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnsupportedModel, match=r"config\.json in .* describes no model that can be loaded"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -1.0])
def test_frequencies_that_are_no_positive_numbers_are_refused(value: float) -> None:
    module = plain_module(FAMILIES["llama"], "prophetkv")
    module.model.rotary_emb.inv_freq[1] = value
    with pytest.raises(UnsupportedModel, match="finite and above 0"):
        Model(module, None, "x")


def _altered(model: Path, scratch: Path, **fields: Any) -> Path:
    """A copy of a model with other fields in its configuration."""
    folder = scratch / "altered"
    shutil.copytree(model, folder)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return folder


def test_frequencies_that_do_not_fit_are_refused() -> None:
    module = plain_module(FAMILIES["llama"], "prophetkv")
    module.model.rotary_emb.inv_freq = torch.ones(9)
    with pytest.raises(UnsupportedModel, match="rotary frequencies"):
        Model(module, None, "x")
