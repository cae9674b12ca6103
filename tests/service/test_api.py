"""The HTTP surface, over real sockets to the real server."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.strategies import SERVED
from service.client import Client, ClientError
from tests.retriever.files import pdf, word
from tests.service.conftest import Server

BOATS = "The Alke is a red rigid inflatable boat with two outboard engines. "
SEALS = "Grey seals have their pups on the skerries in November. "
PHASES = ("retrieve", "queue", "load", "assemble", "stage1", "select", "stage2", "first_token", "total")


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def fleet(server: Server) -> str:
    """A collection with two documents, ready and precomputed."""
    with server.http() as http:
        for name, text in (("boats", BOATS * 20), ("seals", SEALS * 20)):
            answer = http.put(f"/documents/{name}?collection=fleet&wait=60", json={"text": text, "title": name.title()})
            assert answer.status_code == 202, answer.text
            assert answer.json()["job"]["state"] == "succeeded"
    return "fleet"


def ask(client: Client, **body: Any) -> tuple[list[str], dict[str, Any], str]:
    """Event names, the data of `sources` and `done`, the answer."""
    names, data, text = [], {}, ""
    for name, value in client.ask(body.pop("question", "Which boat is red?"), **body):
        names.append(name)
        data[name] = value
        text += value["text"] if name == "token" else ""
    return names, data, text


# Queries


def test_a_streamed_answer_has_sources_tokens_and_done(client: Client, fleet: str) -> None:
    names, data, text = ask(client, collection=fleet, max_tokens=12, top_k=4)
    assert names[0] == "sources"
    assert names[-1] == "done"
    assert set(names[1:-1]) <= {"token", "citation"}
    assert text
    sources = data["sources"]["sources"]
    assert [source["index"] for source in sources] == [1, 2, 3, 4]
    assert sources[0]["document"] == "boats"
    assert sources[0]["score"] >= sources[-1]["score"]
    assert sources[0]["text"] == (BOATS * 20)[sources[0]["start"] : sources[0]["end"]]
    done = data["done"]
    assert done["finish_reason"] == "length"
    assert set(done["timings"]) == {f"{phase}_ms" for phase in PHASES}
    usage = done["usage"]
    assert (usage["strategy"], usage["ratio"], usage["completion_tokens"]) == ("prophetkv", 0.2, 12)
    assert usage["recomputed_tokens"] == int(0.2 * usage["context_tokens"])
    assert usage["chunk_hits"] == {"memory": 4, "disk": 0, "redis": 0, "computed": 0}
    assert usage["bytes_loaded"] > 0
    assert usage["degraded"] == []
    assert usage["fallback_reason"] is None
    assert usage["predicted_full_prefill_ms"] > 0


def test_the_same_answer_not_streamed(http: httpx.Client, client: Client, fleet: str) -> None:
    body = {"question": "Which boat is red?", "collection": fleet, "max_tokens": 12}
    answer = http.post("/query", json=body)
    assert answer.status_code == 200
    told = answer.json()
    assert told["answer"] == ask(client, collection=fleet, max_tokens=12)[2]
    assert set(told) == {"answer", "sources", "citations", "finish_reason", "usage", "timings"}
    assert answer.headers["x-request-id"]


def test_the_stream_on_the_wire(http: httpx.Client, fleet: str) -> None:
    with http.stream(
        "POST", "/query", json={"question": "x", "collection": fleet, "max_tokens": 3, "stream": True}
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        wire = answer.read().decode()
    for block in wire.strip().split("\n\n"):
        assert re.fullmatch(r"event: (sources|token|citation|done)\ndata: \{.*\}", block), block
    assert not re.search(r'event: token\ndata: \{"text": ""\}', wire)


@pytest.mark.parametrize("strategy", sorted(SERVED))
def test_every_strategy_is_chosen_by_request(client: Client, fleet: str, strategy: str) -> None:
    _, data, _ = ask(client, collection=fleet, max_tokens=2, strategy={"name": strategy, "ratio": 0.5})
    usage = data["done"]["usage"]
    context = usage["context_tokens"]
    expected = {"full": (1.0, context), "prefix": (1.0, context), "naive": (0.0, 0)}
    assert (usage["ratio"], usage["recomputed_tokens"]) == expected.get(strategy, (0.5, context // 2))
    assert (sum(usage["chunk_hits"].values()) == 0) == (strategy in ("full", "prefix"))
    assert (usage["strategy"], usage["fallback_reason"]) == (strategy, None)


def test_ratio_one_answers_like_full(client: Client, fleet: str) -> None:
    full = ask(client, collection=fleet, max_tokens=30, strategy={"name": "full"})[2]
    assert ask(client, collection=fleet, max_tokens=30, strategy={"name": "prophetkv", "ratio": 1.0})[2] == full
    assert ask(client, collection=fleet, max_tokens=30, strategy={"name": "naive"})[2] != full


def test_contexts_bypass_retrieval_and_keep_their_order(client: Client) -> None:
    texts = ["First text. " * 40, "Second text. " * 5, "Third."]
    _, data, _ = ask(client, contexts=texts, max_tokens=2)
    sources = data["sources"]["sources"]
    assert [source["context"] for source in sources] == sorted(source["context"] for source in sources)
    assert len({source["context"] for source in sources}) == 3
    for index, text in enumerate(texts):
        assert "".join(source["text"] for source in sources if source["context"] == index) == text
    assert data["done"]["usage"]["chunk_hits"]["computed"] == len(sources)
    _, again, _ = ask(client, contexts=texts[::-1], max_tokens=2)
    assert again["done"]["usage"]["chunk_hits"]["memory"] == len(sources)


def test_sampling_is_repeatable_by_seed(client: Client, fleet: str) -> None:
    options: dict[str, Any] = {"collection": fleet, "max_tokens": 20, "temperature": 1.5, "top_p": 0.9}
    first, second, third = (ask(client, **options, seed=seed)[2] for seed in (1, 1, 2))
    assert first == second != third


def test_a_stop_string_ends_the_answer_before_it(client: Client, fleet: str) -> None:
    whole = ask(client, collection=fleet, max_tokens=40)[2]
    cut = len(whole) // 2
    stop = whole[cut : cut + 4]
    names, data, text = ask(client, collection=fleet, max_tokens=40, stop=[stop, "never"])
    assert text == whole[: whole.index(stop)]
    assert data["done"]["finish_reason"] == "stop"
    assert names[-1] == "done"


def test_no_documents_is_an_answer_without_sources(client: Client) -> None:
    names, data, _ = ask(client, max_tokens=2)
    assert data["sources"] == {"sources": [], "dropped": 0}
    assert names[-1] == "done"


def test_what_does_not_fit_is_dropped_from_the_lowest_and_said(http: httpx.Client, client: Client) -> None:
    http.put(
        "/documents/long?collection=long&wait=60",
        json={"text": "".join(f"Boat number {i} is red. " for i in range(800))},
    )
    _, data, _ = ask(client, collection="long", top_k=100, max_tokens=1000)
    sources, usage = data["sources"], data["done"]["usage"]
    assert sources["dropped"] == usage["dropped_chunks"] > 0
    assert len(sources["sources"]) + sources["dropped"] == 100
    assert usage["prompt_tokens"] + 1000 <= 4000
    scores = [source["score"] for source in sources["sources"]]
    assert scores == sorted(scores, reverse=True)


# Documents and jobs


def test_every_format_over_http(http: httpx.Client, client: Client) -> None:
    files = {
        "a.txt": b"The generator stands in shed four.",
        "b.md": b"# Depth\n\nThe fjord is 312 metres deep.",
        "c.html": b"<html><body><h1>Cook</h1><p>The cook is called Runa.</p></body></html>",
        "d.pdf": pdf(["Front page.", "The lighthouse has 88 steps."]),
        "e.docx": word([("Heading 1", "Ferry"), ("Normal", "The ferry leaves at 07:15.")]),
    }
    for name, content in files.items():
        answer = http.put(f"/documents/{name}?collection=formats&wait=60", files={"file": (name, content)})
        assert answer.status_code == 202, answer.text
        assert answer.json()["document"]["state"] == "ready"
    listed = http.get("/documents?collection=formats&limit=3").json()
    assert ([info["id"] for info in listed["documents"]], listed["next"]) == (["a.txt", "b.md", "c.html"], "c.html")
    assert [info["id"] for info in http.get("/documents?collection=formats&after=c.html").json()["documents"]] == [
        "d.pdf",
        "e.docx",
    ]
    for question, document, place in (
        ("How many steps has the lighthouse?", "d.pdf", {"page": 1, "last_page": 2}),
        ("When does the ferry leave?", "e.docx", {"heading": "Ferry"}),
        ("How deep is the fjord?", "b.md", {"heading": "Depth"}),
    ):
        source = ask(client, question=question, collection="formats", max_tokens=1, top_k=1)[1]["sources"]["sources"][0]
        assert source["document"] == document
        assert place == {name: source[name] for name in place}


def test_upsert_unchanged_updated_replaced(http: httpx.Client, client: Client) -> None:
    url = "/documents/note?collection=upsert"
    first = http.put(url + "&wait=60", json={"text": BOATS})
    assert (first.status_code, first.json()["result"]) == (202, "created")
    assert first.headers["location"] == f"/jobs/{first.json()['job']['id']}"
    again = http.put(url, json={"text": BOATS})
    assert (again.status_code, again.json()["result"]) == (200, "unchanged")
    titled = http.put(url, json={"text": BOATS, "title": "Boats", "metadata": {"year": 2023}})
    assert (titled.status_code, titled.json()["result"]) == (200, "updated")
    replaced = http.put(url + "&wait=60", json={"text": SEALS, "title": "Seals"})
    assert (replaced.status_code, replaced.json()["result"]) == (202, "replaced")
    sources = ask(client, collection="upsert", max_tokens=1)[1]["sources"]["sources"]
    assert [source["text"] for source in sources] == [SEALS]


def test_post_finds_its_document_again(http: httpx.Client) -> None:
    file = {"file": ("n.txt", b"Some words.")}
    first = http.post("/documents?collection=posted&wait=60", files=file)
    again = http.post("/documents?collection=posted", files=file)
    other = http.post("/documents?collection=posted", files={"file": ("m.txt", b"Some words.")})
    assert (first.status_code, again.status_code, other.status_code) == (202, 200, 202)
    ids = [answer.json()["document"]["id"] for answer in (first, again, other)]
    assert ids[0] == ids[1] != ids[2]
    assert again.json()["result"] == "unchanged"


def test_metadata_and_title_by_multipart(http: httpx.Client) -> None:
    answer = http.put(
        "/documents/m?collection=meta&wait=60",
        files={"file": ("m.txt", b"Words.")},
        data={"title": "A title", "metadata": '{"tags": ["a"]}'},
    )
    assert answer.status_code == 202
    told = http.get("/documents/m?collection=meta").json()
    assert datetime.fromisoformat(told["created_at"]).utcoffset() == timedelta(0)
    assert (told["title"], told["metadata"], told["kind"], told["answers"]) == ("A title", {"tags": ["a"]}, "txt", True)


def test_delete_takes_a_document_out_of_answers(http: httpx.Client, client: Client) -> None:
    http.put("/documents/gone?collection=gone&wait=60", json={"text": BOATS})
    assert http.delete("/documents/gone?collection=gone").status_code == 204
    assert http.get("/documents/gone?collection=gone").status_code == 404
    assert http.delete("/documents/gone?collection=gone").status_code == 404
    assert ask(client, collection="gone", max_tokens=1)[1]["sources"]["sources"] == []


def test_a_job_reports_and_is_cancelled(http: httpx.Client) -> None:
    job = http.put("/documents/big?collection=jobs", json={"text": BOATS * 2500}).json()["job"]
    assert job["state"] in ("pending", "running")
    assert set(job["progress"]) == {"stage", "done", "total"}
    cancelled = http.delete(f"/jobs/{job['id']}").json()
    assert cancelled["state"] == "cancelled"
    wait_for(lambda: http.get("/documents/big?collection=jobs").json()["state"] in ("failed", "ready"))
    assert http.get(f"/jobs/{job['id']}").json()["state"] == "cancelled"


# Bad input

BAD_QUERIES: list[tuple[Any, int, str, str]] = [
    ({}, 422, "invalid_input", "question"),
    ({"question": ""}, 422, "invalid_input", "question"),
    ({"question": " \n"}, 422, "invalid_input", "empty"),
    ({"question": "x", "contexts": ["fine", " "]}, 422, "invalid_input", r"contexts\[1\] is empty"),
    ({"question": "x", "contexts": []}, 422, "invalid_input", "contexts"),
    ({"question": "x", "strategy": {"name": "profetkv"}}, 422, "unknown_strategy", "full, prefix, naive"),
    ({"question": "x", "strategy": {"name": "oracle"}}, 422, "unknown_strategy", "oracle"),
    ({"question": "x", "strategy": {"ratio": 0.5}}, 422, "invalid_input", "strategy.name"),
    ({"question": "x", "strategy": {"name": 7}}, 422, "invalid_input", "strategy.name"),
    ({"question": "x", "strategy": {"name": "epic", "k": "2"}}, 422, "invalid_input", "strategy.k: .*valid integer"),
    ({"question": "x", "strategy": {"name": "full", "k": 2}}, 422, "invalid_input", "strategy.k: Extra inputs"),
    ({"question": "x", "strategy": {"name": "prophetkv", "smooth": 4}}, 422, "invalid_input", "odd"),
    ({"question": "x", "strategy": {"name": "prophetkv", "score_layers": [5]}}, 422, "invalid_input", "layers 0 to 1"),
    ({"question": "x", "strategy": {"name": "cacheblend", "check_layer": 2}}, 422, "invalid_input", "at most 1"),
    ({"question": "x", "strategy": {"name": "full", "ratio": 1.5}}, 422, "invalid_input", "less than or equal to 1"),
    ({"question": "x", "strategy": {"name": "full", "ratio": -1}}, 422, "invalid_input", "greater than or equal to 0"),
    ({"question": "x", "collection": "nowhere"}, 404, "not_found", "nowhere"),
    ({"question": "x", "collection": "../etc"}, 422, "invalid_input", "collection"),
    ({"question": "x", "filters": {"a": 1}}, 422, "invalid_input", "filters"),
    ({"question": "x", "top_k": 0}, 422, "invalid_input", "top_k"),
    ({"question": "x", "temprature": 1}, 422, "invalid_input", "temprature"),
    ({"question": "word " * 5000}, 400, "context_length_exceeded", "the window is 4000"),
    ({"question": "x" * 130_000}, 400, "context_length_exceeded", "130000 characters; the window of 4000"),
    ({"question": "x", "contexts": ["x" * 130_000]}, 400, "context_length_exceeded", "130000 characters"),
    ({"question": "x", "max_tokens": 4000}, 400, "context_length_exceeded", "the window is 4000"),
    ({"question": "x", "contexts": ["word " * 9000]}, 400, "context_length_exceeded", r"the contexts need \d+ tokens"),
    ([1, 2], 422, "invalid_input", "dictionary"),
]


@pytest.mark.parametrize(("body", "status", "code", "message"), BAD_QUERIES)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_queries_say_what_was_wrong(
    http: httpx.Client, body: Any, status: int, code: str, message: str, stream: bool
) -> None:
    if isinstance(body, dict):
        body = {**body, "stream": stream}
    assert_problem(http.post("/query", json=body), status, code, message)


def test_a_prompt_of_exactly_the_window(http: httpx.Client) -> None:
    body = {"question": "x", "contexts": ["word " * 3400], "strategy": {"name": "prophetkv", "ratio": 0.01}}
    used = http.post("/query", json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
    rest = 4000 - used
    assert 0 < rest < 400
    told = http.post("/query", json={**body, "max_tokens": rest}).json()
    assert (told["finish_reason"], told["usage"]["completion_tokens"]) == ("length", rest)
    answer = http.post("/query", json={**body, "max_tokens": rest + 1})
    assert_problem(answer, 400, "context_length_exceeded", r"the contexts need \d+ tokens")
    needed, room = re.findall(r"need (\d+) tokens|room for (\d+)", answer.json()["detail"])
    assert int(needed[0]) - int(room[1]) == 1


def assert_problem(answer: httpx.Response, status: int, code: str, message: str) -> None:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    told = answer.json()
    assert told["status"] == status
    assert told["type"] == f"urn:prophetkv:error:{code}"
    assert told["error"]["code"] == code
    assert told["error"]["message"] == told["detail"]
    assert told["instance"] == answer.headers["x-request-id"]
    assert re.search(message, told["detail"]), told["detail"]


@pytest.mark.parametrize(
    "metadata",
    [
        '{"a": NaN}',
        '{"a": "\\ud800"}',
        "[" * 100_000,
        '{"a": ' + "[" * 50 + "]" * 50 + "}",
        '{"a": "' + "x" * 20_000 + '"}',
    ],
)
def test_metadata_that_is_no_plain_json_stores_nothing(http: httpx.Client, metadata: str) -> None:
    form = {"metadata": metadata}
    answer = http.put("/documents/m?collection=metadata", data=form, files={"file": ("m.txt", b"text")})
    assert_problem(answer, 422, "invalid_input", "metadata")
    assert http.get("/documents?collection=metadata").status_code == 404


def test_half_characters_in_raw_bytes_are_refused(http: httpx.Client) -> None:
    body = b'{"question": "\xed\xa0\x80"}'
    answer = http.post("/query", content=body, headers={"content-type": "application/json"})
    assert_problem(answer, 400, "malformed_body", "not JSON")


def test_malformed_bodies_and_wrong_content_types(http: httpx.Client) -> None:
    json_type = {"content-type": "application/json"}
    assert_problem(http.post("/query", content=b'{"question": ', headers=json_type), 400, "malformed_body", "not JSON")
    assert_problem(http.post("/query", content=b"[" * 100_000, headers=json_type), 400, "malformed_body", "not JSON")
    half = b'{"question": "\\ud800"}'
    assert_problem(http.post("/query", content=half, headers=json_type), 400, "malformed_body", "surrogates")
    assert_problem(http.post("/query", content=b"x=1"), 415, "unsupported_content_type", "application/json")
    assert_problem(http.put("/documents/a", content=b"x"), 415, "unsupported_content_type", "multipart")
    broken = {"content-type": "multipart/form-data"}
    assert_problem(http.put("/documents/a", content=b"x", headers=broken), 400, "malformed_body", "multipart")
    assert_problem(http.put("/documents/a", data={"x": "1"}, files={"y": b"z"}), 400, "malformed_body", "named `file`")
    assert_problem(http.get("/nothing"), 404, "not_found", "/nothing")
    assert_problem(http.get("/query"), 405, "method_not_allowed", "Method")


@pytest.mark.parametrize(
    ("name", "content", "status", "code", "message"),
    [
        ("a.exe", b"MZ", 415, "unsupported_document", "supported are"),
        ("a.txt", b"", 422, "unreadable_document", "empty"),
        ("a.pdf", b"no pdf", 415, "unsupported_document", "named as pdf"),
        ("a.pdf", pdf(["x"], password="p"), 422, "unreadable_document", "encrypted"),
        ("a.pdf", pdf(["x"])[:200], 422, "unreadable_document", "broken"),
        ("a.txt", bytes(range(128, 256)) * 9, 422, "unreadable_document", "encoding"),
        ("a.docx", b"PK\x03\x04rubbish", 422, "unreadable_document", "broken"),
    ],
)
def test_bad_files_store_nothing(
    http: httpx.Client, name: str, content: bytes, status: int, code: str, message: str
) -> None:
    answer = http.put("/documents/bad?collection=bad", files={"file": (name, content)})
    assert_problem(answer, status, code, message)
    assert http.get("/documents?collection=bad").status_code == 404


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "a b", "a%2Fb", "x" * 129, "ä", "a%00b"])
def test_ids_with_path_characters_are_refused(http: httpx.Client, name: str) -> None:
    for method in ("PUT", "GET", "DELETE"):
        answer = http.request(
            method, f"/documents/{name.replace('..', '%2e%2e')}", json={"text": "x"} if method == "PUT" else None
        )
        assert answer.status_code in (422, 404), answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        if name not in ("..",):
            assert_problem(answer, 422, "invalid_input", "document id")


def test_bodies_over_the_limit_are_cut_off(http: httpx.Client, server: Server) -> None:
    assert_problem(http.post("/query", json={"question": "x" * 300_000}), 413, "body_too_large", "200000 bytes")
    assert_problem(http.put("/documents/a", files={"file": ("a.txt", b"x" * 300_000)}), 413, "body_too_large", "limit")

    def endless() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    chunked = http.post("/query", content=endless(), headers={"content-type": "application/json"})
    assert_problem(chunked, 413, "body_too_large", "limit")
    assert http.get("/health/ready").status_code == 200


def test_unknown_documents_and_jobs(http: httpx.Client) -> None:
    assert_problem(http.get("/documents/nope"), 404, "not_found", "nope")
    assert_problem(http.get("/jobs/nope"), 404, "not_found", "nope")
    assert_problem(http.delete("/jobs/nope"), 404, "not_found", "nope")
    assert_problem(http.get("/documents?collection=none"), 404, "not_found", "none")
    assert_problem(http.get("/documents?limit=0"), 422, "invalid_input", "limit")
    assert_problem(http.put("/documents/a", json={"text": "  "}), 422, "invalid_input", "empty")
    assert_problem(http.put("/documents/a", json={"txt": "x"}), 422, "invalid_input", "text")
    data = {"metadata": "{"}
    assert_problem(
        http.put("/documents/a", files={"file": ("a.txt", b"x")}, data=data), 422, "invalid_input", "not JSON"
    )


# Health, metrics, disconnects


def test_health_and_metrics(http: httpx.Client, fleet: str, client: Client) -> None:
    ask(client, collection=fleet, max_tokens=2)
    assert http.get("/health/live").json() == {"status": "live"}
    ready = http.get("/health/ready").json()
    assert ready["status"] == "ready"
    assert ready["tiers"] == ["memory", "disk"]
    text = http.get("/metrics").text
    for name in (
        "prophetkv_time_to_first_token_seconds_bucket",
        "prophetkv_e2e_request_latency_seconds_count",
        'prophetkv_requests_total{outcome="length",strategy="prophetkv"}',
        'prophetkv_chunk_kv_hits_total{tier="memory"}',
        'prophetkv_chunk_kv_bytes{tier="disk"}',
        "prophetkv_recompute_tokens_total",
        "prophetkv_num_requests_running",
    ):
        assert name in text, name


def test_the_callers_request_id_is_kept_when_harmless(http: httpx.Client) -> None:
    assert http.get("/health/live", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert http.get("/health/live", headers={"x-request-id": "a b{}"}).headers["x-request-id"] != "a b{}"


def running(http: httpx.Client) -> int:
    return int(http.get("/health/ready").json()["engine"]["running"])


def test_leaving_a_stream_stops_the_work(http: httpx.Client, fleet: str, server: Server) -> None:
    body = {"question": "x", "collection": fleet, "max_tokens": 3000, "stream": True}
    with server.http() as leaver, leaver.stream("POST", "/query", json=body) as answer:
        for line in answer.iter_lines():
            if line == "event: token":
                assert running(http) == 1
                break
    wait_for(lambda: running(http) == 0, 5)
    assert 'prophetkv_requests_total{outcome="cancelled",strategy="prophetkv"}' in http.get("/metrics").text


def test_leaving_before_an_answer_that_is_not_streamed_stops_the_work(
    http: httpx.Client, fleet: str, server: Server
) -> None:
    body = {"question": "x", "collection": fleet, "max_tokens": 3000}
    with server.http() as leaver, pytest.raises(httpx.ReadTimeout):
        leaver.post("/query", json=body, timeout=0.7)
    wait_for(lambda: running(http) == 0, 5)


def test_openapi_names_every_endpoint(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/query", "/documents", "/jobs/{job_id}", "/health/live", "/health/ready", "/metrics"} <= set(paths)
    assert "question" in json.dumps(paths["/query"])


def test_client_errors_carry_status_and_detail(client: Client) -> None:
    with pytest.raises(ClientError, match="404: there is no collection"):
        list(client.ask("x", collection="none"))
    with pytest.raises(ClientError, match="no answer from"):
        Client("http://127.0.0.1:9").job("x")


def test_real_weights_answer_alike_at_ratio_one(make_server: Any, smollm: Path) -> None:
    server = make_server(model=smollm, chunk_tokens=128).start()
    with server.http() as http, Client(server.url) as client:
        http.put("/documents/a?wait=120", json={"text": (BOATS + SEALS) * 20})
        full = ask(client, max_tokens=16, strategy={"name": "full"})[2]
        assert len(full) > 20
        assert ask(client, max_tokens=16, strategy={"name": "prophetkv", "ratio": 1.0})[2] == full
