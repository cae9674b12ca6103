"""Starting, ending, being killed: what was acknowledged is there, what was open gets an end."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from errors import CatalogueError, CatalogueUnavailable, ConfigError, ModelUnavailable
from service.client import Client, ClientError
from service.runtime import Runtime
from service.settings import load_settings
from tests.conftest import RedisServer
from tests.service.conftest import MakeProcess, MakeServer, Server, ServerProcess
from tests.service.test_api import SEALS, ask, wait_for


def put(server: Server, name: str, text: str, wait: float = 60) -> dict[str, Any]:
    with server.http() as http:
        answer = http.put(f"/documents/{name}?wait={wait}", json={"text": text})
        assert answer.status_code in (200, 202), answer.text
        return answer.json()  # type: ignore[no-any-return]


def boats(count: int) -> str:
    """A text that repeats no chunk."""
    return "".join(f"Boat number {index} is red and has {index % 7} oars. " for index in range(count))


class Stream(threading.Thread):
    """A client that reads one answer to its end, in a thread."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__()
        self._server = server
        self._max_tokens = max_tokens
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.torn: Exception | None = None
        self.start()
        wait_for(lambda: any(name == "token" for name, _ in self.events) or not self.is_alive())

    def run(self) -> None:
        body = {"question": "x", "max_tokens": self._max_tokens, "stream": True}
        try:
            with self._server.http() as http, http.stream("POST", "/query", json=body) as answer:
                name = ""
                for line in answer.iter_lines():
                    if line.startswith("event: "):
                        name = line.removeprefix("event: ")
                    elif line.startswith("data: "):
                        self.events.append((name, json.loads(line.removeprefix("data: "))))
        except httpx.HTTPError as error:
            self.torn = error


# The end


