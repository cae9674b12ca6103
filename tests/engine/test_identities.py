"""The controls of every family: what must be equal is equal, what must differ differs by ten tolerances and more."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cache_store.base import Chunk
from engine.attention import QueryRows, add_column_sums, attend
from engine.base import GenerateRequest, Part, Sampling, Token
from engine.encode import PrefixCache, encode_chunk
from engine.generate import generate
from engine.model import Model, token_tensor
from engine.prefill import Prefill
from engine.strategies import STRATEGIES
from tests.tiny import FAMILIES, Bench, draw, plain_module, run, tiny_model

TOLERANCE = 1e-3
SDPA = {"gemma2": "eager"}  # transformers has no SDPA for capped logits


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


def greedy(bench: Bench, strategy: str, ratio: float, count: int = 12) -> list[int]:
    steps = generate(bench.model, bench, bench.prefixes, bench.request(strategy, ratio, max_tokens=count))
    return [event.id for event in steps if isinstance(event, Token)]


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_full_equals_the_plain_model(family: str) -> None:
    bench = Bench(tiny_model(FAMILIES[family]))
    prefill = bench.prefill("full")
    found = bench.run(prefill)
    plain = plain_module(FAMILIES[family], SDPA.get(family, "sdpa"))
    expected = plain(prefill.layout.ids[None]).logits[0, -1]
    assert float(expected.abs().max()) > 5
    assert error(found, expected) < 1e-4
    assert error(bench.model.plain_logits(prefill.layout.ids), expected) < 1e-4
    assert error(bench.logits("full"), found) == 0.0


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_greedy_decoding_equals_the_plain_model(family: str) -> None:
    bench = Bench(tiny_model(FAMILIES[family]))
    ids = bench.prefill("full").layout.ids[None]
    plain = plain_module(FAMILIES[family], SDPA.get(family, "sdpa"))
    expected = []
    for _ in range(12):
        token = int(plain(ids).logits[0, -1].argmax())
        expected.append(token)
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)
    assert greedy(bench, "full", 1.0) == expected


def test_ratio_one_equals_full(bench: Bench) -> None:
    assert error(bench.logits("prophetkv", 1.0), bench.logits("full")) < TOLERANCE
    assert greedy(bench, "prophetkv", 1.0) == greedy(bench, "full", 1.0)


def test_ratio_zero_equals_naive_and_naive_is_not_full(bench: Bench) -> None:
    naive = bench.logits("naive")
    assert error(bench.logits("prophetkv", 0.0), naive) == 0.0
    assert greedy(bench, "prophetkv", 0.0) == greedy(bench, "naive", 0.0)
    assert error(naive, bench.logits("full")) > 10 * TOLERANCE


def test_an_exact_first_chunk_needs_no_recomputation(bench: Bench) -> None:
    """Directly behind the prefix a chunk saw all that it sees in the prompt: there naive reuse is the full prefill."""
    bench.parts = (replace(bench.parts[3], glue=()),)
    assert error(bench.logits("naive"), bench.logits("full")) < TOLERANCE


def test_one_stale_slot_changes_the_logits(bench: Bench) -> None:
    """All tokens are recomputed but one in a chunk that naive reuse gets wrong."""
    prefill = bench.prefill("prophetkv", 1.0)
    run(prefill.assemble())
    rows = torch.arange(len(bench.prefix), len(prefill.layout))
    stale = prefill.layout.chunk_starts[4]
    found = run(prefill.start(rows[rows != stale]).finish())
    assert error(found, bench.logits("full")) > 10 * TOLERANCE


def test_causality_by_compacted_rows_would_be_wrong(bench: Bench) -> None:
    """The bug of two well-known systems: `is_causal` on the selected rows, as if they were neighbours."""
    prefill = bench.prefill("prophetkv", 0.3)
    run(prefill.assemble())
    rows = torch.cat((prefill.layout.context[::3], prefill.layout.fresh)).sort().values
    right = run(prefill.start(rows).finish())
    prepared, count = bench.model.rows(rows), len(rows)
    # Bottom-right aligned causal mask: row i of `count` sees the first visible - count + i + 1 slots.
    wrong = QueryRows(torch.arange(prepared.visible - count, prepared.visible), bench.model.device, torch.float32)
    started = prefill.start(rows)
    started.rows.blocks = wrong.blocks  # type: ignore[method-assign]
    found = run(started.finish())
    assert error(found, right) > 10 * TOLERANCE


def test_a_later_chunk_does_not_leak_into_an_earlier_one(bench: Bench) -> None:
    """With the selection held fixed, another token in the last chunk leaves the recomputed K and V before it alone."""

    def recomputed(parts: tuple[Part, ...]) -> tuple[Tensor, Tensor]:
        bench.parts = parts
        prefill = bench.prefill("prophetkv", 0.3)
        run(prefill.assemble())
        rows = torch.cat((prefill.layout.context[::2], prefill.layout.fresh)).sort().values
        run(prefill.start(rows).finish())
        border = prefill.layout.chunk_starts[3]
        return prefill.slots.data[:, :, :, :border], prefill.slots.data[:, :, :, border : len(prefill.layout)]

    parts = bench.parts
    changed = list(parts[3].chunk.token_ids)
    changed[0] = (changed[0] + 1) % bench.model.vocab_size
    before, behind = recomputed(parts)
    other = replace(parts[3], chunk=Chunk("f" * 64, tuple(changed)))
    before_changed, behind_changed = recomputed((*parts[:3], other, *parts[4:]))
    assert torch.equal(before, before_changed)
    assert error(behind, behind_changed) > 10 * TOLERANCE


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("shift", [1, 200, 1500])
def test_rotation_equals_direct_encoding(family: str, shift: int) -> None:
    """A chunk encoded at 0 and turned by d has the keys of the same chunk encoded at d, YaRN's magnitude included."""
    model = tiny_model(FAMILIES[family])
    chunk = Chunk("0" * 64, draw(64, 5))
    kept = run(encode_chunk(model, PrefixCache(model), (), chunk))
    positions = torch.arange(shift, shift + 64)
    plain = plain_module(FAMILIES[family], SDPA.get(family, "sdpa"))
    direct = plain(token_tensor(chunk.token_ids)[None], position_ids=positions[None], use_cache=True).cache
    turn = model.rotation(positions)
    for layer in range(kept.layout.layers):
        kv = kept.layer(layer)
        keys, values = direct.layers[layer].keys[0], direct.layers[layer].values[0]
        held = slice(64 - keys.shape[1], 64)  # of a sliding layer transformers keeps no more than the window
        assert error(turn(kv[0], layer)[:, held], keys) < TOLERANCE
        assert error(kv[1][:, held], values) < TOLERANCE
        assert error(kv[0][:, held], keys) > 10 * TOLERANCE


