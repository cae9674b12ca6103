"""Estimates that follow what is observed, predictions that count what is done, and the choice that follows."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from cache_store.base import OWN_MEMORY, Chunk, ChunkKV, KVStore, Landing, Pause
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.base import Decision, Prefilled, Token, Work
from engine.calibration import calibrate, calibrate_tiers
from engine.controller import Controller, choose
from engine.costs import LinearCost
from engine.encode import encode_chunk, encode_observed
from engine.generate import generate
from errors import StoreUnavailable
from tests.tiny import FAMILIES, Bench, run, tiny_model

# Estimates


def test_estimates_converge_on_noisy_measurements_of_mixed_amounts() -> None:
    chance = random.Random(1)
    true = LinearCost((2e-3, 3e-9))
    found = LinearCost((1e-4, 1e-9))
    for _ in range(200):
        amounts = (chance.randint(1, 20), chance.randint(1, 1 << 24))
        found.observe(amounts, true.predict(amounts) * chance.uniform(0.9, 1.1))
    for amounts in ((1, 1 << 16), (1, 1 << 24), (20, 1 << 20)):
        assert found.predict(amounts) == pytest.approx(true.predict(amounts), rel=0.1)


def test_estimates_follow_a_medium_that_changes() -> None:
    found = LinearCost((1e-4, 1e-9))
    found.learn([((1, 1 << 20), 0.01)])
    assert found.predict((1, 1 << 20)) == pytest.approx(0.01)
    for _ in range(12):
        found.observe((1, 1 << 20), 0.05)
    assert found.predict((1, 1 << 20)) == pytest.approx(0.05, rel=0.15)


def test_what_a_calibration_lacks_keeps_its_relation_to_the_rest() -> None:
    found = LinearCost((1.0, 1.0, 1.0))
    found.learn([((1, 0, 0), 1e-3), ((1, 1, 0), 3e-3), ((0, 0, 1), 0.0)])
    assert found.coefficients == pytest.approx((1e-3, 2e-3, 1.5e-3), rel=0.4)
    assert found.predict((1, 1, 0)) == pytest.approx(3e-3, rel=1e-3)
    found.learn([])


def test_what_was_not_seen_stays_and_nothing_turns_negative() -> None:
    found = LinearCost((1.0, 1.0, 1.0))
    for _ in range(100):
        found.observe((1, 1, 0), 1e-6)
        found.observe((0, 0, 0), 5.0)
        found.observe((1, 1, 0), 0.0)
    assert found.coefficients[2] == 1.0
    assert 0 < found.coefficients[0] < 1e-4


def test_one_outlier_moves_an_estimate_by_a_quarter_at_most() -> None:
    found = LinearCost((1.0,))
    found.observe((1,), 1e9)
    assert found.predict((1,)) < 1.25


# The choice, on numbers worked out by hand


@pytest.mark.parametrize(
    ("loading", "computing", "stage1", "stage2", "full", "expected"),
    [
        # Everything in memory: 0.2 beside Stage I, then Stage II.
        ([0.1, 0.1], [0.5, 0.5], 0.1, 0.2, 1.0, ("prophetkv", 0.4, [False, False])),
        # A slow tier: both loaded take 0.8; one is computed in 0.5 while the other is read.
        ([0.4, 0.4], [0.5, 0.5], 0.1, 0.2, 1.0, ("prophetkv", 0.8, [True, False])),
        # A slower one: computing both is the shortest, and longer than a full prefill.
        ([2.0, 2.0], [0.5, 0.5], 0.1, 0.2, 1.0, ("full", 1.3, [True, True])),
        # Nothing stored: computing everything is a full prefill, and the stages come on top.
        ([None, None], [0.5, 0.5], 0.1, 0.2, 1.0, ("full", 1.3, [True, True])),
        # One chunk missing of four: it and Stage I take 0.35, longer than reading the others.
        ([0.1, None, 0.1, 0.1], [0.25] * 4, 0.1, 0.2, 1.0, ("prophetkv", 0.55, [False, True, False, False])),
        # One chunk lies where loading takes longer than computing it.
        ([0.05, 0.9], [0.25, 0.25], 0.1, 0.2, 1.0, ("prophetkv", 0.55, [False, True])),
        # Loading or computing in the same time: what is stored is loaded.
        ([0.25], [0.25], 0.1, 0.2, 1.0, ("prophetkv", 0.45, [False])),
        # A gain within the margin of 5 % is none.
        ([0.0], [0.5], 0.5, 0.455, 1.0, ("full", 0.955, [False])),
        ([0.0], [0.5], 0.5, 0.445, 1.0, ("prophetkv", 0.945, [False])),
        # No context at all.
        ([], [], 0.05, 0.05, 1.0, ("prophetkv", 0.1, [])),
    ],
)
def test_choices(
    loading: list[float | None],
    computing: list[float],
    stage1: float,
    stage2: float,
    full: float,
    expected: tuple[str, float, list[bool]],
) -> None:
    chosen, reuse, compute = choose(loading, computing, stage1, stage2, full)
    assert (chosen, compute) == (expected[0], expected[2])
    assert reuse == pytest.approx(expected[1])


# Predictions


def test_predicted_work_is_the_work_that_is_done(llama: Bench) -> None:
    llama.logits("naive")  # the system prefix is kept from here on
    seen: list[Work] = []
    controller = Controller(llama.model)
    controller.predict = lambda work: seen.append(work) or 0.0  # type: ignore[method-assign, func-returns-value]
    chunk = llama.parts[3].chunk
    controller.computing(chunk, len(llama.prefix) + 3)
    encoding = Work()
    run(encode_chunk(llama.model, llama.prefixes, (*llama.prefix, 1, 2, 3), chunk, work=encoding))
    assert seen == [encoding]
    for ratio, options in ((0.2, {}), (0.5, {"score_layers": [0, 1], "score_rows": "last"}), (1.0, {}), (0.0, {})):
        seen.clear()
        prefill = llama.prefill("auto", ratio, **options)
        prefill.controller = controller
        llama.run(prefill)
        *_, full, first, second = seen
        stages = Work(*(one + other for one, other in zip(astuple(first), astuple(second), strict=True)))
        assert full == llama.prefill("full").model.full_work(len(prefill.layout))
        done = llama.prefill("prophetkv", ratio, **options)
        llama.run(done)
        work = done.usage.work
        same = ("rows", "kv_rows", "scored", "calls", "turned", "causal")
        assert [getattr(stages, name) for name in same] == [getattr(work, name) for name in same]
        assert stages.pairs == pytest.approx(work.pairs, rel=0.2)  # it depends on which tokens are selected


def test_an_encoding_teaches_the_cost_of_its_own_steps(llama: Bench) -> None:
    controller = Controller(llama.model)
    seen: list[float] = []
    controller.observe = lambda work, seconds, trial=False: seen.append(seconds)  # type: ignore[method-assign]
    steps = encode_observed(llama.model, llama.prefixes, llama.prefix, "raw", controller, llama.parts[0].chunk)
    kv = run(steps)
    assert kv.tokens == len(llama.parts[0].chunk.token_ids)
    assert len(seen) == 1


# Calibration


class Broken(MemoryStore):
    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> None:
        raise StoreUnavailable("broken tier: sick")


def test_calibration_learns_of_device_and_tiers_and_leaves_nothing(
    llama: Bench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers: list[KVStore] = [
        MemoryStore(1 << 30),
        DiskStore(tmp_path, llama.model.layout, 1 << 30),
        Broken(1 << 20, name="broken"),
        MemoryStore(0, name="none"),
    ]
    store = TieredStore(tiers)
    controller = Controller(llama.model, tiers)
    guess, broken = controller.compute.coefficients, controller.reads["broken"].coefficients
    calibrate(llama.model, llama.prefixes, llama.prefix, controller)
    calibrate_tiers(tiers, llama.model.layout, controller)
    assert controller.compute.coefficients != guess
    assert all(cost > 0 for cost in controller.compute.coefficients)
    chunk = Chunk("0" * 64, (0,) * 256)
    assert controller.loading(chunk, "memory") < controller.loading(chunk, "disk")
    assert controller.reads["broken"].coefficients == broken
    assert [tier.stats.entries for tier in tiers] == [0, 0, 0, 0]
    assert [record.message for record in caplog.records] == ["kv tier could not be measured: broken tier: sick"]
    store.close()


def test_reads_of_the_tiers_are_taken_in(llama: Bench) -> None:
    memory = MemoryStore(1 << 20)
    controller = Controller(llama.model, [memory])
    before = controller.reads["memory"].predict((1, 1 << 20))
    memory.stats.hits, memory.stats.read_bytes, memory.stats.read_seconds = 4, 4 << 20, 400.0
    controller.observe_reads()
    after = controller.reads["memory"].predict((1, 1 << 20))
    assert after > before
    controller.observe_reads()  # nothing new
    assert controller.reads["memory"].predict((1, 1 << 20)) == after


# The strategy


EVERYTHING = (0, 1, 2, 3, 4)
NOTHING: tuple[int, ...] = ()
SLOW, FAST = LinearCost((1e3, 1e3)), LinearCost((1e-9, 1e-15))


class Rig:
    """Five chunks on a tiny model, some in memory, some on disk, and a controller whose estimates the test sets."""

    def __init__(self, folder: Path, memory: tuple[int, ...], disk: tuple[int, ...]) -> None:
        self.bench = Bench(tiny_model(FAMILIES["llama"]))
        self.tiers: list[KVStore] = [MemoryStore(1 << 30), DiskStore(folder, self.bench.model.layout, 1 << 30)]
        self.store = TieredStore(self.tiers)
        self.source = ChunkSource(self.store, self.encode)
        chunks = [part.chunk for part in self.bench.parts]
        for tier, numbers in zip(self.tiers, (memory, disk), strict=True):
            for number in numbers:
                tier.put(chunks[number], run(self.encode(chunks[number])))
        self.controller = Controller(self.bench.model, self.tiers)
        self.controller.observe = lambda work, seconds, trial=False: None  # type: ignore[method-assign]
        self.controller.compute = LinearCost((1e-9, *[1e-11] * 4, 1e-11))  # time is operations, nearly
        self.controller.reads["memory"] = FAST

    def encode(self, chunk: Chunk) -> Generator[Pause, None, ChunkKV]:
        return encode_chunk(self.bench.model, self.bench.prefixes, self.bench.prefix, chunk)

    def prefilled(self, strategy: str, ratio: float = 0.2) -> tuple[Prefilled, list[int]]:
        steps = generate(
            self.bench.model, self.source, self.bench.prefixes, self.bench.request(strategy, ratio), self.controller
        )
        events = [event for event in steps if event is not None]
        assert isinstance(events[0], Prefilled)
        return events[0], [event.id for event in events if isinstance(event, Token)]

    def decided(self, ratio: float = 0.2) -> tuple[Decision, Prefilled, list[int]]:
        found, tokens = self.prefilled("auto", ratio)
        assert found.usage.decision is not None
        assert found.usage.decision.strategy == found.usage.strategy
        assert found.usage.fallback_reason is None
        return found.usage.decision, found, tokens


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def make(memory: tuple[int, ...], disk: tuple[int, ...]) -> Rig:
        rigs.append(Rig(tmp_path, memory, disk))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.store.close()


def test_reuse_where_loading_is_fast(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(NOTHING, EVERYTHING)
    rig.controller.reads["disk"] = FAST
    decision, found, tokens = rig.decided()
    assert (decision.strategy, decision.loaded, decision.computed, decision.missing) == ("prophetkv", 5, 0, ())
    assert decision.predicted_ms["prophetkv"] < decision.predicted_ms["full"]
    assert found.usage.hits["disk"] == 5
    named, expected = rig.prefilled("prophetkv")
    assert tokens == expected
    assert named.usage.decision is None
    assert found.usage.recomputed_tokens == named.usage.recomputed_tokens


def test_a_full_prefill_where_nothing_is_stored(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(NOTHING, NOTHING)
    decision, found, tokens = rig.decided()
    assert (decision.strategy, decision.loaded, decision.computed) == ("full", 0, 5)
    assert decision.missing == tuple(part.chunk for part in rig.bench.parts)
    assert (found.usage.ratio, sum(found.usage.hits.values())) == (1.0, 0)
    assert tokens == rig.prefilled("full")[1]


def test_chunks_that_load_slowly_are_computed_and_the_others_loaded(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig((3, 4), (0, 1, 2))  # the long chunk is in memory
    rig.controller.reads["disk"] = SLOW
    decision, found, tokens = rig.decided(0.05)
    assert (decision.strategy, decision.loaded, decision.computed, decision.missing) == ("prophetkv", 2, 3, ())
    assert found.usage.hits == {"memory": 2, "disk": 0, "redis": 0, "computed": 3}
    assert rig.tiers[1].stats.hits == 0
    assert tokens == rig.prefilled("prophetkv", 0.05)[1]


def test_a_full_prefill_where_the_stages_cost_too_much(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(EVERYTHING, NOTHING)
    decision, _, _ = rig.decided(1.0)
    assert (decision.strategy, decision.loaded) == ("full", 5)


def test_a_named_strategy_runs_as_named(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(NOTHING, EVERYTHING)
    rig.controller.reads["disk"] = SLOW
    assert rig.decided()[0].strategy == "full"
    found, _ = rig.prefilled("prophetkv")
    assert (found.usage.strategy, found.usage.decision, found.usage.hits["disk"]) == ("prophetkv", None, 5)
