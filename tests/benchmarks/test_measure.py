from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.quality import measure
from benchmarks.quality.evaluator import Evaluator
from benchmarks.quality.measure import PromptRun, divergence, surprise, what_followed
from benchmarks.quality.methods import DEFAULT, Method
from benchmarks.quality.prompts import Prompt
from engine.base import Sampling, Token
from engine.encode import PrefixCache
from engine.forward import run_steps
from engine.generate import generate
from engine.model import Model
from engine.prefill import Prefill
from engine.strategies import STRATEGIES
from tests.benchmarks.tiny_prompts import CHUNK_TOKENS, methods, one_thread, sample

OPTIONS = {name: {} if name in ("full", "none", "naive", "prefix") else {"ratio": 0.3} for name in (*DEFAULT, "prefix")}


@pytest.fixture(autouse=True)
def _tiny_work() -> Iterator[None]:
    with one_thread(), torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def evaluator(tiny_folder: Path) -> Evaluator:
    return Evaluator(Model.load(tiny_folder, "cpu", "float32"), "tiny", CHUNK_TOKENS)


@pytest.fixture
def run(evaluator: Evaluator) -> PromptRun:
    """A prompt whose score never settles, so that answers have their full length."""
    return PromptRun(evaluator.model, PrefixCache(evaluator.model), prompt(evaluator))


def prompt(evaluator: Evaluator, max_tokens: int = 12) -> Prompt:
    return replace(evaluator.builder(sample(max_tokens=max_tokens), CHUNK_TOKENS), settled=lambda text: False)


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_answers_are_the_engines(run: PromptRun, name: str) -> None:
    """Whether they agree with full prefill's for a while, from the first token on, or never."""
    full = run.full().answer
    method = Method(name, OPTIONS[name])
    found = run.measure(method)
    asked = run.prompt.without_context() if name == "none" else run.prompt
    request = replace(asked.request(method.build(2)), sampling=Sampling(max_tokens=12))
    events = generate(run.model, run, PrefixCache(run.model), request)
    assert list(found.answer) == [event.id for event in events if isinstance(event, Token)]
    assert found.tokens["generated"] == len(full) == 12
    if name in ("none", "naive", "random"):
        assert found.answer != full


@pytest.mark.parametrize("name", sorted(name for name, kind in STRATEGIES.items() if kind.reuses))
def test_a_copy_of_the_assembled_slots_is_an_assembly(run: PromptRun, name: str) -> None:
    strategy = Method(name, {} if name == "naive" else {"ratio": 0.3}).build(2)
    ours = run.start(strategy)
    anew = Prefill(run.model, run, PrefixCache(run.model), run.prompt.request(strategy))
    assert torch.equal(run_steps(strategy.prefill(ours)), run_steps(strategy.prefill(anew)))
    again = run.start(strategy)
    assert torch.equal(run_steps(strategy.prefill(again)), run_steps(strategy.prefill(ours)))


def test_divergence_from_full_prefill(run: PromptRun) -> None:
    assert run.full().kl == 0.0
    for method in methods():
        whole = run.measure(Method(method.strategy, {"ratio": 1.0})) if "ratio" in method.options else None
        if whole is not None:
            assert whole.kl is not None
            assert whole.kl < 1e-4
            assert whole.answer == run.full().answer
    for name in ("naive", "none"):
        kl = run.measure(Method(name)).kl
        assert kl is not None
        assert kl > 1e-3


def test_divergence_is_the_definition() -> None:
    reference, other = torch.randn(130, 7), torch.randn(130, 7)
    wanted, found = reference.double().softmax(-1), other.double().softmax(-1)
    expected = float((wanted * (wanted.log() - found.log())).sum(-1).mean())
    assert divergence(reference, other) == pytest.approx(expected, rel=1e-5)
    assert divergence(reference, reference) == 0.0


def test_the_gold_answers_likelihood_is_the_plain_models(run: PromptRun) -> None:
    model, gold = run.model, run.prompt.gold
    assert len(gold) > 2
    ids = run.start(STRATEGIES["full"]()).layout.ids
    beginnings = (torch.cat((ids, torch.tensor(gold[:count], dtype=torch.int64))) for count in range(len(gold)))
    logits = torch.stack([model.plain_logits(beginning) for beginning in beginnings])
    expected = float(-logits.log_softmax(-1)[torch.arange(len(gold)), torch.tensor(gold)].mean())
    full = run.full()
    assert full.nll == pytest.approx(expected, rel=1e-4)
    assert surprise(logits, gold) == pytest.approx(expected, rel=1e-6)
    # Answers were generated in the same slots before: the order must not matter.
    assert run.measure(Method("prophetkv", {"ratio": 1.0})).nll == pytest.approx(expected, rel=1e-4)


