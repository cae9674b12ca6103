"""The device thread: order of work, aborts, bounds, and one computation per missing chunk."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from cache_store.base import OWN_MEMORY, Chunk, ChunkKV, KVStore, Landing, Pause
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.base import Encoded, EncodeRequest, Event, Finished, GenerateRequest, Prefilled, Request, Token
from engine.controller import Controller
from engine.costs import LinearCost
from engine.decode import EventSteps
from engine.encode import encode_chunk
from engine.engine import Engine
from engine.forward import Steps
from engine.generate import encode, generate
from engine.prefill import Prefill
from engine.strategies import SERVED
from engine.strategies.full import Full
from errors import Cancelled, NotReady, QueueFull
from tests.tiny import FAMILIES, Bench, run, tiny_model


class Rig:
    """An engine on a tiny model, with a trace of what the device thread did."""

    def __init__(
        self,
        max_waiting: int = 32,
        max_running: int = 4,
        memory: int = 1 << 30,
        behind: Sequence[KVStore] = (),
        patience: float = 60.0,
        family: str = "llama",
    ) -> None:
        """`behind`: tiers behind the memory. `patience`: with the disk, in seconds."""
        self.bench = Bench(tiny_model(FAMILIES[family]))
        self.trace: list[str] = []
        self.encodings: list[str] = []
        self.store = TieredStore([MemoryStore(memory), *behind], patience={"disk": patience})
        source = ChunkSource(self.store, self._encode)
        self.controller = Controller(self.bench.model, self.store.tiers)
        self.first_guess = LinearCost(self.controller.compute.coefficients)

        def steps(request: Request) -> EventSteps:
            inner = (
                encode(source, request)
                if isinstance(request, EncodeRequest)
                else generate(self.bench.model, source, self.bench.prefixes, request, self.controller)
            )
            for event in inner:
                self.trace.append(request.id)
                yield event

        self.engine = Engine(steps, max_waiting, max_running)

    def _encode(self, chunk: Chunk) -> Generator[Pause, None, ChunkKV]:
        self.encodings.append(chunk.key)
        return encode_chunk(self.bench.model, self.bench.prefixes, self.bench.prefix, chunk)

    def request(self, name: str, strategy: str = "prophetkv", **sampling: int) -> GenerateRequest:
        return replace(self.bench.request(strategy, 0.2, **sampling), id=name)

    def encode_request(self, name: str) -> EncodeRequest:
        return EncodeRequest(name, tuple(part.chunk for part in self.bench.parts))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        def nothing_left() -> bool:
            stats = self.engine.stats()
            return not (stats.running or stats.waiting or stats.background)

        await self.until(nothing_left)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Generator[Rig]:
    rig = Rig(family=getattr(request, "param", "llama"))
    yield rig
    rig.engine.close()
    rig.store.close()


async def collect(events: AsyncGenerator[Event]) -> list[Event]:
    async with aclosing(events):
        return [event async for event in events]


async def test_a_request_yields_prefilled_tokens_and_finished(rig: Rig) -> None:
    events = await collect(rig.engine.submit(rig.request("a", max_tokens=5)))
    first, *tokens, last = events
    assert isinstance(first, Prefilled)
    assert first.usage.context_tokens == 257
    assert first.usage.recomputed_tokens == int(0.2 * 257)
    assert first.usage.hits == {"memory": 0, "disk": 0, "redis": 0, "computed": 5}
    assert set(first.timings) == {"queue", "load", "assemble", "stage1", "select", "stage2"}
    assert len(tokens) == 5
    assert last == Finished("length")
    again = await collect(rig.engine.submit(rig.request("b", max_tokens=5)))
    assert isinstance(again[0], Prefilled)
    assert again[0].usage.hits == {"memory": 5, "disk": 0, "redis": 0, "computed": 0}
    assert again[0].usage.bytes_loaded == sum(kv.nbytes for kv in _held(rig))
    assert again[1:] == events[1:]


def _held(rig: Rig) -> list[ChunkKV]:
    found = [rig.store.get(part.chunk) for part in rig.bench.parts]
    return [kv for kv in found if kv is not None]


@pytest.mark.parametrize("rig", sorted(FAMILIES), indirect=True)
async def test_answers_do_not_depend_on_what_runs_beside_them(rig: Rig) -> None:
    names = [name for name in SERVED if name != "auto"]  # which may decide otherwise
    alone = [await collect(rig.engine.submit(rig.request(f"alone {name}", name, max_tokens=12))) for name in names]
    requests = [rig.request(f"beside {name}", name, max_tokens=12) for name in names]
    together = await asyncio.gather(*(collect(rig.engine.submit(request)) for request in requests))
    assert [events[1:] for events in together] == [events[1:] for events in alone]
    # The decodes really took turns.
    assert any(a != b for a, b in zip(rig.trace[-20:], rig.trace[-19:], strict=False))


async def test_the_second_client_of_a_chunk_drives_the_same_computation(rig: Rig) -> None:
    """Five requests for the same missing chunks, one of them in the background: one computation each."""
    background = asyncio.create_task(collect(rig.engine.submit(rig.encode_request("bg"))))
    await rig.until(lambda: "bg" in rig.trace)  # it is in the middle of the first chunk
    queries = [asyncio.create_task(collect(rig.engine.submit(rig.request(f"q{i}", max_tokens=1)))) for i in range(4)]
    await asyncio.gather(background, *queries)
    assert sorted(rig.encodings) == sorted(part.chunk.key for part in rig.bench.parts)
    assert all(isinstance(event, Encoded) for event in background.result())


async def test_an_aborted_leader_does_not_fail_its_followers(rig: Rig) -> None:
    pending = asyncio.create_task(collect(rig.engine.submit(rig.encode_request("leader"))))
    await rig.until(lambda: "leader" in rig.trace)
    follower = asyncio.create_task(collect(rig.engine.submit(rig.request("follower", max_tokens=1))))
    rig.engine.abort("leader")
    with pytest.raises(Cancelled):
        await pending
    assert isinstance((await follower)[0], Prefilled)
    assert len(rig.encodings) <= len(rig.bench.parts) + 1


async def test_background_work_waits_for_queries(rig: Rig) -> None:
    """Once a query is in, not one background step runs until it has ended."""
    background = asyncio.create_task(collect(rig.engine.submit(rig.encode_request("bg"))))
    await rig.until(lambda: "bg" in rig.trace)
    query = asyncio.create_task(collect(rig.engine.submit(rig.request("query", "full", max_tokens=30))))
    await asyncio.gather(background, query)
    first, last = rig.trace.index("query"), len(rig.trace) - 1 - rig.trace[::-1].index("query")
    assert set(rig.trace[first : last + 1]) == {"query"}


async def test_a_prefill_goes_before_decoding(rig: Rig) -> None:
    first = rig.engine.submit(rig.request("first", max_tokens=400))
    async for event in first:
        if isinstance(event, Token):
            break
    second = await collect(rig.engine.submit(rig.request("second", "full", max_tokens=1)))
    assert isinstance(second[0], Prefilled)
    start = rig.trace.index("second")
    layers = rig.bench.model.layout.layers
    assert rig.trace[start : start + layers - 1] == ["second"] * (layers - 1)
    await first.aclose()
    await rig.idle()


@pytest.mark.parametrize("strategy", ["full", "naive", "prophetkv"])
async def test_an_abort_takes_effect_at_the_next_layer(rig: Rig, strategy: str) -> None:
    aborted = threading.Event()

    class Trace(list[str]):
        """Holds up the device thread in the first step, or a tiny prefill would be over before it is aborted."""

        def append(self, name: str) -> None:
            super().append(name)
            assert aborted.wait(20)

    rig.trace = Trace()
    events = rig.engine.submit(rig.request("gone", strategy, max_tokens=100))
    pending = asyncio.ensure_future(anext(events))
    await rig.until(lambda: bool(rig.trace))
    rig.engine.abort("gone")
    aborted.set()
    with pytest.raises(Cancelled):
        await pending
    await rig.idle()
    assert len(rig.trace) == 1


async def test_closing_the_iterator_stops_decoding(rig: Rig) -> None:
    events = rig.engine.submit(rig.request("gone", max_tokens=1000))
    count = 0
    async for event in events:
        count += isinstance(event, Token)
        if count == 3:
            break
    await events.aclose()
    await rig.idle()
    assert len(rig.trace) < 500


async def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    rig = Rig(max_waiting=2, max_running=1)
    try:
        running = rig.engine.submit(rig.request("running", max_tokens=1000))
        async for event in running:
            if isinstance(event, Token):
                break
        waiting = [rig.engine.submit(rig.request(f"w{i}", max_tokens=1)) for i in range(2)]
        with pytest.raises(QueueFull) as full:
            rig.engine.submit(rig.request("too many"))
        assert full.value.retry_after >= 1
        await running.aclose()
        for events in waiting:
            assert len(await collect(events)) == 3
    finally:
        rig.engine.close()
        rig.store.close()


async def test_an_aborted_request_leaves_the_queue_before_it_ran() -> None:
    rig = Rig(max_waiting=2, max_running=1)
    try:
        running = rig.engine.submit(rig.request("running", max_tokens=1000))
        async for event in running:
            if isinstance(event, Token):
                break
        waiting = rig.engine.submit(rig.request("waiting"))
        rig.engine.abort("waiting")
        await rig.until(lambda: rig.engine.stats().waiting == 0)
        with pytest.raises(Cancelled):
            await anext(waiting)
        assert "waiting" not in rig.trace
        await running.aclose()
    finally:
        rig.engine.close()
        rig.store.close()


class Gated(DiskStore):
    """A disk that gives nothing of what it holds until its gate is opened."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, tiny_model(FAMILIES["llama"]).layout, 1 << 30)
        self.gate = threading.Event()
        self.asked = 0

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        if self.holds([chunk])[0]:
            self.asked += 1
            self.gate.wait()
        return super().get(chunk, landing)


