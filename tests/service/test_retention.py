"""How long chunk KV is kept, said by documents and collections, and `prophetkv store`."""

from __future__ import annotations

from pathlib import Path

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


def test_documents_are_pinned_and_unpinned_over_http(make_server: MakeServer) -> None:
    """With room for little in memory: the pinned document's chunks stay, until it is not pinned any more."""
    server = make_server(memory_bytes=1 << 20, disk_bytes=0, chunk_tokens=64, kv_retention="rules=pin")
    server.start()
    with server.http() as http:

        def put(name: str, collection: str = "default", **metadata: object) -> dict[str, object]:
            words = " ".join(f"{name}{number}" for number in range(60))
            body = {"text": words, "metadata": metadata}
            answer = http.put(f"/documents/{name}", json=body, params={"collection": collection, "wait": 60})
            return {"status": answer.status_code, **answer.json()}

        def hits(name: str, collection: str = "default") -> dict[str, int]:
            body = {"question": f"{name}1 {name}2 {name}3", "collection": collection, "top_k": 1, "max_tokens": 1}
            found: dict[str, int] = http.post("/query", json=body).json()["usage"]["chunk_hits"]
            return found

        assert put("bad", kv_retention="always")["status"] == 422
        put("kept", kv_retention="pin")
        put("ruled", "rules")
        for number in range(8):
            put(f"filler{number}", "fill")
        assert hits("kept")["memory"] == hits("ruled", "rules")["memory"] == 1
        assert put("kept")["result"] == "updated"
        for number in range(8, 16):
            put(f"filler{number}", "fill")
        assert hits("kept")["computed"] == 1
        assert hits("ruled", "rules")["memory"] == 1


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