def test_an_answer_ends_when_its_score_is_settled(run: PromptRun) -> None:
    whole = run.full().answer
    text = "".join(run.model.tokenizer.decode([token]) for token in whole[:4])
    run.prompt = replace(run.prompt, settled=lambda found: len(found) >= len(text))
    found = run.full()
    assert found.answer == whole[: len(found.answer)]
    assert len(found.answer) <= 5
    for name in ("naive", "epic"):
        assert len(run.measure(Method(name, {} if name == "naive" else {"ratio": 0.2})).answer) <= 12


def test_an_answer_ends_with_the_texts_end(run: PromptRun) -> None:
    whole = run.full().answer
    run.model.eos_ids = frozenset([whole[3]])
    try:
        found = run.full()
        assert found.answer == whole[: whole.index(whole[3])]
        assert found.tokens["generated"] == len(found.answer) + 1
        assert run.measure(Method("epic", {"ratio": 1.0})).answer == found.answer
    finally:
        run.model.eos_ids = frozenset()


def test_times_and_counts(run: PromptRun) -> None:
    full, first, second = run.full(), run.measure(Method("naive")), run.measure(Method("epic", {"ratio": 0.5}))
    assert "encode" not in full.timings
    assert "encode" in first.timings
    assert "encode" not in second.timings
    assert first.timings["assemble"] == second.timings["assemble"] > 0
    for found in (full, first, second):
        phases = [
            found.timings[phase]
            for phase in ("load", "assemble", "stage1", "select", "stage2")
            if phase in found.timings
        ]
        assert found.timings["ttft"] == pytest.approx(sum(phases))
    assert first.tokens["recomputed"] == 0
    assert full.tokens["recomputed"] == full.tokens["context"]
    assert 0 < second.tokens["recomputed"] < second.tokens["context"]
    assert full.tokens["chunks"] > 2


def test_a_codec_is_part_of_a_run_and_shows_in_its_records(evaluator: Evaluator) -> None:
    packed = Evaluator(evaluator.model, "tiny", CHUNK_TOKENS, "int8")
    assert packed.settings() == {**evaluator.settings(), "codec": "int8"}
    found = []
    for made in (evaluator, packed):
        run = made.start(sample())
        run.full()
        found.append(run.measure(Method("naive")).kl)
    assert found[0] != found[1]
    assert found[0] == pytest.approx(found[1], rel=0.1)
    run = evaluator.start(sample())
    run.full()
    both = [run.measure(Method("naive", options)).kl for options in ({"codec": "int8"}, {})]
    assert both == [found[1], found[0]]
    run = packed.start(sample())
    run.full()
    both = [run.measure(Method("naive", options)).kl for options in ({"codec": "raw"}, {})]
    assert both == [found[0], found[1]]


@pytest.mark.parametrize("right", [0, 3, 6])
def test_guesses_change_no_answer(run: PromptRun, monkeypatch: pytest.MonkeyPatch, right: int) -> None:
    monkeypatch.setattr(measure, "what_followed", lambda ids: [])
    expected, prompt = run.full().answer, len(run.start(STRATEGIES["full"]()).layout)
    passes = 0

    def guess(ids: Sequence[int]) -> list[int]:
        nonlocal passes
        passes += 1
        said = len(ids) - prompt
        return [token if at < right else token + 1 for at, token in enumerate(expected[said : said + 6])]

    monkeypatch.setattr(measure, "what_followed", guess)
    assert run.full().answer == expected
    assert passes == -(-11 // (right + 1))  # the first of the twelve tokens comes from the prefill


def test_what_followed_the_last_tokens_before() -> None:
    assert what_followed([1, 2, 3, 1, 2, 4, 5, 1, 2]) == [4, 5, 1, 2, 4, 5]
    assert what_followed([7, 7, 7]) == [7] * 6
    assert what_followed([1, 2, *range(3, 20), 1, 2]) == [3, 4, 5, 6, 7, 8]
    assert what_followed([1, 2, 3, 2]) == what_followed([1]) == []
