"""Every strategy on every family: its ends are exact, its selection is what its paper says, nothing leaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from cache_store.base import Chunk
from engine.base import Finished, Prefilled, Token
from engine.encode import PrefixCache
from engine.generate import generate
from engine.strategies import SERVED, STRATEGIES, make_strategy
from engine.strategies.auto import Auto
from engine.strategies.cacheblend import CacheBlend
from engine.strategies.oracle import Factor, importance
from engine.strategies.prophetkv import smoothed
from errors import InvalidInput, NumericalFault, UnknownStrategy
from tests.engine.dense import DenseLlama, prophetkv
from tests.tiny import FAMILIES, Bench, plain_module, run, tiny_model

TOLERANCE = 1e-3
REUSING = sorted(name for name, kind in STRATEGIES.items() if kind.reuses and kind is not Auto)
PARTIAL = sorted(set(REUSING) - {"naive"})
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "prophetkv": [
        {},
        {"score_layers": "first_half"},
        {"score_layers": [2, 0]},
        {"score_rows": "question"},
        {"score_rows": "last"},
        {"smooth": 7},
    ],
    "cacheblend": [{}, {"criterion": "k_l2"}, {"criterion": "k_l1"}],
    "oracle": [{"factor": factor} for factor in ("ideal", "delta_phi", "phi", "v", "delta_v", "cacheblend", "kvshare")],
}
CASES = [(name, options) for name in PARTIAL for options in VARIANTS.get(name, [{}])]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@pytest.mark.parametrize("name", PARTIAL)
def test_the_ends_are_naive_and_full(bench: Bench, name: str) -> None:
    full, naive = bench.logits("full"), bench.logits("naive")
    assert error(bench.logits(name, 0.0), naive) < 1e-4
    assert error(bench.logits(name, 1.0), full) < TOLERANCE
    assert error(naive, full) > 10 * TOLERANCE


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_part_is_recomputed_and_lies_between(llama: Bench, name: str, options: dict[str, Any]) -> None:
    prefill = llama.prefill(name, 0.3, **options)
    found = llama.run(prefill)
    count = int(0.3 * 257)
    if name == "epic":
        count = sum(int(0.3 * length + 0.5) for length in prefill.layout.chunk_lengths)
    assert prefill.usage.recomputed_tokens == len(prefill.selected) == count
    assert prefill.selected.tolist() == sorted(set(prefill.selected.tolist()))
    assert error(found, llama.logits("naive")) > 10 * TOLERANCE
    assert error(found, llama.logits("full")) > 10 * TOLERANCE


@pytest.mark.parametrize("name", PARTIAL)
def test_a_later_token_leaves_what_was_recomputed_before_it_alone(
    bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The selection held fixed, another token in chunk 3 changes no K or V before that chunk, and some behind it."""

    def fixed(scores: Tensor, count: int) -> Tensor:
        return torch.arange(0, len(scores), max(1, len(scores) // count))[:count]

    for kind in STRATEGIES.values():
        monkeypatch.setattr(f"{kind.__module__}.top_tokens", fixed, raising=False)

    def slots(changed: bool) -> Tensor:
        parts = list(bench.parts)
        if changed:
            tokens = list(parts[3].chunk.token_ids)
            tokens[0] = (tokens[0] + 1) % bench.model.vocab_size
            parts[3] = replace(parts[3], chunk=Chunk("f" * 64, tuple(tokens)))
        kept, bench.parts = bench.parts, tuple(parts)
        prefill = bench.prefill(name, 0.4)
        bench.run(prefill)
        bench.parts = kept
        return prefill.slots.data[:, :, :, : len(prefill.layout)]

    border = bench.prefill().layout.chunk_starts[3]
    before, after = slots(False), slots(True)
    assert torch.equal(before[:, :, :, :border], after[:, :, :, :border])
    assert error(before[:, :, :, border:], after[:, :, :, border:]) > 10 * TOLERANCE


def test_prophetkv_against_the_dense_reference_in_fp64() -> None:
    """Scores, selection and Stage II, from weights to logits, to 1e-6 of their size."""
    config = FAMILIES["llama"].__class__(**{**FAMILIES["llama"].to_dict(), "num_hidden_layers": 2})
    module = plain_module(config, "prophetkv")
    expected_model = DenseLlama(module)
    model = tiny_model(config, dtype=torch.float64)
    bench = Bench(model, lengths=(37, 5, 64, 30))
    prefill = bench.prefill("prophetkv", 0.25)
    run(prefill.assemble())
    scores = run(prefill.probe(range(2), prefill.layout.suffix))
    logits = bench.logits("prophetkv", 0.25)
    parts = [(list(part.glue), list(part.chunk.token_ids)) for part in bench.parts]
    budget = int(0.25 * 136)
    wanted_scores, wanted, wanted_logits = prophetkv(
        expected_model, list(bench.prefix), parts, list(bench.suffix), budget
    )
    prefill = bench.prefill("prophetkv", 0.25)
    bench.run(prefill)
    assert torch.equal(prefill.selected, wanted)
    assert error(scores.double(), wanted_scores) < 1e-6
    assert error(logits.double(), wanted_logits) < 1e-6 * float(wanted_logits.abs().max())
    naive = bench.logits("naive").double()
    assert error(naive, wanted_logits) > 1e-2


# What each selects


def test_epic_takes_the_first_tokens_of_each_chunk(llama: Bench) -> None:
    prefill = llama.prefill("epic", k=4)
    llama.run(prefill)
    wanted = [start + i for start in (0, 37, 42, 106) for i in range(4)] + [256]
    assert prefill.selected.tolist() == wanted
    assert prefill.usage.ratio == len(wanted) / 257


def test_random_is_repeatable_by_seed(llama: Bench) -> None:
    def drawn(seed: int) -> list[int]:
        prefill = llama.prefill("random", seed=seed)
        llama.run(prefill)
        return prefill.selected.tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_cacheblend_selects_by_the_deviation_at_the_check_layer(llama: Bench) -> None:
    full = llama.prefill("full")
    llama.run(full)
    naive = llama.prefill("naive")
    llama.run(naive)
    for criterion, which, norm in (("v_l2", 1, 2), ("k_l2", 0, 2), ("k_l1", 0, 1)):
        change = (full.context_kv(1, which) - naive.context_kv(1, which)).abs().pow(norm).sum((0, 2))
        prefill = llama.prefill("cacheblend", 0.2, criterion=criterion)
        llama.run(prefill)
        assert set(prefill.selected.tolist()) == set(change.topk(51).indices.tolist())


def test_a_check_at_the_last_layer_is_the_full_prefill(llama: Bench) -> None:
    for name in ("cacheblend", "kvshare"):
        assert error(llama.logits(name, 0.2, check_layer=2), llama.logits("full")) < TOLERANCE


def test_cacheblend_narrows_gradually(llama: Bench) -> None:
    config = FAMILIES["llama"].__class__(**{**FAMILIES["llama"].to_dict(), "num_hidden_layers": 5})
    bench = Bench(tiny_model(config))
    prefill = bench.prefill("cacheblend", 0.2, gradual=True)
    bench.run(prefill)
    assert len(prefill.selected) == 51
    assert error(bench.logits("cacheblend", 1.0, gradual=True), bench.logits("full")) < TOLERANCE
    work, plain = prefill.usage.work, bench.prefill("cacheblend", 0.2)
    bench.run(plain)
    assert work.rows > plain.usage.work.rows
    with pytest.raises(ValueError, match="check_layer must be at most 0"):
        CacheBlend(gradual=True).check(3)


def test_kvshare_weighs_the_deviation_by_the_attention_received(llama: Bench) -> None:
    full = llama.prefill("full")
    llama.run(full)
    naive = llama.prefill("naive")
    llama.run(naive)
    plain = plain_module(llama.model._module.config, "eager")
    weights = plain(full.layout.ids[None], output_attentions=True).attentions[1][0]
    change = (full.context_kv(1, 1) - naive.context_kv(1, 1)).abs().sum((0, 2))
    scores = weights.sum((0, 1))[full.layout.context] * change
    prefill = llama.prefill("kvshare", 0.2)
    llama.run(prefill)
    assert set(prefill.selected.tolist()) == set(scores.topk(51).indices.tolist())


@pytest.mark.parametrize("factor", get_args(Factor))
def test_the_oracle_is_what_its_factor_says(llama: Bench, factor: Factor) -> None:
    """|phi V - phi' V'| of Eq. 5 and what else it knows, from the plain model's attention, layer by layer."""
    prefill = llama.prefill("oracle")
    run(prefill.assemble())
    found = run(importance(prefill, factor))
    full = llama.prefill("full")
    llama.run(full)
    plain = plain_module(llama.model._module.config, "eager")
    maps = plain(full.layout.ids[None], output_attentions=True).attentions
    context, suffix = full.layout.context, full.layout.suffix_start
    expected = torch.zeros(257)
    for layer in range(3):
        # Heads of a group share K and V: their weights add up.
        from_all, from_suffix = (
            maps[layer][0, :, first:, :].sum(1)[:, context].view(2, 2, -1).sum(1) for first in (0, suffix)
        )
        reused_phi = _reused_phi(llama, layer)
        exact, reused = full.context_kv(layer, 1), prefill.context_kv(layer, 1)
        change = exact - reused
        expected += {
            "ideal": (from_suffix[..., None] * exact - reused_phi[..., None] * reused).norm(dim=(0, 2)),
            "delta_phi": (from_suffix.sum(0) - reused_phi.sum(0)).abs(),
            "phi": reused_phi.sum(0),
            "v": reused.norm(dim=(0, 2)),
            "delta_v": change.norm(dim=(0, 2)),
            "cacheblend": change.norm(dim=(0, 2)).square(),
            "kvshare": from_all.sum(0) * change.abs().sum((0, 2)),
        }[factor] / 3
    assert error(found, expected) < 1e-4 * max(1.0, float(expected.max()))


def _reused_phi(bench: Bench, layer: int) -> Tensor:
    """fp32 [kv_heads, context] at a layer of Stage I."""
    prefill = bench.prefill("prophetkv")
    run(prefill.assemble())
    sums = torch.zeros(2, prefill.layout.suffix_start)
    started = prefill.start(prefill.layout.fresh)
    run(started.run(layer))
    started.score(prefill.scores_of(prefill.layout.suffix, prefill.layout.fresh, sums))
    return prefill.of_context(sums)


def test_prophetkv_scores_chosen_layers_and_rows(llama: Bench) -> None:
    prefill = llama.prefill("prophetkv")
    run(prefill.assemble())
    layout = prefill.layout

    def probe(layers: Any, rows: Tensor) -> Tensor:
        return run(prefill.probe(layers, rows))

    whole = probe(range(3), layout.suffix)
    one_by_one = [probe([layer], layout.suffix) for layer in range(3)]
    assert error(torch.stack(one_by_one).mean(0), whole) < 1e-6
    assert error(probe([0, 2], layout.suffix), (one_by_one[0] + one_by_one[2]) / 2) < 1e-6
    rows = [probe(range(3), layout.suffix[i : i + 1]) for i in range(len(layout.suffix))]
    assert error(torch.stack(rows).sum(0), whole) < 1e-5
    assert layout.question.tolist() == layout.suffix[2:6].tolist()

    def selected(**options: Any) -> list[int]:
        started = llama.prefill("prophetkv", 0.2, **options)
        llama.run(started)
        return started.selected.tolist()

    def top(scores: Tensor) -> list[int]:
        return sorted(scores.topk(51).indices.tolist())

    assert selected(score_rows="last") == top(rows[-1])
    assert selected(score_rows="question") == top(torch.stack(rows[2:6]).sum(0))
    assert selected(score_layers=[2, 0, 2]) == top(one_by_one[0] + one_by_one[2])
    assert selected(score_layers="first_half") == top(one_by_one[0] + one_by_one[1])


def test_smoothing_stays_within_a_chunk() -> None:
    scores = torch.tensor([3.0, 0.0, 0.0, 6.0, 9.0, 1.0])
    assert smoothed(scores, [3, 2, 1], 1).tolist() == scores.tolist()
    assert smoothed(scores, [3, 0, 2, 1], 3).tolist() == [1.5, 1.0, 0.0, 7.5, 7.5, 1.0]


# Prefix caching


def test_prefix_reuses_the_longest_shared_beginning_exactly(bench: Bench) -> None:
    first = bench.prefill("prefix")
    assert error(bench.run(first), bench.logits("full")) == 0.0
    assert first.usage.recomputed_tokens == 257
    # The same chunks up to the third, then another order.
    bench.parts = (*bench.parts[:3], bench.parts[4], bench.parts[3])
    second = bench.prefill("prefix")
    assert error(bench.run(second), bench.logits("full")) < TOLERANCE
    assert second.usage.recomputed_tokens < 257 - 106 + 1
    again = bench.prefill("prefix")
    bench.run(again)
    assert again.usage.recomputed_tokens == 0
    assert again.usage.work.rows == bench.model.layout.layers  # the last token alone


def test_the_prefix_cache_keeps_its_budget(llama: Bench) -> None:
    size = llama.model.layout.layers * llama.model.layout.layer_bytes(len(llama.prefill().layout))
    llama.prefixes._max_bytes = size * 3 // 2
    for parts in (llama.parts, llama.parts[::-1]):
        llama.parts = parts
        llama.logits("prefix")
    assert len(llama.prefixes._prompts) == 1
    llama.parts = llama.parts[::-1]
    prefill = llama.prefill("prefix")
    llama.run(prefill)
    assert prefill.usage.recomputed_tokens == 257


def test_short_prompts_keep_a_budget_too_and_the_system_prefix_stays(llama: Bench) -> None:
    """Ever more chunks of one line, each with its glue: what Stage I needs of them is not kept for all."""
    token = llama.model.layout.layers * llama.model.layout.layer_bytes(1)
    prefixes = llama.prefixes = PrefixCache(llama.model, short_bytes=200 * token)
    system = run(prefixes.exact(llama.prefix))
    for count in (10, 20, 30, 40, 150, 12):
        llama.parts = Bench(llama.model, lengths=(1,) * count).parts
        prefill = llama.prefill("prophetkv")
        llama.run(prefill)
        assert run(prefixes.exact(llama.prefix)) is system
        held = sum(kept.nbytes for kept in prefixes._system.values())
        assert held <= 200 * token or len(prefixes._system) == 2
    assert {len(ids) for ids in prefixes._system} == {9, 9 + 3 * 12}  # 459 tokens, for a moment, left room to none


def test_a_prompt_that_overflows_is_not_kept(llama: Bench) -> None:
    llama.model._module.lm_head.weight[5, 3] = float("nan")
    with pytest.raises(NumericalFault, match="NaN or infinite logits"):
        _events(llama, "prefix")
    assert not llama.prefixes._prompts


# Counters


def test_what_was_done_is_counted(llama: Bench) -> None:
    def work(name: str, **options: Any) -> tuple[int, int, int]:
        prefill = llama.prefill(name, 0.2, **options)
        llama.run(prefill)
        done = prefill.usage.work
        return done.rows, done.kv_rows, done.pairs

    llama.logits("naive")  # the system prefix is kept from here on
    layout = llama.prefill().layout
    prompt, fresh, budget = len(layout), len(layout.fresh), 51
    pairs = prompt * (prompt + 1) // 2
    assert work("full") == (2 * prompt + 1, prompt, 2 * pairs + prompt)
    fresh_pairs = int((layout.fresh + 1).sum())
    assert work("naive") == (2 * fresh + 1, fresh, 2 * fresh_pairs + prompt)
    rows, kv_rows, found = work("prophetkv")
    suffix, suffix_pairs = len(layout.suffix), int((layout.suffix + 1).sum())
    assert rows == 2 * suffix + 2 * (budget + fresh) + 1
    assert kv_rows == suffix + budget + fresh
    prefill = llama.prefill("prophetkv", 0.2)
    llama.run(prefill)
    chosen_pairs = int((layout.context[prefill.selected] + 1).sum())
    assert found == 3 * suffix_pairs + 2 * (fresh_pairs + chosen_pairs) + prompt
    for name in ("cacheblend", "kvshare"):
        assert work(name)[:2] == (prompt + (budget + fresh) + 1, prompt + budget + fresh)
    assert work("random")[:2] == (2 * (budget + fresh) + 1, budget + fresh)
    first = sum(int(0.2 * len(part.chunk.token_ids) + 0.5) for part in llama.parts)
    assert work("epic")[:2] == (2 * (first + fresh) + 1, first + fresh)
    assert prefill.usage.bytes_copied == prefill.usage.bytes_loaded == 257 * 3 * llama.model.layout.layer_bytes(1)
    full_work = llama.model.full_work(prompt)
    assert (full_work.rows, full_work.kv_rows, full_work.pairs) == work("full")
    # Of the tiny Llama: Q and O 64 x 64, K and V 64 x 32, three matrices 64 x 128, two norms; 4 heads of 16. Each pair
    # is multiplied with K and with V, and once more with K where Stage I sums by column.
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    assert prefill.usage.work.scored == 3 * suffix_pairs
    operations = 2 * (layer * rows + 2 * 64 * 32 * kv_rows) + 2 * 4 * 16 * (2 * found + 3 * suffix_pairs)
    assert llama.model.flops(prefill.usage.work) == operations


# Options and faults


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("full", {"ratio": 1.5}, r"strategy\.ratio: .* less than or equal to 1"),
        ("full", {"ratio": True}, r"strategy\.ratio"),
        ("naive", {"k": 1}, r"strategy\.k: Extra inputs"),
        ("epic", {"k": -1}, r"strategy\.k"),
        ("prophetkv", {"smooth": 2}, "odd"),
        ("prophetkv", {"score_layers": []}, "layers 0 to 2"),
        ("prophetkv", {"score_layers": [3]}, "layers 0 to 2"),
        ("prophetkv", {"score_rows": "first"}, r"strategy\.score_rows"),
        ("cacheblend", {"criterion": "v_l1"}, r"strategy\.criterion"),
        ("cacheblend", {"check_layer": 3}, "at most 2"),
        ("kvshare", {"check_layer": 3}, "at most 2"),
    ],
)
def test_bad_options_are_named(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make_strategy(name, options, layers=3)


def test_strategies_are_made_by_name() -> None:
    for name in SERVED:
        assert make_strategy(name, {"ratio": 0.5}, layers=3).ratio == 0.5
    for unknown in ("profetkv", "oracle"):
        with pytest.raises(UnknownStrategy, match=r"auto, full, prefix, .*, prophetkv, random"):
            make_strategy(unknown, {}, layers=3)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_poisoned_kv_falls_back_to_a_full_prefill(llama: Bench, poison: float) -> None:
    expected = [event for event in _events(llama, "full") if isinstance(event, Token)]
    llama.logits("naive")
    key = llama.parts[2].chunk.key
    llama.encoded[key].layer(1)[0, 0, 3, 2] = poison
    events = _events(llama, "prophetkv")
    first = events[0]
    assert isinstance(first, Prefilled)
    assert first.usage.strategy == "full"
    assert first.usage.fallback_reason is not None
    assert "NaN or infinite" in first.usage.fallback_reason
    assert [event for event in events if isinstance(event, Token)] == expected
    assert isinstance(events[-1], Finished)


def test_a_model_that_overflows_behind_the_first_token_fails_the_request(llama: Bench) -> None:
    logits, calls = llama.model.logits, 0

    def third_is_nan(hidden: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits(hidden) * (float("nan") if calls == 3 else 1.0)

    llama.model.logits = third_is_nan  # type: ignore[method-assign]
    steps = generate(llama.model, llama, llama.prefixes, llama.request("full", max_tokens=6))
    told: list[Any] = []
    with pytest.raises(NumericalFault, match="NaN or infinite logits"):
        told += (event for event in steps if event is not None)
    assert [type(event) for event in told] == [Prefilled, Token, Token]


def test_a_model_that_overflows_fails_the_request(llama: Bench) -> None:
    llama.model._module.lm_head.weight[5, 3] = float("nan")
    with pytest.raises(NumericalFault, match="NaN or infinite logits"):
        _events(llama, "full")
    broken = Bench(tiny_model(FAMILIES["qwen2"]))
    broken.model._layers[1].mlp.down_proj.weight[0, 0] = float("inf")
    with pytest.raises(NumericalFault):
        _events(broken, "prophetkv")


def _events(bench: Bench, name: str) -> list[Any]:
    steps = generate(bench.model, bench, bench.prefixes, bench.request(name, 0.3, max_tokens=6))
    return [event for event in steps if event is not None]


def test_a_thousand_chunks_and_chunks_of_one_token(llama: Bench) -> None:
    bench = Bench(llama.model, lengths=(1,) * 1000, glue=1)
    assert error(bench.logits("prophetkv", 1.0), bench.logits("full")) < TOLERANCE
    prefill = bench.prefill("prophetkv", 0.1)
    bench.run(prefill)
    assert len(prefill.selected) == 100