def test_stage_one_scores_equal_dense_attention_weights(bench: Bench) -> None:
    """Behind the prefix alone the KV is exact, so Stage I must see the weights of the plain model's eager attention."""
    bench.parts = (replace(bench.parts[3], glue=()),)
    prefill = bench.prefill("prophetkv")
    run(prefill.assemble())
    found = run(prefill.probe(range(bench.model.layout.layers), prefill.layout.suffix))
    plain = plain_module(bench.model._decoder.config, "eager")
    weights = plain(prefill.layout.ids[None], output_attentions=True).attentions
    context = slice(len(bench.prefix), prefill.layout.suffix_start)
    suffix = [layer[0, :, prefill.layout.suffix_start :, context].sum(1).mean(0) for layer in weights]
    assert error(found, torch.stack(suffix).mean(0)) < 1e-5


def test_a_single_chunk_of_one_token_and_no_chunk_at_all(bench: Bench) -> None:
    bench.parts = (bench.parts[4],)
    assert error(bench.logits("prophetkv", 0.2), bench.logits("full")) < TOLERANCE
    bench.parts = ()
    assert error(bench.logits("prophetkv", 0.2), bench.logits("full")) < TOLERANCE
    assert error(bench.logits("naive"), bench.logits("full")) < TOLERANCE


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("group", range(1, 9))
def test_gqa_groups(group: int, kv_heads: int) -> None:
    heads = group * kv_heads
    shape = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 16 * heads}
    bench = Bench(tiny_model(FAMILIES["llama"].__class__(**{**FAMILIES["llama"].to_dict(), **shape, "head_dim": 16})))
    assert error(bench.logits("prophetkv", 1.0), bench.logits("full")) < TOLERANCE
    assert error(bench.logits("prophetkv", 0.0), bench.logits("naive")) < TOLERANCE


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 257, 2300])
def test_prompt_lengths_across_block_borders(llama: Bench, length: int) -> None:
    bench = Bench(llama.model, lengths=(length,), prefix=5, glue=2, suffix=3)
    assert error(bench.logits("prophetkv", 1.0), bench.logits("full")) < TOLERANCE