def test_sigterm_lets_a_short_answer_finish_and_exits_0(make_process: MakeProcess) -> None:
    server = make_process(drain_seconds=30)
    server.start()
    stream = Stream(server, max_tokens=1500)
    server.process.send_signal(signal.SIGTERM)
    with server.http() as http:
        wait_for(lambda: http.get("/health/ready").status_code == 503)
        assert "shutting down" in http.get("/health/ready").json()["detail"]
        refused = http.post("/query", json={"question": "late"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) > 0
    assert server.process.wait(60) == 0
    stream.join()
    assert stream.torn is None
    assert stream.events[-1][0] == "done"
    assert stream.events[-1][1]["usage"]["completion_tokens"] == 1500


def test_sigterm_ends_a_long_answer_with_an_error_event_and_exits_0(make_process: MakeProcess) -> None:
    server = make_process(drain_seconds=0.5)
    server.start()
    streams = [Stream(server, max_tokens=14000) for _ in range(3)]
    server.stop()
    for stream in streams:
        stream.join()
        assert stream.torn is None
        name, data = stream.events[-1]
        assert (name, data["error"]["code"], data["status"]) == ("error", "not_ready", 503)
    assert "Traceback" not in server.log.read_text()


def test_a_second_signal_does_not_wait(make_process: MakeProcess) -> None:
    server = make_process(drain_seconds=3000)
    server.start()
    stream = Stream(server, max_tokens=14000)
    server.process.send_signal(signal.SIGTERM)
    with server.http() as http:
        wait_for(lambda: http.get("/health/ready").status_code == 503)
    server.stop()
    stream.join()
    assert stream.torn is None
    assert stream.events[-1][0] == "error"


def test_the_end_while_indexing_loses_nothing(make_process: MakeProcess) -> None:
    server = make_process(precompute=False)
    server.start()
    job = put(server, "big", boats(600), wait=0)["job"]["id"]
    server.stop()
    server.start()
    with server.http() as http:
        wait_for(lambda: http.get(f"/jobs/{job}").json()["state"] == "succeeded", 60)
        assert http.get("/documents/big").json()["state"] == "ready"


def test_an_answer_still_retrieving_ends_with_the_server(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(drain_seconds=0).start()
    go_on = threading.Event()
    search = server.runtime.retriever.search
    monkeypatch.setattr(server.runtime.retriever, "search", lambda *args: (go_on.wait(60), search(*args))[1])
    told: list[httpx.Response] = []

    def query() -> None:
        with server.http() as http:
            told.append(http.post("/query", json={"question": "x", "max_tokens": 3000}))

    thread = threading.Thread(target=query)
    thread.start()
    wait_for(lambda: bool(server.runtime.pipeline.active))
    server.drain()
    wait_for(lambda: server.runtime.pipeline._aborting)
    go_on.set()
    thread.join()
    assert (told[0].status_code, told[0].json()["error"]["code"]) == (503, "not_ready")
    server.join()


def test_an_upload_that_waits_is_answered_before_the_end(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server().start()
    go_on = threading.Event()
    index = server.runtime.retriever.index
    monkeypatch.setattr(server.runtime.retriever, "index", lambda *args: (go_on.wait(60), index(*args))[1])
    told: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: told.append(put(server, "boats", boats(3))))
    thread.start()
    wait_for(lambda: server.runtime.catalogue.counts() == {"processing": 1})
    server.drain()
    thread.join()
    assert told[0]["job"]["state"] in ("pending", "running")
    go_on.set()
    server.join()
    server.start()
    wait_for(lambda: server.runtime.catalogue.counts() == {"ready": 1})


# The beginning


def test_a_signal_while_it_loads_ends_it(make_process: MakeProcess, tmp_path: Path) -> None:
    folder = tmp_path / "endless"
    folder.mkdir()
    os.mkfifo(folder / "config.json")  # whoever reads it waits for ever
    server = make_process(model=folder)
    server.launch()
    with server.http() as http:
        wait_for(lambda: _lives(http), 60)
        assert "being loaded" in http.get("/health/ready").json()["detail"]
    server.stop()


def test_a_data_folder_has_one_server(make_server: MakeServer) -> None:
    server = make_server().start()
    with pytest.raises(ConfigError, match="another server uses"):
        asyncio.run(Runtime(load_settings(**server.settings)).start())


def test_indexing_outlives_a_database_that_does_not_answer(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.ingest._RETRY_SECONDS", 0.01)
    server = make_server().start()
    for name in ("claim", "progress", "finish", "purges"):
        monkeypatch.setattr(server.runtime.jobs, name, Flaky(getattr(server.runtime.jobs, name)))
    put(server, "boats", boats(30))
    wait_for(lambda: server.runtime.catalogue.counts() == {"ready": 1})
    job = put(server, "seals", SEALS)["job"]["id"]
    wait_for(lambda: server.runtime.jobs.job(job).state == "succeeded")
    with Client(server.url) as client:
        assert ask(client, max_tokens=1, top_k=50)[1]["done"]["usage"]["chunk_hits"]["computed"] == 0


class Flaky:
    """The first two calls fail as a locked database does."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._calls = 0

    def __call__(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls <= 2:
            raise CatalogueUnavailable("the catalogue does not answer: database is locked; try again later")
        return self._call(*args)


def _lives(http: httpx.Client) -> bool:
    try:
        return http.get("/health/live").status_code == 200
    except httpx.ConnectError:
        return False


def test_it_lives_before_it_is_ready(make_process: MakeProcess) -> None:
    server = make_process()
    server.launch()
    with server.http() as http:
        wait_for(lambda: _lives(http), 60)
        seen = http.get("/health/ready")
        if seen.status_code == 503:
            assert "being loaded" in seen.json()["detail"]
            query = http.post("/query", json={"question": "x"})
            assert (query.status_code, query.json()["error"]["code"]) == (503, "not_ready")
        wait_for(lambda: http.get("/health/ready").status_code == 200, 60)


def test_a_start_that_fails_says_why_and_exits_1(make_process: MakeProcess) -> None:
    server = make_process(model="no-such-model")
    server.launch()
    assert server.process.wait(60) == 1
    assert "neither a folder nor a manifest entry" in server.log.read_text()
    assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"strategy": "profetkv"}, ConfigError, "PROPHETKV_STRATEGY"),
        ({"database_url": "sqlite:////proc/nowhere/x.sqlite"}, CatalogueError, "cannot open the catalogue"),
        ({"embedder": "smollm2-135m-instruct"}, ModelUnavailable, "is not a embedder"),
    ],
)
async def test_what_keeps_it_from_starting_is_named(
    make_server: MakeServer, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    server = make_server(**settings)
    with pytest.raises(error, match=message):
        await Runtime(load_settings(**server.settings)).start()


async def test_a_disk_tier_that_cannot_be_used_is_named(make_server: MakeServer) -> None:
    server = make_server()
    server.data.mkdir()
    (server.data / "kv").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"{server.data}/kv.*PROPHETKV_DISK_BYTES=0"):
        await Runtime(load_settings(**server.settings)).start()


def test_documents_and_their_kv_survive_a_restart(make_server: MakeServer) -> None:
    server = make_server().start()
    put(server, "boats", boats(20))
    with Client(server.url) as client:
        before = ask(client, max_tokens=20)
    assert before[1]["done"]["usage"]["chunk_hits"]["memory"] > 0
    server.stop()
    server.start()
    with Client(server.url) as client:
        after = ask(client, max_tokens=20)
    assert after[2] == before[2]
    hits = after[1]["done"]["usage"]["chunk_hits"]
    assert (hits["memory"], hits["computed"]) == (0, 0)
    assert hits["disk"] == before[1]["done"]["usage"]["chunk_hits"]["memory"]
    server.stop()


def test_another_chunk_size_reindexes_visibly_and_never_mixes(make_server: MakeServer) -> None:
    server = make_server(precompute=False).start()
    for number in range(6):
        put(server, f"d{number}", f"Boat {number} is red. " * 200)
    server.stop()
    server.settings["chunk_tokens"] = 32
    server.start()
    with server.http() as http, Client(server.url) as client:
        said: list[str] = []

        def reindexed() -> bool:
            _, data, _ = ask(client, max_tokens=1, top_k=50)
            lengths = {len(source["text"]) for source in data["sources"]["sources"]}
            assert max(lengths, default=0) < 32 * 8
            said.extend(data["done"]["usage"]["degraded"])
            return bool(http.get("/health/ready").json()["documents"] == {"ready": 6})

        wait_for(reindexed, 60)
    assert any("documents are not searchable yet" in text for text in said)


def test_a_model_for_which_reuse_is_not_proven_is_served_by_full_prefill(
    make_server: MakeServer, gpt2_folder: Path
) -> None:
    server = make_server(model=gpt2_folder).start()
    put(server, "boats", boats(20))
    with Client(server.url) as client, server.http() as http:
        usage = ask(client, max_tokens=5, top_k=3)[1]["done"]["usage"]
        assert (usage["strategy"], usage["ratio"], usage["completion_tokens"]) == ("full", 1.0, 5)
        assert usage["recomputed_tokens"] == usage["context_tokens"] > 0
        assert "model family 'gpt2' is not supported" in usage["fallback_reason"]
        for name in ("full", "auto"):
            assert ask(client, max_tokens=1, strategy={"name": name})[1]["done"]["usage"]["strategy"] == "full"
            bad = http.post("/query", json={"question": "x", "strategy": {"name": name, "ratio": 5}})
            assert (bad.status_code, bad.json()["error"]["code"]) == (422, "invalid_input")
            assert "strategy.ratio" in bad.json()["detail"]
        assert ask(client, max_tokens=1, strategy={"name": "auto", "score_layers": [1]})[1]["done"]
        refused = http.post("/query", json={"question": "x", "strategy": {"name": "prophetkv"}})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "reuse_refused")
        assert "gpt2" in refused.json()["detail"]


def test_text_without_any_token_is_refused(make_server: MakeServer, smollm: Path, tmp_path: Path) -> None:
    """Some tokenizers drop characters. An answer from a context that is not there would be silently worse."""
    from tests.tiny import save_tiny_model

    folder = save_tiny_model(smollm, tmp_path / "deaf")
    told = json.loads((folder / "tokenizer.json").read_text())
    told["normalizer"] = {"type": "Replace", "pattern": {"Regex": "[^\\x00-\\x7f]+"}, "content": ""}
    (folder / "tokenizer.json").write_text(json.dumps(told))
    server = make_server(model=folder).start()
    with server.http() as http:
        refused = http.post("/query", json={"question": "x", "contexts": ["fine", "\u4f60\u597d"], "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "invalid_input")
        assert "no token of contexts[1]" in refused.json()["detail"]
        job = http.put("/documents/deaf?wait=30", json={"text": "\u4f60\u597d"}).json()["job"]
        assert job["state"] == "failed"
        assert "no token of this text" in job["error"]
        assert http.get("/documents/deaf").json()["state"] == "failed"


def test_another_model_computes_its_own_kv(make_server: MakeServer, smollm: Path, tmp_path: Path) -> None:
    """Same tokenizer, other weights: chunks stay, their KV is not used and is computed ahead again."""
    from tests.tiny import save_tiny_model

    server = make_server().start()
    put(server, "boats", boats(20))
    server.stop()
    server.settings["model"] = str(save_tiny_model(smollm, tmp_path / "other", seed=1))
    server.settings["precompute"] = False
    server.start()
    with Client(server.url) as client:
        hits = ask(client, max_tokens=1, top_k=2)[1]["done"]["usage"]["chunk_hits"]
        assert (hits["disk"], hits["computed"]) == (0, 2)
    server.stop()
    server.settings["precompute"] = True
    server.start()
    with Client(server.url) as client, server.http() as http:

        def all_encoded() -> bool:
            text = http.get("/metrics").text
            return 'prophetkv_ingest_jobs_total{state="succeeded"} 1.0' in text

        wait_for(all_encoded)
        hits = ask(client, max_tokens=1, top_k=50)[1]["done"]["usage"]["chunk_hits"]
        assert hits["computed"] == 0


# kill -9


def crash(server: ServerProcess, chance: random.Random, round_: int, acknowledged: set[str]) -> bool:
    """Writes documents from two threads, kills the server at a random moment, checks; True if it was processing.

    Each document has a collection of its own, so that a query gives all of its chunks.
    """
    stop = threading.Event()
    sent: dict[str, list[str]] = {}  # the text acknowledged last and all that was sent after it

    def write(writer: int) -> None:
        number = 0
        while not stop.is_set():
            name = f"w{writer}-{round_}-{number % 3}"
            text = f"Round {round_} writer {writer} number {number}. " * chance.randrange(5, 400)
            sent.setdefault(name, []).append(text)
            try:
                with server.http() as http:
                    if http.put(f"/documents/{name}?collection={name}", json={"text": text}).status_code in (200, 202):
                        sent[name] = [text]
                        acknowledged.add(name)
            except httpx.HTTPError:
                pass
            number += 1

    writers = [threading.Thread(target=write, args=(writer,)) for writer in range(2)]
    for writer in writers:
        writer.start()
    time.sleep(chance.uniform(0.05, 1.5))

    def is_processing() -> bool:
        try:
            with server.http() as http:
                return "processing" in http.get("/health/ready").json().get("documents", {})
        except httpx.HTTPError:
            return False

    if round_ % 2:  # of two kills one comes when it comes, the other in the middle of a document
        wait_for(is_processing, 60)
    server.kill()
    with sqlite3.connect(server.data / "catalogue.sqlite") as left:
        [[processing]] = left.execute("select count(*) from revisions where state = 'processing'")
    stop.set()
    for writer in writers:
        writer.join()
    server.start()
    with server.http() as http:

        def settled() -> bool:
            return set(http.get("/health/ready").json()["documents"]) <= {"ready"}

        wait_for(settled, 120)
        for name in acknowledged:
            info = http.get(f"/documents/{name}?collection={name}").json()
            assert (info["state"], info["answers"]) == ("ready", True), info
        for name in acknowledged & sent.keys():
            query = {"question": "Which?", "collection": name, "top_k": 100, "max_tokens": 1}
            sources = http.post("/query", json={**query, "strategy": {"name": "naive"}}).json()["sources"]
            parts = sorted((source["start"], source["text"]) for source in sources)
            assert "".join(text for _, text in parts).strip() in [text.strip() for text in sent[name]], name
    return bool(processing)


def run_crashes(make_process: MakeProcess, rounds: int, seed: int) -> int:
    chance = random.Random(seed)
    print("seed", seed)
    server = make_process(max_context_tokens=16000)
    server.start()
    acknowledged: set[str] = set()
    return sum(crash(server, chance, round_, acknowledged) for round_ in range(rounds))


def test_kill_9_loses_nothing(make_process: MakeProcess) -> None:
    run_crashes(make_process, rounds=2, seed=1)


@pytest.mark.slow
def test_kill_9_twenty_times(make_process: MakeProcess) -> None:
    """`make test-slow`. At least half of the kills hit the server while it processes a document."""
    processing = run_crashes(make_process, rounds=20, seed=2)
    print(processing, "of 20 kills while processing")
    assert processing >= 10


# Tiers


def redis_keys(server: RedisServer) -> int:
    with redis.Redis.from_url(server.url) as client:
        return len(client.keys("prophetkv:*"))


def test_a_wiped_disk_is_served_from_redis_and_a_dead_redis_costs_no_answer(
    make_server: MakeServer, own_redis: RedisServer
) -> None:
    server = make_server(redis_url=own_redis.url).start()
    put(server, "boats", boats(20))
    with Client(server.url) as client:
        expected = ask(client, max_tokens=20, top_k=3)[2]
    wait_for(lambda: redis_keys(own_redis) > 0)
    server.stop()
    for path in (server.data / "kv").rglob("*.kv"):
        path.unlink()
    server.start()
    with Client(server.url) as client:
        _, data, text = ask(client, max_tokens=20, top_k=3)
        assert data["done"]["usage"]["chunk_hits"] == {"memory": 0, "disk": 0, "redis": 3, "computed": 0}
        assert text == expected
    server.stop()
    for path in (server.data / "kv").rglob("*.kv"):
        path.unlink()
    server.start()
    own_redis.stop()
    with Client(server.url) as client, server.http() as http:
        _, data, text = ask(client, max_tokens=20, top_k=3)
        usage = data["done"]["usage"]
        assert usage["chunk_hits"]["computed"] == 3
        assert text == expected
        assert any(fault.startswith("redis tier") for fault in usage["degraded"])
        metrics = http.get("/metrics").text
        assert 'prophetkv_degraded_total{what="redis tier"} ' in metrics
        assert 'prophetkv_chunk_kv_errors_total{tier="redis"}' in metrics
    server.stop()


def test_a_redis_stopped_in_the_middle_of_a_query(make_server: MakeServer, own_redis: RedisServer) -> None:
    """It freezes between two chunks of one request: the request goes on without it and says so."""
    server = make_server(redis_url=own_redis.url, memory_bytes=0, disk_bytes=0, chunk_tokens=16, redis_timeout_ms=100)
    server.start()
    put(server, "boats", boats(120))
    tier = server.runtime.store.tiers[-1]
    with Client(server.url) as client:
        expected = ask(client, max_tokens=5, top_k=100)[2]
        done: list[Any] = []
        query = threading.Thread(target=lambda: done.append(ask(client, max_tokens=5, top_k=100)))
        before = tier.stats.hits
        query.start()
        while tier.stats.hits < before + 5:
            pass
        own_redis.process.send_signal(signal.SIGSTOP)
        query.join()
        own_redis.process.send_signal(signal.SIGCONT)
    _, data, text = done[0]
    assert text == expected
    usage = data["done"]["usage"]
    assert usage["chunk_hits"]["redis"] >= 5
    assert usage["chunk_hits"]["computed"] > 0
    assert any(fault.startswith("redis tier") for fault in usage["degraded"])
    server.stop()


def test_deleting_a_document_removes_its_kv_from_every_tier(make_server: MakeServer, redis_server: RedisServer) -> None:
    server = make_server(redis_url=redis_server.url).start()
    put(server, "boats", boats(20))
    put(server, "both", boats(20) + SEALS * 20)

    def files() -> int:
        return len(list((server.data / "kv").rglob("*.kv")))

    with server.http() as http:
        held = http.get("/documents/boats").json()["chunks"]
        wait_for(lambda: redis_keys(redis_server) == files() > held)
        assert http.delete("/documents/both").status_code == 204
        wait_for(lambda: redis_keys(redis_server) == files() == held)
        assert f'prophetkv_chunk_kv_entries{{tier="memory"}} {held}.0' in http.get("/metrics").text
        assert http.delete("/documents/boats").status_code == 204
        wait_for(lambda: redis_keys(redis_server) == files() == 0)
    server.stop()


def test_a_deletion_while_redis_is_down_reaches_it_later(make_server: MakeServer, own_redis: RedisServer) -> None:
    server = make_server(redis_url=own_redis.url).start()
    put(server, "boats", boats(20))
    wait_for(lambda: redis_keys(own_redis) > 0)
    own_redis.process.send_signal(signal.SIGSTOP)
    with server.http() as http:
        assert http.delete("/documents/boats").status_code == 204
        own_redis.process.send_signal(signal.SIGCONT)
        wait_for(lambda: redis_keys(own_redis) == 0, 40)
    server.stop()


def test_precompute_off_computes_on_the_first_question(make_server: MakeServer) -> None:
    server = make_server(precompute=False).start()
    put(server, "boats", boats(20))
    assert not list((server.data / "kv").rglob("*.kv"))
    with Client(server.url) as client:
        assert ask(client, max_tokens=1, top_k=2)[1]["done"]["usage"]["chunk_hits"]["computed"] == 2
        assert ask(client, max_tokens=1, top_k=2)[1]["done"]["usage"]["chunk_hits"]["memory"] == 2
    server.stop()


# Overload


def test_a_full_queue_is_a_429_before_any_byte(make_server: MakeServer) -> None:
    server = make_server(max_waiting=2, max_running=1, drain_seconds=0).start()
    streams = [Stream(server, max_tokens=14000)]
    waiting = [threading.Thread(target=_swallow, args=(server,), daemon=True) for _ in range(2)]
    with server.http() as http:
        for thread in waiting:
            thread.start()
        engine: Callable[[], dict[str, Any]] = lambda: http.get("/health/ready").json()["engine"]  # noqa: E731
        wait_for(lambda: engine()["waiting"] == 2)
        for stream in (True, False):
            answer = http.post("/query", json={"question": "x", "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
            assert int(answer.headers["retry-after"]) >= 1
        ready = http.get("/health/ready")
        assert (ready.status_code, ready.json()["reasons"]) == (503, {"queue": "2 queries are waiting"})
        assert 'prophetkv_requests_rejected_total{reason="queue_full"} 2.0' in http.get("/metrics").text
    server.stop()
    for thread in (*streams, *waiting):
        thread.join()


def _swallow(server: Server) -> None:
    try:
        with Client(server.url) as client:
            ask(client, max_tokens=1)
    except ClientError:
        pass