async def test_a_hung_disk_costs_the_first_request_a_moment_and_the_next_nothing(tmp_path: Path) -> None:
    healthy, disk = Rig(), Gated(tmp_path)
    rig = Rig(memory=0, behind=[disk], patience=0.5)
    for part in rig.bench.parts:
        disk.put(part.chunk, run(rig.bench.load(part.chunk)).kv)
    try:
        expected = await collect(healthy.engine.submit(healthy.request("healthy", max_tokens=5)))
        asked: list[int] = []
        for name in ("first", "next"):
            async with asyncio.timeout(20):
                first, *rest = await collect(rig.engine.submit(rig.request(name, max_tokens=5)))
            assert rest == expected[1:]
            assert isinstance(first, Prefilled)
            assert first.usage.hits["computed"] == 5
            fault = "no byte in 0.5 s" if name == "first" else "paused after repeated failures"
            assert f"disk tier: {fault}" in first.usage.faults
            asked.append(disk.asked)
        assert asked[0] == asked[1] >= 3
    finally:
        disk.gate.set()
        for each in (rig, healthy):
            each.engine.close()
            each.store.close()


@pytest.fixture
def slow(tmp_path: Path) -> Generator[tuple[Rig, Gated]]:
    """A rig whose chunks lie on a disk that gives nothing yet."""
    disk = Gated(tmp_path)
    rig = Rig(memory=0, behind=[disk])
    for part in rig.bench.parts:
        disk.put(part.chunk, run(rig.bench.load(part.chunk)).kv)
    yield rig, disk
    disk.gate.set()
    rig.engine.close()
    rig.store.close()


