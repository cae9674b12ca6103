"""What befalls stored KV between two questions changes no token of the answer and is counted."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import Self

import pytest
import redis

from service.client import Client
from tests.conftest import RedisServer
from tests.service.conftest import MakeServer, Server
from tests.service.test_api import ask, wait_for
from tests.service.test_lifecycle import boats, put

OnDisk = Callable[[list[Path]], object]
InRedis = Callable[[RedisServer, redis.Redis, list[bytes]], object]


def _flip(value: bytes) -> bytes:
    """With a bit changed in the middle of the second half."""
    at = len(value) * 3 // 4
    return value[:at] + bytes([value[at] ^ 16]) + value[at + 1 :]


def _truncated(value: bytes) -> bytes:
    return value[:-1]


def _emptied(value: bytes) -> bytes:
    return b""


def _rewritten(change: Callable[[bytes], bytes]) -> tuple[OnDisk, InRedis]:
    """What changes every stored value in this way."""

    def on_disk(files: list[Path]) -> None:
        for path in files:
            path.write_bytes(change(path.read_bytes()))

    def in_redis(server: RedisServer, client: redis.Redis, keys: list[bytes]) -> None:
        for key in keys:
            client.set(key, change(_value(client, key)))

    return on_disk, in_redis


def _value(client: redis.Redis, key: bytes) -> bytes:
    value = client.get(key)
    assert isinstance(value, bytes)
    return value


def _rotate_files(files: list[Path]) -> None:
    contents = [path.read_bytes() for path in files]
    for path, content in zip(files, contents[1:] + contents[:1], strict=True):
        path.write_bytes(content)


def _rotate_values(server: RedisServer, client: redis.Redis, keys: list[bytes]) -> None:
    values = [_value(client, key) for key in keys]
    for key, value in zip(keys, values[1:] + values[:1], strict=True):
        client.set(key, value)


def _remove(files: list[Path]) -> None:
    for path in files:
        path.unlink()


def _replace_by_folders(files: list[Path]) -> None:
    for path in files:
        path.unlink()
        path.mkdir()


def _make_unreadable(files: list[Path]) -> None:
    for path in files:
        path.unlink()
        path.symlink_to(path)


def _replace_by_lists(server: RedisServer, client: redis.Redis, keys: list[bytes]) -> None:
    for key in keys:
        client.delete(key)
        client.lpush(key, b"x")


def _ask_for_a_password(server: RedisServer, client: redis.Redis, keys: list[bytes]) -> None:
    client.config_set("requirepass", "secret")
    client.client_kill_filter(_type="normal", skipme=True)


def _take_memory_away(server: RedisServer, client: redis.Redis, keys: list[bytes]) -> None:
    client.config_set("maxmemory-policy", "allkeys-random")
    client.config_set("maxmemory", "1mb")  # less than the server needs for itself
    wait_for(lambda: not client.dbsize())


REWRITTEN = {
    "truncated": _rewritten(_truncated),
    "emptied": _rewritten(_emptied),
    "a bit flipped": _rewritten(_flip),
    "swapped": (_rotate_files, _rotate_values),
}
DISK: dict[str, tuple[OnDisk, str]] = {
    **{name: (on_disk, "kv_entry_rejected") for name, (on_disk, _) in REWRITTEN.items()},
    "unreadable": (_make_unreadable, "chunk_kv_errors"),
    "neither readable nor removable": (_replace_by_folders, "kv_entry_rejected"),
    "files gone": (_remove, "chunk_kv_misses"),
    "the folder gone": (lambda files: shutil.rmtree(files[0].parent.parent), "chunk_kv_misses"),
}
REDIS: dict[str, tuple[InRedis, str]] = {
    **{name: (in_redis, "kv_entry_rejected") for name, (_, in_redis) in REWRITTEN.items()},
    "of another type": (_replace_by_lists, "chunk_kv_errors"),
    "evicted": (lambda server, client, keys: client.delete(*keys), "chunk_kv_misses"),
    "killed": (lambda server, client, keys: server.stop(), "chunk_kv_errors"),
    "stopped": (lambda server, client, keys: server.process.send_signal(signal.SIGSTOP), "chunk_kv_errors"),
    "no memory left": (_take_memory_away, "chunk_kv_misses"),
    "a password": (_ask_for_a_password, "chunk_kv_errors"),
}


def counted(server: Server, name: str, tier: str) -> float:
    """The sum of a counter of one tier over its other labels."""
    with server.http() as http:
        text = http.get("/metrics").text
    found = re.findall(rf'^prophetkv_{name}_total{{[^}}]*tier="{tier}"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return sum(map(float, found))


def check(server: Server, tier: str, metric: str, harm: Callable[[], object]) -> None:
    """Asks, does harm to everything stored, and asks again, twice."""
    store = server.runtime.store
    with Client(server.url) as client:
        first, text = ask(client, max_tokens=20, top_k=3)[1:]
        assert first["done"]["usage"]["chunk_hits"][tier] == 3
        store.flush()
        before = counted(server, metric, tier)
        harm()
        harmed, again = ask(client, max_tokens=20, top_k=3)[1:]
        assert again == text
        usage = harmed["done"]["usage"]
        assert usage["chunk_hits"]["computed"] == 3
        assert counted(server, metric, tier) > before
        failed = [fault for fault in usage["degraded"] if fault.startswith(f"{tier} tier")]
        assert bool(failed) == (metric == "chunk_kv_errors")
        assert ask(client, max_tokens=20, top_k=3)[2] == text
    wait_for(lambda: store.room.taken == 0 and not server.runtime.engine.stats().running)
    store.flush()


@pytest.mark.parametrize("fault", DISK)
def test_disk(make_server: MakeServer, fault: str) -> None:
    server = make_server(memory_bytes=0).start()
    put(server, "boats", boats(20))
    server.runtime.store.flush()
    harm, metric = DISK[fault]
    check(server, "disk", metric, lambda: harm(list((server.data / "kv").rglob("*.kv"))))
    server.stop()


@pytest.mark.parametrize("fault", REDIS)
def test_redis(make_server: MakeServer, own_redis: RedisServer, fault: str) -> None:
    server = make_server(memory_bytes=0, disk_bytes=0, redis_url=own_redis.url).start()
    put(server, "boats", boats(20))
    server.runtime.store.flush()
    harm, metric = REDIS[fault]
    with redis.Redis.from_url(own_redis.url) as client:
        check(server, "redis", metric, lambda: harm(own_redis, client, list(client.scan_iter("*"))))
        if fault == "stopped":
            own_redis.process.send_signal(signal.SIGCONT)
    server.stop()


@pytest.mark.parametrize("days", [-1, 1])
def test_a_clock_that_is_a_day_off(make_server: MakeServer, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    server = make_server(memory_bytes=0).start()
    put(server, "boats", boats(20))
    with Client(server.url) as client:
        text = ask(client, max_tokens=20, top_k=3)[2]
    server.stop()

    class Off(datetime):
        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Self:
            return super().now(tz) + timedelta(days=days)

    monkeypatch.setattr("retriever.schema.datetime", Off)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + days * 86400)
    for path in (server.data / "kv").rglob("*.kv"):
        os.utime(path, (time.time(), time.time()))
    server.start()
    with Client(server.url) as client:
        for _ in range(2):
            told, again = ask(client, max_tokens=20, top_k=3)[1:]
            assert again == text
            assert told["done"]["usage"]["chunk_hits"]["disk"] == 3
        assert put(server, "others", "Ships are blue. " * 9)["document"]["state"] == "ready"
        monkeypatch.undo()  # and back again
        assert put(server, "others", "Ships are green. " * 9)["document"]["state"] == "ready"
        sources = ask(client, question="Which colour are ships?", max_tokens=2, top_k=1)[1]["sources"]
        assert "green" in str(sources)
    server.stop()