def test_real_weights_ratio_one_equals_full(smollm: Path) -> None:
    """SmolLM2-135M in fp32, 700 context tokens of text."""
    model = Model.load(smollm, "cpu", "float32")
    text = "The harbour log of the ninth of May names three boats and the tide tables for the week. " * 50
    ids = model.tokenizer(text, add_special_tokens=False).input_ids
    cuts = (0, 210, 300, 700)
    chunks = [Chunk(f"{i:064x}", tuple(ids[a:b])) for i, (a, b) in enumerate(pairwise(cuts))]
    glue = tuple(model.tokenizer("\n\n", add_special_tokens=False).input_ids)
    bench = Bench(model, lengths=())
    bench.prefix, bench.suffix = tuple(ids[:20]), tuple(ids[700:720])
    bench.parts = tuple(Part(glue, chunk) for chunk in chunks)
    full, naive = bench.logits("full"), bench.logits("naive")
    assert error(bench.logits("prophetkv", 1.0), full) < TOLERANCE
    assert error(bench.logits("prophetkv", 0.0), naive) < TOLERANCE
    assert error(naive, full) > 10 * TOLERANCE
    assert greedy(bench, "prophetkv", 1.0) == greedy(bench, "full", 1.0)


def test_prefill_of_a_foreign_order_reuses_the_same_entries(llama: Bench) -> None:
    """The point of it all: chunks in another order, no new encoding, and at ratio 1 still the full prefill."""
    llama.logits("naive")
    encoded = dict(llama.encoded)
    llama.parts = llama.parts[::-1]
    assert error(llama.logits("prophetkv", 1.0), llama.logits("full")) < TOLERANCE
    assert llama.encoded == encoded


def test_request_does_not_change_stored_tensors(llama: Bench) -> None:
    llama.logits("naive")
    before = {key: kv.body.clone() for key, kv in llama.encoded.items()}
    llama.logits("prophetkv", 0.5)
    assert all(torch.equal(body, llama.encoded[key].body) for key, body in before.items())


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("group", range(1, 9))
def test_attend_refuses_nothing_but_future_keys(group: int, window: int | None) -> None:
    """And the column sums, against a dense fp64 reference, for scattered rows with gaps, runs and block borders."""
    generator = torch.Generator().manual_seed(0)
    keys, kv_heads, width = 1500, 2, 8
    heads = group * kv_heads
    key, value = (torch.randn(1, kv_heads, keys, width, generator=generator) for _ in range(2))
    positions = torch.randperm(keys, generator=generator)[:350].sort().values
    positions[-64:] = torch.arange(keys - 64, keys)
    positions = torch.unique(positions)
    query = torch.randn(1, heads, len(positions), width, generator=generator) * 3
    rows = QueryRows(positions, torch.device("cpu"), torch.float32)
    out, lse = attend(query, key, value, rows, 0.3, window)
    sums = torch.zeros(kv_heads, keys - 200)
    add_column_sums(query, key, lse, rows, 0.3, sums, window)
    logits = query.double() @ key.double().repeat_interleave(group, 1).transpose(2, 3) * 0.3
    slots = torch.arange(keys)
    logits.masked_fill_(slots > positions[:, None], float("-inf"))
    if window is not None:
        logits.masked_fill_(slots <= positions[:, None] - window, float("-inf"))
    weights = logits.softmax(-1)
    assert error(lse.double(), torch.logsumexp(logits, -1)) < 1e-5
    assert error(out.double(), weights @ value.double().repeat_interleave(group, 1)) < 1e-5
    assert error(sums.double(), weights[0].view(kv_heads, -1, keys).sum(1)[:, : keys - 200]) < 1e-4


def test_sampling_parameters_are_bounded_by_the_request() -> None:
    request = GenerateRequest("x", (1,), (), (2,), STRATEGIES["full"](), Sampling(max_tokens=3))
    bench = Bench(tiny_model(FAMILIES["llama"]))
    prefill = Prefill(bench.model, bench, bench.prefixes, request)
    assert prefill.slots.capacity == request.prompt_tokens + 3
