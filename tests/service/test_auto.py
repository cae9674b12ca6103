"""The strategy `auto` on a running server: slow tiers, fast tiers, empty tiers, and what happens afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Counter

from cache_store.base import OWN_MEMORY, Chunk, ChunkKV, Landing
from cache_store.disk import DiskStore
from engine.controller import Controller
from engine.costs import LinearCost
from errors import PromptTooLong
from service.backlog import Backlog
from service.client import Client, ClientError
from tests.service.conftest import MakeServer, Server
from tests.service.test_api import ask, wait_for
from tests.service.test_lifecycle import boats, put

CONTEXT = boats(130)  # about 2,000 tokens


class SlowDisk(DiskStore):
    """A disk that takes long to give what it holds."""

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        kv = super().get(chunk, landing)
        if kv is not None:
            time.sleep(0.2)
            self.stats.read_seconds += 0.2
        return kv


@pytest.fixture(autouse=True)
def _known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that takes 30 ps for an operation, whatever this machine does: what is decided does not hang on load."""

    def know(model: object, prefixes: object, prefix: object, controller: Controller) -> None:
        controller.compute = LinearCost((1e-9, 3e-11, 3e-11, 3e-11, 3e-11, 1e-11))
        monkeypatch.setattr(controller, "observe", lambda work, seconds, trial=False: None)

    monkeypatch.setattr("service.runtime.calibrate", know)


def usage_of(server: Server, **body: Any) -> dict[str, Any]:
    with Client(server.url) as client:
        done = ask(client, max_tokens=1, contexts=[CONTEXT], **body)[1]["done"]
    assert done["usage"]["fallback_reason"] is None
    return {**done["usage"], "timings": done["timings"]}


def auto_server(make_server: MakeServer, model: Path, **settings: object) -> Server:
    return make_server(model, strategy="auto", chunk_tokens=256, **settings).start()