async def test_a_prefill_that_waits_for_a_tier_lets_the_others_go_on(slow: tuple[Rig, Gated]) -> None:
    """Another prefill and its tokens, and one that waits as well; then the tier gives and the answers are right."""
    rig, disk = slow
    expected = (await collect(rig.engine.submit(rig.request("computed", "full", max_tokens=5))))[1:]
    held = [asyncio.create_task(collect(rig.engine.submit(rig.request(f"held{i}", max_tokens=5)))) for i in range(2)]
    await rig.until(lambda: "held0" in rig.trace)
    async with asyncio.timeout(20):
        beside = await collect(rig.engine.submit(rig.request("beside", "full", max_tokens=5)))
    assert beside[1:] == expected
    assert rig.engine.stats().running == 2
    disk.gate.set()
    for events in await asyncio.gather(*held):
        assert isinstance(events[0], Prefilled)
        assert events[0].usage.hits["disk"] == 5
        assert events[-1] == Finished("length")


async def test_waiting_for_a_tier_is_no_busy_loop_and_can_be_aborted(slow: tuple[Rig, Gated]) -> None:
    rig, _ = slow
    events = rig.engine.submit(rig.request("held"))
    pending = asyncio.ensure_future(anext(events))
    await rig.until(lambda: "held" in rig.trace)
    seen = len(rig.trace)
    await asyncio.sleep(0.2)
    assert len(rig.trace) - seen < 100  # a step waits for 5 ms
    rig.engine.abort("held")
    with pytest.raises(Cancelled):
        await pending


