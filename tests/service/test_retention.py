"""How long chunk KV is kept, said by documents and collections, and `prophetkv store`."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import redis
from typer.testing import CliRunner

from cache_store.base import KEEP, Retention
from errors import ConfigError, InvalidInput
from service.retention import RetentionRules, parse_retention, parse_rules
from service.settings import load_settings
from service.store_cli import app
from tests.conftest import RedisServer
from tests.service.conftest import MakeServer
from tests.service.test_api import wait_for

PIN = Retention(pinned=True)


def test_rules_are_read() -> None:
    assert parse_rules(" handbook=pin, news=86400 ,,") == {"handbook": PIN, "news": Retention(seconds=86400)}
    assert parse_rules("") == {}


@pytest.mark.parametrize("value", ["forever", 0, -1, True, None, [], 1e12, float("nan")])
def test_what_is_no_retention_is_refused(value: object) -> None:
    with pytest.raises(InvalidInput):
        parse_retention(value)


@pytest.mark.parametrize("text", ["a", "a=", "a=never", "a=-3"])
def test_a_bad_setting_keeps_the_server_from_starting(text: str) -> None:
    with pytest.raises(ConfigError, match="KV_RETENTION"):
        load_settings(kv_retention=text)


def test_a_documents_word_comes_before_its_collections() -> None:
    rules = RetentionRules({"news": Retention(seconds=60)})
    assert rules.of("news", {}) == Retention(seconds=60)
    assert rules.of("news", {"kv_retention": "pin"}) == PIN
    assert rules.of("other", {"kv_retention": 5}) == Retention(seconds=5)
    assert rules.of("other", {"kv_retention": {"from": "before"}}) == KEEP


def test_a_shared_chunk_is_kept_as_the_most_careful_wants() -> None:
    rules = RetentionRules({})
    holders: list[tuple[str, str, dict[str, object]]] = [
        ("a", "c", {"kv_retention": 5}),
        ("a", "c", {"kv_retention": 9}),
        ("b", "c", {"kv_retention": 5}),
        ("b", "c", {}),
        ("p", "c", {}),
        ("p", "c", {"kv_retention": "pin"}),
    ]
    assert rules.of_chunks(holders) == {"a": Retention(seconds=9), "b": KEEP, "p": PIN}


class Asker:
    """Puts documents of some chunks into a server that has little memory, and asks where their KV comes from."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._fillers = 0

    def put(self, name: str, collection: str = "default", about: str | None = None, **metadata: object) -> str:
        """The result; the document has the same words as others that are `about` the same."""
        words = " ".join(f"{about or name}{number}" for number in range(60))
        body = {"text": words, "metadata": metadata}
        answer = self._http.put(f"/documents/{name}", json=body, params={"collection": collection, "wait": 60})
        return str(answer.json().get("result", answer.status_code))

    def delete(self, name: str) -> None:
        assert self._http.delete(f"/documents/{name}").status_code == 204

    def origin(self, name: str, collection: str = "default", chunks: int = 1) -> str:
        """Where the KV of the document's first chunk comes from."""
        body = {"question": f"{name}1 {name}2 {name}3", "collection": collection, "top_k": chunks, "max_tokens": 1}
        hits: dict[str, int] = self._http.post("/query", json=body).json()["usage"]["chunk_hits"]
        return next(tier for tier, count in hits.items() if count)

    def fill(self) -> None:
        """So that nothing else has room in memory that may go."""
        for _ in range(8):
            self._fillers += 1
            self.put(f"filler{self._fillers}", "fill")
            self.origin(f"filler{self._fillers}", "fill", chunks=16)

    def origin_when_filled(self, name: str) -> str:
        self.fill()
        return self.origin(name)


@pytest.mark.parametrize("precompute", [True, False])
def test_documents_are_pinned_and_unpinned_over_http(make_server: MakeServer, precompute: bool) -> None:
    """The pinned document's chunks stay, until it is not pinned any more."""
    server = make_server(memory_bytes=1 << 20, disk_bytes=0, kv_retention="rules=pin", precompute=precompute)
    with server.start().http() as http:
        asker = Asker(http)
        assert asker.put("bad", kv_retention="always") == "422"
        asker.put("kept", kv_retention="pin")
        asker.put("ruled", "rules")
        for document in (("kept",), ("ruled", "rules")):
            asker.origin(*document)
        asker.fill()
        assert (asker.origin("kept"), asker.origin("ruled", "rules")) == ("memory", "memory")
        assert asker.put("kept") == "updated"
        asker.fill()
        assert (asker.origin("kept"), asker.origin("ruled", "rules")) == ("computed", "memory")


