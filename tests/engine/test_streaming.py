"""Layers are used as they arrive, and a tier that fails on the way changes neither tokens nor logits."""

from __future__ import annotations

import queue
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cache_store.base import OWN_MEMORY, Chunk, ChunkKV, KVLayout, Landing
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.encode import encode_chunk
from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies import SERVED
from errors import CorruptEntry, StoreUnavailable
from tests.tiny import Bench, run

FAILURES = {"gone": StoreUnavailable("disk tier: it burns"), "corrupt": CorruptEntry("block checksum")}


class Drip(DiskStore):
    """A disk that lets a layer through when it is told to, or fails. `orders`, by chunk: 'layer' or an error."""

    def __init__(self, folder: Path, layout: KVLayout) -> None:
        super().__init__(folder, layout, 1 << 30)
        self.orders: dict[str, queue.Queue[str]] = {}

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        return super().get(chunk, _Held(self.orders.get(chunk.key), landing))


class _Held:
    def __init__(self, orders: queue.Queue[str] | None, landing: Landing) -> None:
        self._orders = orders
        self._landing = landing

    def buffer(self, nbytes: int) -> Tensor:
        return self._landing.buffer(nbytes)

    def moving(self) -> None:
        self._landing.moving()

    def arrived(self, kv: ChunkKV, layers: int) -> None:
        if self._orders is not None:
            order = self._orders.get(timeout=5)
            if order != "layer":
                raise FAILURES[order]
        self._landing.arrived(kv, layers)


class Stored:
    """A prompt whose chunks lie on a dripping disk, and what its prefill is without any fault."""

    def __init__(self, bench: Bench, folder: Path, codec: str = "raw", patience: float = 60.0) -> None:
        self.bench = bench
        self.layout = bench.model.layout
        self.disk = Drip(folder, KVLayout(3, self.layout.kv_heads, self.layout.head_dim, torch.float32, codec))
        self.store = TieredStore([MemoryStore(0), self.disk], patience={"disk": patience})
        encode = partial(encode_chunk, bench.model, bench.prefixes, bench.prefix, codec=codec)
        self.source = ChunkSource(self.store, encode)

    def order(self, *orders: list[str]) -> None:
        """What happens to each chunk's layers, one order a layer; without any they come as they do."""
        self.disk.orders = {part.chunk.key: queue.Queue() for part, _ in zip(self.bench.parts, orders, strict=True)}
        self.add(*orders)

    def add(self, *orders: list[str]) -> None:
        for waiting, wanted in zip(self.disk.orders.values(), orders, strict=True):
            for order in wanted:
                waiting.put(order)

    def prefill(self, strategy: str = "prophetkv", **options: Any) -> Prefill:
        request = self.bench.request(strategy, **options)
        return Prefill(self.bench.model, self.source, self.bench.prefixes, request)

    def logits(self, strategy: str = "prophetkv", **options: Any) -> tuple[Tensor, Prefill]:
        prefill = self.prefill(strategy, **options)
        logits = self.bench.run(prefill)
        self.store.flush()
        return logits, prefill


@pytest.fixture
def stored(llama: Bench, tmp_path: Path) -> Stored:
    llama.parts = llama.parts[2:4]  # two chunks, of 64 and 150 tokens
    return Stored(llama, tmp_path)