async def test_background_work_goes_on_while_the_only_query_waits(slow: tuple[Rig, Gated]) -> None:
    rig, _ = slow
    held = asyncio.ensure_future(anext(rig.engine.submit(rig.request("held"))))
    await rig.until(lambda: "held" in rig.trace)
    unknown = Chunk("f" * 64, rig.bench.suffix)
    waits = asyncio.ensure_future(anext(rig.engine.submit(rig.encode_request("waits"))))
    async with asyncio.timeout(20):
        encoded = await collect(rig.engine.submit(EncodeRequest("computes", (unknown,))))
    assert encoded == [Encoded("computed")]
    held.cancel()
    waits.cancel()


def test_time_that_others_take_between_the_steps_counts_as_queueing(rig: Rig) -> None:
    """Else the controller would learn that the device is slow."""
    source = ChunkSource(rig.store, rig._encode)
    start, slept = time.perf_counter(), 0.0
    for event in generate(rig.bench.model, source, rig.bench.prefixes, rig.request("a", max_tokens=1)):
        if isinstance(event, Prefilled):
            took = (time.perf_counter() - start) * 1000
            assert event.timings["queue"] >= slept * 1000 > 0
            assert event.prefill_ms <= took - slept * 1000
        elif event is None:
            time.sleep(0.005)
            slept += 0.005


async def test_a_failing_request_fails_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    good = rig.request("good", max_tokens=3)
    bad = replace(rig.request("bad"), strategy=Broken())
    with pytest.raises(ZeroDivisionError):
        await collect(rig.engine.submit(bad))
    assert len(await collect(rig.engine.submit(good))) == 5
    assert rig.engine.stats().alive


async def test_a_dead_device_thread_leaves_nobody_waiting(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    first = rig.engine.submit(rig.request("first", max_tokens=1000))
    second = rig.engine.submit(rig.request("second", max_tokens=1000))
    await anext(first)
    rig.trace = Trap(SystemExit())
    for events in (first, second):
        with pytest.raises(NotReady, match="has ended"):
            await collect(events)
    assert not rig.engine.stats().alive
    with pytest.raises(NotReady):
        rig.engine.submit(rig.request("late"))


def test_an_event_loop_that_closes_meanwhile_ends_its_own_streams_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin() -> AsyncGenerator[Event]:
        events = rig.engine.submit(rig.request("left", max_tokens=50))
        await anext(events)
        return events

    loop = asyncio.new_event_loop()
    events = loop.run_until_complete(begin())
    with monkeypatch.context() as patch:
        patch.setattr(loop, "is_closed", lambda: False)  # as whoever asked a moment ago was told
        loop.close()
        asyncio.run(rig.idle())
    assert rig.engine.stats().alive

    async def again() -> list[Event]:
        return await collect(rig.engine.submit(rig.request("next", max_tokens=3)))

    assert len(asyncio.run(again())) == 5
    del events


class Broken(Full):
    def prefill(self, prefill: Prefill) -> Steps:
        yield None
        raise ZeroDivisionError


class Trap(list[str]):
    """Raises on the next append."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self._error = error

    def append(self, item: str) -> None:
        raise self._error


async def test_closing_ends_open_streams_and_refuses_new_ones() -> None:
    rig = Rig()
    events = rig.engine.submit(rig.request("open", max_tokens=1000))
    await anext(events)
    await asyncio.to_thread(rig.engine.close)
    with pytest.raises(Cancelled):
        await collect(events)
    with pytest.raises(NotReady):
        rig.engine.submit(rig.request("late"))
    rig.store.close()


async def test_the_full_prefill_is_predicted(rig: Rig) -> None:
    events = await collect(rig.engine.submit(rig.request("a", "full", max_tokens=1)))
    assert isinstance(events[0], Prefilled)
    full = rig.bench.model.full_work(events[0].usage.prompt_tokens)
    assert events[0].predicted_full_prefill_ms == rig.controller.predict(full) * 1000 > 0
    expected, took = rig.first_guess.predict(rig.controller.amounts(full)), events[0].timings["stage2"] / 1000
    assert expected < rig.controller.predict(full) < took or expected > rig.controller.predict(full) > took