@pytest.mark.parametrize("how", ["deleted", "replaced"])
def test_what_only_another_document_pinned_is_not_pinned_without_it(make_server: MakeServer, how: str) -> None:
    server = make_server(memory_bytes=1 << 20, disk_bytes=0)
    with server.start().http() as http:
        asker = Asker(http)
        asker.put("pinning", about="shared", kv_retention="pin")
        asker.put("other", about="shared")
        asker.fill()
        assert asker.origin("shared") == "memory"
        if how == "deleted":
            asker.delete("pinning")
        else:
            assert asker.put("pinning", kv_retention="pin") == "replaced"
        wait_for(lambda: asker.origin_when_filled("shared") == "computed")


# prophetkv store


def test_store_stats_verify_purge_and_warm(
    make_server: MakeServer, tmp_path: Path, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(redis_url=redis_server.url)
    server.start()
    with server.http() as http:
        for name, collection in (("one", "default"), ("two", "default"), ("three", "other")):
            text = " ".join(f"{name}{number}" for number in range(40))
            http.put(f"/documents/{name}", json={"text": text}, params={"wait": 60, "collection": collection})
    server.stop()
    for name, value in server.settings.items():
        monkeypatch.setenv(f"PROPHETKV_{name.upper()}", str(value))

    def store(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "200"})
        return result.exit_code, " ".join(result.stdout.split())

    files = sorted((tmp_path / "data" / "kv").rglob("*.kv"))
    count = len(files)
    assert count >= 6
    status, text = store("stats")
    assert status == 0
    assert f"disk │ {count} " in text
    assert f"redis │ {count} " in text
    assert store("verify") == (0, f"{2 * count} entries are whole, 0 damaged")

    data = bytearray(files[0].read_bytes())
    data[-1] ^= 1
    files[0].write_bytes(data)
    files[1].write_bytes(b"")
    files[2].write_bytes(files[3].read_bytes())
    with redis.Redis.from_url(redis_server.url) as client:
        client.set(f"prophetkv:{{{files[4].stem}}}:0", b"noise")
    status, text = store("verify")
    assert status == 1
    for number, reason in ((0, "block checksum"), (1, "length"), (2, "another key"), (4, "length")):
        assert f"{files[number].stem}: {reason}" in text
    assert store("verify", "--remove")[0] == 0
    assert store("verify") == (0, f"{2 * count - 4} entries are whole, 0 damaged")

    status, text = store("purge", "--document", "one")
    assert status == 0
    assert 0 < int(text.split()[1]) < count
    status, text = store("purge", "--collection", "other")
    assert int(text.split()[1]) > 0
    assert store("purge", "--document", "absent") == (1, "there is no document 'absent' in collection 'default'")
    status, text = store("warm")
    assert status == 0, text
    assert "chunks computed" in text
    assert len(list((tmp_path / "data" / "kv").rglob("*.kv"))) == count
    assert store("purge") == (0, f"removed {count} entries")
    assert list((tmp_path / "data" / "kv").rglob("*.kv")) == []
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.keys("*") == []

    (tmp_path / "data" / "kv" / "00" / "0.kv").mkdir(parents=True, exist_ok=True)  # nothing that could be read
    status, text = store("verify")
    assert status == 1
    assert "0: cannot be read: Is a directory" in text


def test_there_is_nothing_to_warm_for_a_model_whose_kv_is_not_reused(
    make_server: MakeServer, gpt2_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = make_server(gpt2_folder).start()
    with server.http() as http:
        http.put("/documents/one", json={"text": "one two three"}, params={"wait": 60})
    server.stop()
    for name, value in server.settings.items():
        monkeypatch.setenv(f"PROPHETKV_{name.upper()}", str(value))
    result = CliRunner().invoke(app, ["warm"], env={"COLUMNS": "400"})
    text = " ".join(result.stdout.split())
    assert result.exit_code == 1
    assert text.startswith("no KV is computed ahead, for every answer is a full prefill: model family 'gpt2' is not")
    assert text.endswith("; configure another model, or do without")