def test_auto_learns_that_a_tier_is_slow_and_that_it_is_fast_again(
    make_server: MakeServer, small_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.runtime.DiskStore", SlowDisk)
    server = auto_server(make_server, small_folder, memory_bytes=0)
    usage_of(server, strategy={"name": "naive"})  # stores all chunks
    server.runtime.store.flush()
    told = usage_of(server)
    chunks = told["decision"]["chunks"]
    assert (told["strategy"], told["decision"]["strategy"], told["decision"]["trial"]) == ("full", "full", False)
    assert chunks["missing"] == 0
    count = chunks["load"] + chunks["compute"]
    assert count > 5
    assert told["timings"]["predicted_ms"] == told["decision"]["predicted_ms"]["full"]
    assert told["decision"]["predicted_ms"]["prophetkv"] > told["decision"]["predicted_ms"]["full"]
    named = usage_of(server, strategy={"name": "prophetkv"})
    assert (named["strategy"], named["decision"], named["timings"]["predicted_ms"]) == ("prophetkv", None, None)
    assert named["chunk_hits"]["disk"] > 0
    with server.http() as http:
        metrics = http.get("/metrics").text
    assert 'prophetkv_auto_decisions_total{strategy="full"} 1.0' in metrics
    assert "prophetkv_auto_prediction_error_count" in metrics
    server.stop()
    monkeypatch.setattr("service.runtime.DiskStore", DiskStore)
    server.start()
    told = usage_of(server)
    assert (told["strategy"], told["ratio"]) == ("prophetkv", 0.2)
    assert told["chunk_hits"]["disk"] == count
    assert told["timings"]["predicted_ms"] == told["decision"]["predicted_ms"]["prophetkv"]


def test_what_was_missing_is_encoded_afterwards_and_the_second_question_is_warm(
    make_server: MakeServer, small_folder: Path
) -> None:
    server = auto_server(make_server, small_folder, disk_bytes=0, precompute=False)
    first = usage_of(server)
    missing = first["decision"]["chunks"]["missing"]
    assert (first["strategy"], first["chunk_hits"]["computed"]) == ("full", 0)
    assert missing > 0
    wait_for(lambda: server.runtime.store.tiers[0].stats.entries == missing)
    second = usage_of(server)
    assert (second["strategy"], second["chunk_hits"]["memory"]) == ("prophetkv", missing)
    assert second["decision"]["chunks"] == {"load": missing, "compute": 0, "missing": 0}


def test_what_was_deleted_meanwhile_is_not_encoded(make_server: MakeServer) -> None:
    server = make_server(strategy="auto", precompute=False, disk_bytes=0).start()
    put(server, "boats", boats(20))
    with Client(server.url) as client, server.http() as http:
        usage = ask(client, max_tokens=1, top_k=5)[1]["done"]["usage"]
        assert usage["strategy"] == "full"
        assert http.delete("/documents/boats").status_code == 204
    wait_for(lambda: not server.runtime.jobs.purges() and not server.runtime.engine.stats().background)
    assert server.runtime.store.tiers[0].stats.entries == 0


def test_the_backlog_is_bounded_and_forgets() -> None:
    dropped = Counter("dropped", "", registry=None)
    backlog = Backlog(100, 2, dropped)
    chunks = [Chunk(f"{number:064x}", (0,) * 20) for number in range(4)]
    backlog.add([chunks[0], chunks[0], chunks[1]])
    backlog.add([chunks[2], Chunk("f" * 64, (0,) * 10)])
    assert [len(chunk.token_ids) for chunk in backlog.waiting()] == [20, 20, 10]
    assert dropped._value.get() == 1
    assert backlog.filled.is_set()
    backlog.discard([chunks[0].key, chunks[2].key])
    backlog.add([chunks[3]])
    assert [chunk.key for chunk in backlog.waiting()] == [chunks[1].key, "f" * 64, chunks[3].key]
    backlog.discard([chunk.key for chunk in backlog.waiting()])
    assert not backlog.filled.is_set()


def test_loading_begins_before_the_prompt_is_tokenised_and_ends_with_the_request(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    refuse = False

    class Watched(DiskStore):
        def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
            begun.set()
            return super().get(chunk, landing)

    monkeypatch.setattr("service.runtime.DiskStore", Watched)
    server = make_server(memory_bytes=0).start()
    put(server, "boats", boats(20))
    prompt, prefetcher = server.runtime.pipeline._prompt, server.runtime._prefetcher
    assert prefetcher is not None
    tokenise = prompt.suffix

    def waits(question: str) -> tuple[tuple[int, ...], tuple[int, int]]:
        assert begun.wait(20), "nothing was loaded before the question was tokenised"
        if refuse:
            raise PromptTooLong("too long")
        return tokenise(question)

    monkeypatch.setattr(prompt, "suffix", waits)
    begun.clear()
    with Client(server.url) as client:
        usage = ask(client, max_tokens=1, top_k=3)[1]["done"]["usage"]
        assert usage["chunk_hits"]["disk"] == 3
        reads = server.runtime.store.tiers[1].stats.hits
        assert prefetcher.held() == 0
        begun.clear()
        refuse = True
        with pytest.raises(ClientError, match="too long"):
            ask(client, max_tokens=1, top_k=3)
        wait_for(lambda: prefetcher.held() == 0)
        begun.set()
        refuse = False
        assert ask(client, max_tokens=1, top_k=3, strategy={"name": "full"})[1]["done"]["usage"]["strategy"] == "full"
    assert server.runtime.store.tiers[1].stats.hits <= reads + 3


def test_nothing_is_loaded_ahead_when_that_is_turned_off(make_server: MakeServer) -> None:
    server = make_server(memory_bytes=0, prefetch_bytes=0).start()
    put(server, "boats", boats(20))
    with Client(server.url) as client:
        assert ask(client, max_tokens=1, top_k=3)[1]["done"]["usage"]["chunk_hits"]["disk"] == 3


def test_the_most_used_chunks_are_in_memory_after_a_restart(make_server: MakeServer) -> None:
    question = "Which boat has number 17?"
    server = make_server(warm_up=True).start()
    put(server, "boats", boats(60))
    with Client(server.url) as client:
        for _ in range(2):
            sources = ask(client, question=question, max_tokens=1, top_k=2)[1]["sources"]["sources"]
        ask(client, question="Which number has seven oars?", max_tokens=1, top_k=10)
    chunks = server.runtime.store.tiers[1].stats.entries
    assert chunks > 10
    server.stop()
    server.settings["memory_bytes"] = 2 * 64 * 512  # two chunks
    server.start()
    memory = server.runtime.store.tiers[0]
    wait_for(lambda: memory.stats.entries == 2)
    with Client(server.url) as client:
        found = ask(client, question=question, max_tokens=1, top_k=2)[1]
    assert found["done"]["usage"]["chunk_hits"]["memory"] == 2
    assert [source["start"] for source in found["sources"]["sources"]] == [source["start"] for source in sources]
    server.stop()
    server.settings["warm_up"] = False
    server.start()
    assert server.runtime.store.tiers[0].stats.entries == 0
    server.stop()