def _held_up(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> tuple[Prefill, Steps, list[int]]:
    """A prefill of which no stored layer has arrived, its steps, and the layers that it will have run."""
    ran: list[int] = []
    run_layer = stored.bench.model.run_layer

    def logged(layer: int, *arguments: Any) -> Tensor:
        ran.append(layer)
        return run_layer(layer, *arguments)

    monkeypatch.setattr(stored.bench.model, "run_layer", logged)
    stored.order([], [])
    prefill = stored.prefill()
    return prefill, prefill.request.strategy.prefill(prefill), ran


def test_a_layer_is_used_before_the_next_has_arrived(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = stored.logits()
    prefill, steps, ran = _held_up(stored, monkeypatch)
    for layer in range(3):
        for _ in range(30):  # as many steps as one likes: without its layer the pass does not go on
            next(steps)
        assert ran == list(range(layer))
        stored.add(["layer"], ["layer"])
        while len(ran) == layer:
            next(steps)
    assert torch.equal(run(steps), expected)
    assert prefill.usage.hits["disk"] == 2
    assert set(prefill.timings) == {"load", "assemble", "stage1", "select", "stage2"}
    stored.store.close()


def test_what_is_missing_is_computed_while_the_others_are_read(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = stored.logits()
    stored.store.delete([stored.bench.parts[1].chunk.key])
    prefill, steps, ran = _held_up(stored, monkeypatch)
    for _ in range(30):  # the first chunk does not arrive
        next(steps)
    assert ran == [0, 1, 2]
    stored.add(["layer"] * 3, [])
    assert torch.equal(run(steps), expected)
    assert (prefill.usage.hits["disk"], prefill.usage.hits["computed"]) == (1, 1)
    assert stored.disk.stats.misses == 3  # the two chunks when they were stored, and now the missing one
    stored.store.close()


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("good", [0, 1, 2, 3, 4, 5])
def test_a_tier_that_fails_after_any_layer_changes_nothing(stored: Stored, failure: str, good: int) -> None:
    """After 0 to 5 of the 6 layers of the two chunks."""
    expected, _ = stored.logits()
    stored.order(["layer"] * min(good, 3) + [failure] * (good < 3), ["layer"] * max(0, good - 3) + [failure])
    logits, prefill = stored.logits()
    assert torch.equal(logits, expected)
    assert prefill.usage.hits["computed"] == (2 if good < 3 else 1)
    assert sum(prefill.usage.hits.values()) == 2
    assert prefill.usage.faults == (["disk tier: it burns"] if failure == "gone" else [])
    stored.disk.orders = {}
    assert torch.equal(stored.logits()[0], expected)
    stored.store.close()
    assert stored.store.room.taken == 0


@pytest.mark.parametrize("good", [0, 1, 2])
def test_a_tier_that_hangs_after_any_layer_changes_nothing(llama: Bench, tmp_path: Path, good: int) -> None:
    llama.parts = llama.parts[2:4]
    stored = Stored(llama, tmp_path, patience=0.5)
    expected, _ = stored.logits()
    stored.order(["layer"] * good, ["layer"] * 3)
    logits, prefill = stored.logits()
    assert torch.equal(logits, expected)
    assert (prefill.usage.hits["computed"], prefill.usage.hits["disk"]) == (1, 1)
    assert prefill.usage.faults == ["disk tier: no byte in 0.5 s"]
    stored.add(["layer"] * (3 - good), [])
    stored.store.close()
    assert stored.store.room.taken == 0


@pytest.mark.parametrize("strategy", [name for name, kind in SERVED.items() if kind.reuses and not kind.chooses])
def test_every_strategy_gives_the_same_from_a_stream(stored: Stored, strategy: str) -> None:
    expected, _ = stored.logits(strategy)
    stored.order(["layer"] * 3, ["layer"] * 3)
    found, prefill = stored.logits(strategy)
    assert torch.equal(found, expected)
    assert prefill.usage.hits["disk"] == 2
    stored.store.close()


@pytest.mark.parametrize("layers", [[0], [2], [0, 2], "first_half"])
def test_scores_of_some_layers_only(stored: Stored, layers: Any) -> None:
    expected, _ = stored.logits(score_layers=layers)
    stored.order(["layer"] * 3, ["layer"] * 3)
    assert torch.equal(stored.logits(score_layers=layers)[0], expected)
    stored.store.close()


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_a_lossy_codec_gives_the_same_computed_loaded_and_after_a_fault(
    llama: Bench, tmp_path: Path, codec: str
) -> None:
    raw = llama.logits("prophetkv")
    stored = Stored(llama, tmp_path, codec)
    computed, first = stored.logits()
    assert first.usage.hits["computed"] == 5
    assert first.usage.bytes_copied == sum(
        3 * stored.disk._layout.block_bytes(len(part.chunk.token_ids)) for part in llama.parts
    )
    assert 0 < float((computed - raw).abs().max()) < 0.5 * float(raw.abs().max())
    loaded, second = stored.logits()
    assert second.usage.hits["disk"] == 5
    assert torch.equal(loaded, computed)
    next(tmp_path.rglob("*.kv")).write_bytes(b"noise")
    assert torch.equal(stored.logits()[0], computed)
    stored.store.close()


def test_a_request_that_is_given_up_while_it_waits_leaves_nothing(stored: Stored) -> None:
    stored.logits()
    stored.order([], [])
    prefill = stored.prefill()
    steps = prefill.request.strategy.prefill(prefill)
    for _ in range(5):
        next(steps)
    steps.close()
    stored.add(["layer"] * 3, ["layer"] * 3)
    stored.store.close()
    assert stored.store.room.taken == 0
