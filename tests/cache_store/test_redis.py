"""The Redis tier: values, the ways to reach a server, and every way it can fail."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from cache_store.base import KEEP, Chunk, ChunkKV, KVLayout, OwnMemory, Retention
from cache_store.fetch import Fetch
from cache_store.memory import MemoryStore
from cache_store.redis import VALUE_BYTES, RedisStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from errors import StoreUnavailable
from tests.cache_store.conftest import LAYOUT, chunk_of, kv_of, same, whole
from tests.conftest import RedisServer
from tests.tiny import run

LARGE = KVLayout(layers=8, kv_heads=8, head_dim=64, dtype=torch.float32)  # 32 MiB at 1024 tokens: beyond all buffers


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class AfterFirstLayer(OwnMemory):
    """A landing that does something when the first layer has arrived."""

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def arrived(self, kv: ChunkKV, layers: int) -> None:
        if layers == 1:
            self._act()


def test_large_entries_are_several_values(redis_server: RedisServer) -> None:
    layout = KVLayout(layers=4, kv_heads=8, head_dim=64, dtype=torch.float32)
    kv = kv_of(1, 1024, layout)
    store = RedisStore(redis_server.url, layout)
    store.put(chunk_of(1, 1024), kv)
    with redis.Redis.from_url(redis_server.url) as client:
        names = client.keys("*")
        sizes = [client.strlen(name) for name in names]
    assert len(names) == 9  # 16 MiB, and the header
    assert max(sizes) == VALUE_BYTES
    assert same(store.get(chunk_of(1, 1024)), kv)
    store.delete([chunk_of(1, 1024).key])
    with redis.Redis.from_url(redis_server.url) as client:
        assert client.keys("*") == []
    store.close()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("evict", "incomplete"),
        ("truncate", "length"),
        ("flip", "block checksum"),
        ("swap", "block checksum"),
        ("foreign", "length"),
    ],
)
def test_a_damaged_redis_entry_is_a_miss(redis_server: RedisServer, damage: str, reason: str) -> None:
    layout = KVLayout(layers=2, kv_heads=8, head_dim=64, dtype=torch.float32)
    store = RedisStore(redis_server.url, layout)
    for number in (1, 2):
        store.put(chunk_of(number, 1024), kv_of(number, 1024, layout))
    name, other = (f"prophetkv:{{{chunk_of(number).key}}}:1" for number in (1, 2))
    with redis.Redis.from_url(redis_server.url) as client:
        data = bytearray(client.get(name))
        data[len(data) // 2] ^= 1
        if damage == "evict":
            client.delete(name)
        else:
            client.set(
                name,
                {"truncate": bytes(data[:-1]), "flip": bytes(data), "swap": client.get(other), "foreign": b"hello"}[
                    damage
                ],
            )
    assert store.get(chunk_of(1, 1024)) is None
    assert store.stats.rejected == {reason: 1}
    assert same(store.get(chunk_of(2, 1024)), kv_of(2, 1024, layout))
    store.close()


def test_a_sick_redis_costs_nothing_after_three_failures(own_redis: RedisServer) -> None:
    """SIGSTOP: three reads wait for the timeout, then the tier is left alone, and comes back by itself."""
    tier = RedisStore(own_redis.url, LAYOUT, timeout=0.1)
    store = TieredStore([MemoryStore(0), tier])
    tier.put(chunk_of(1), kv_of(1))
    own_redis.process.send_signal(signal.SIGSTOP)
    faults = [store.lookup(chunk_of(1)).faults for _ in range(100)]
    assert [("Timeout" in told, "paused" in told) for (told,) in faults] == [(True, False)] * 3 + [(False, True)] * 97
    assert tier.stats.errors == 3
    own_redis.process.send_signal(signal.SIGCONT)
    assert _until_found(store, 1).tier == "redis"
    store.close()


def test_a_full_redis_refuses_writes_and_serves_reads(own_redis: RedisServer) -> None:
    store = RedisStore(own_redis.url, LAYOUT)
    store.put(chunk_of(1), kv_of(1))
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
    with pytest.raises(StoreUnavailable, match="OOM"):
        store.put(chunk_of(2), kv_of(2))
    assert same(store.get(chunk_of(1)), kv_of(1))
    store.close()


@pytest.mark.parametrize("act", ["kill", "stop"])
def test_redis_that_dies_or_freezes_in_the_middle_of_a_value(own_redis: RedisServer, act: str) -> None:
    store = RedisStore(own_redis.url, LARGE, timeout=0.5)
    kv = kv_of(1, 1024, LARGE)
    store.put(chunk_of(1, 1024), kv)
    signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    landing = AfterFirstLayer(lambda: own_redis.process.send_signal(signals[act]))
    with pytest.raises(StoreUnavailable, match={"kill": "closed|Reset", "stop": "Timeout"}[act]):
        store.get(chunk_of(1, 1024), landing)
    assert store.stats.errors == 1
    if act == "stop":
        own_redis.process.send_signal(signal.SIGCONT)
        assert same(store.get(chunk_of(1, 1024)), kv)  # over a new connection: nothing of the late reply is left
    store.close()


def test_after_every_kind_of_failure_a_chunk_is_the_same(own_redis: RedisServer) -> None:
    """Through the source, as the engine loads: down, killed while reading, wrong password, restarted."""
    computed: list[str] = []

    def encode(chunk: Chunk) -> Iterator[None]:
        computed.append(chunk.key)
        yield
        return kv_of(int(chunk.key, 16))  # type: ignore[return-value]

    tier = RedisStore(own_redis.url, LAYOUT, timeout=0.1)
    store = TieredStore([MemoryStore(0), tier])
    source = ChunkSource(store, encode)  # type: ignore[arg-type]

    def load(number: int) -> tuple[str, bool]:
        loaded = run(source.load(chunk_of(number)))
        assert same(whole(loaded), kv_of(number))
        store.flush()
        return loaded.tier, bool(loaded.faults)

    assert [load(1), load(1)] == [("computed", False), ("redis", False)]
    own_redis.stop()
    assert load(1) == ("computed", True)
    own_redis.start()
    assert _until_found(store, 1, refill=True).tier == "redis"
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "secret")
        client.client_kill_filter(_type="normal", skipme=True)
    assert load(1) == ("computed", True)
    assert store.tiers[1].stats.errors >= 2
    store.close()


def _until_found(store: TieredStore, number: int, refill: bool = False) -> Fetch:
    """Until the breakers have closed again."""
    deadline = time.monotonic() + 20
    while (found := store.lookup(chunk_of(number))).kv is None:
        assert time.monotonic() < deadline
        if refill:
            store.put(chunk_of(number), kv_of(number))
            store.flush()
        time.sleep(0.05)
    assert same(found.kv, kv_of(number))
    return found


def test_redis_that_is_down_at_the_start_is_used_when_it_comes(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    store = TieredStore([MemoryStore(0), RedisStore(server.url, LAYOUT)])
    assert "redis tier" in store.lookup(chunk_of(1)).faults[0]
    server.start()
    assert _until_found(store, 1, refill=True).tier == "redis"
    store.close()
    server.stop()


def test_values_that_are_evicted_between_others_are_misses(own_redis: RedisServer) -> None:
    """Eight entries of 8 MiB in a Redis of 20: whatever it throws away, what is given is right."""
    layout = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype=torch.float32)
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", "20mb")
    store = RedisStore(own_redis.url, layout, timeout=5)
    for number in range(8):
        store.put(chunk_of(number, 1024), kv_of(number, 1024, layout))
    found = [store.get(chunk_of(number, 1024)) for number in range(8)]
    assert all(kv is None or same(kv, kv_of(number, 1024, layout)) for number, kv in enumerate(found))
    assert None in found
    assert set(store.stats.rejected) <= {"incomplete"}
    assert store.stats.errors == 0
    store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_replies_that_push_out_the_values_behind_them_are_misses(
    own_redis: RedisServer, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Entries of 0.6 MiB in eleven values, in a megabyte and a half: reading evicts as writing does."""
    monkeypatch.setattr("cache_store.redis.VALUE_BYTES", 1 << 16)
    layout = KVLayout(layers=4, kv_heads=4, head_dim=64, dtype=torch.float32)
    store = RedisStore(own_redis.url, layout, timeout=5, direct=direct)
    ends = Counter[tuple[str, str]]()
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "allkeys-random")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) + (3 << 19))
        for number in range(80):
            store.put(chunk_of(number, 80), kv_of(number, 80, layout))
            stored = client.exists(*(f"prophetkv:{{{chunk_of(number).key}}}:{index}" for index in range(11)))
            kv = store.get(chunk_of(number, 80))
            assert kv is None or same(kv, kv_of(number, 80, layout))
            ends["whole" if stored == 11 else "parts", "missed" if kv is None else "found"] += 1
    assert ends.keys() == {("whole", "found"), ("whole", "missed"), ("parts", "missed")}
    assert store.stats.rejected.keys() == {"incomplete"}
    assert store.stats.errors == 0
    store.close()


def test_a_write_that_fails_half_way_leaves_no_values(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "12mb")
        store = RedisStore(own_redis.url, LARGE, timeout=5)
        with pytest.raises(StoreUnavailable, match="OOM"):
            store.put(chunk_of(1, 1024), kv_of(1, 1024, LARGE))
        assert client.keys("*") == []
    store.close()


def test_a_full_redis_still_serves(own_redis: RedisServer) -> None:
    """Writes fail until they are not even tried, and reads do not notice."""
    tier = RedisStore(own_redis.url, LAYOUT)
    store = TieredStore([MemoryStore(0), tier])
    store.put(chunk_of(1), kv_of(1))
    store.flush()
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
    for number in range(2, 12):
        store.put(chunk_of(number), kv_of(number))
    store.flush()
    assert tier.stats.dropped_writes == 10
    assert tier.stats.errors == 3
    assert store.lookup(chunk_of(1)).tier == "redis"
    store.close()


def test_a_budget_of_ours_stops_writes(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        used = int(client.info("memory")["used_memory"])
    store = RedisStore(own_redis.url, LARGE, 5, budget=used + (40 << 20))
    for number in range(3):
        store.put(chunk_of(number, 1024), kv_of(number, 1024, LARGE))
    assert (store.stats.writes, store.stats.dropped_writes) == (1, 2)
    assert store.holds([chunk_of(number) for number in range(3)]) == [True, False, False]
    store.close()


def test_a_wrong_password_is_told(own_redis: RedisServer) -> None:
    with redis.Redis.from_url(own_redis.url) as client:
        client.config_set("requirepass", "secret")
    right, wrong, none = (
        RedisStore(url, LAYOUT)
        for url in (f"unix://:secret@{own_redis.socket}", f"unix://:no@{own_redis.socket}", own_redis.url)
    )
    right.put(chunk_of(1), kv_of(1))
    assert same(right.get(chunk_of(1)), kv_of(1))
    for store, told in ((wrong, "WRONGPASS"), (none, "NOAUTH")):
        with pytest.raises(StoreUnavailable, match=told):
            store.get(chunk_of(1))
        store.close()
    right.close()


def test_entries_expire(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, LAYOUT)
    store.put(chunk_of(1), kv_of(1), Retention(seconds=0.05))
    store.put(chunk_of(2), kv_of(2))
    store.put(chunk_of(3), kv_of(3), Retention(seconds=0.2))
    store.retain([chunk_of(2).key, chunk_of(9).key], Retention(seconds=0.05))
    store.retain([chunk_of(3).key], Retention())
    time.sleep(0.3)
    assert [kv is not None for kv in map(store.get, map(chunk_of, (1, 2, 3)))] == [False, False, True]
    store.close()


def test_many_gets_given_up_halfway_never_mix_up_later_ones(redis_server: RedisServer) -> None:
    """A landing that fails leaves a reply unread: the connection must not serve anybody else."""

    def give_up() -> None:
        raise RuntimeError("the caller is gone")

    store = RedisStore(redis_server.url, LAYOUT)
    for number in range(5):
        store.put(chunk_of(number), kv_of(number))
    chance = random.Random(0)
    for _ in range(1000):
        number = chance.randrange(5)
        if chance.random() < 0.5:
            with pytest.raises(RuntimeError, match="gone"):
                store.get(chunk_of(number), AfterFirstLayer(give_up))
        else:
            assert same(store.get(chunk_of(number)), kv_of(number))
    store.close()


# Other ways to reach Redis


class Servers:
    """Redis servers on ports of their own, with whatever options."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._certificate: Path | None = None

    def use_tls(self) -> None:
        """The servers that start from now on take nothing else."""
        names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
        arguments = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext {names}"
        files = ["-keyout", "key.pem", "-out", "cert.pem"]
        subprocess.run(["openssl", *arguments.split(), *files], cwd=self._folder, check=True, capture_output=True)
        self._certificate = self._folder / "cert.pem"

    def url(self, scheme: str, port: int, path: str = "") -> str:
        if self._certificate is None:
            return f"{scheme}://127.0.0.1:{port}{path}"
        return f"{scheme.replace('redis', 'rediss')}://127.0.0.1:{port}{path}?ssl_ca_certs={self._certificate}"

    def client(self, port: int) -> Any:
        return redis.Redis.from_url(self.url("redis", port))

    def start(self, *options: str, sentinel: bool = False) -> int:
        port = free_port()
        home = self._folder / str(port)
        home.mkdir()
        config = home / "redis.conf"
        listening = [f"port {port}"]
        if self._certificate is not None:
            key, certificate = self._certificate.with_name("key.pem"), self._certificate
            listening = ["port 0", f"tls-port {port}", "tls-cluster yes", "tls-replication yes", "tls-auth-clients no"]
            listening += [f"tls-key-file {key}", f"tls-cert-file {certificate}", f"tls-ca-cert-file {certificate}"]
        config.write_text("\n".join((*listening, f"dir {home}", 'save ""', *options)) + "\n")
        command = ["redis-server", str(config), *(["--sentinel"] if sentinel else [])]
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        return port

    def signal(self, index: int, number: signal.Signals) -> None:
        self._processes[index].send_signal(number)

    def stop(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()

    def close(self) -> None:
        for index in range(len(self._processes)):
            self.stop(index)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    made = Servers(tmp_path)
    yield made
    made.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_database_of_its_own_and_a_user(servers: Servers) -> None:
    url = f"redis://kv:pw@127.0.0.1:{servers.start('user kv on >pw ~* &* +@all')}/3"
    store = RedisStore(url, LAYOUT)
    with redis.Redis.from_url(url) as client:
        _until(client.ping)
        store.put(chunk_of(1), kv_of(1))
        assert same(store.get(chunk_of(1)), kv_of(1))
        assert len(client.keys("prophetkv:*")) == 1
    store.close()


@pytest.mark.parametrize("scheme", ["redis", "redis+cluster", "redis+sentinel"])
def test_a_redis_that_is_not_there_is_a_failing_tier_of_whatever_kind(scheme: str) -> None:
    place = "/main" if scheme == "redis+sentinel" else ""
    tier = RedisStore(f"{scheme}://127.0.0.1:{free_port()}{place}", LAYOUT)
    store = TieredStore([MemoryStore(0), tier])
    places, (fault,) = store.locate_many([chunk_of(1)])
    assert places == [None]
    assert fault.startswith("redis tier: ")
    assert store.get(chunk_of(1)) is None
    store.put(chunk_of(1), kv_of(1))
    store.flush()
    assert tier.stats.dropped_writes == 1
    with pytest.raises(StoreUnavailable):
        store.delete([chunk_of(1).key])
    store.close()


def test_a_retention_reaches_all_values_of_all_entries(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, LARGE, 5)
    keys = [chunk_of(number, 1024).key for number in range(3)]
    for number in range(3):
        store.put(chunk_of(number, 1024), kv_of(number, 1024, LARGE))
    with redis.Redis.from_url(redis_server.url) as client:
        names = client.keys("*")
        assert len(names) >= 6
        store.retain([*keys, "unknown"], Retention(seconds=100))
        assert all(0 < client.ttl(name) <= 100 for name in names)
        store.retain(keys, KEEP)
        assert all(client.ttl(name) == -1 for name in names)
    store.close()


def _cluster(servers: Servers, stack: ExitStack, node_timeout: int) -> tuple[list[int], list[Any]]:
    """Three nodes: their ports, and a client of each. `node_timeout`: after how many ms they find one of them dead."""
    buses = [free_port() for _ in range(3)]
    options = ["cluster-enabled yes", f"cluster-node-timeout {node_timeout}"]
    ports = [servers.start(*options, f"cluster-port {bus}") for bus in buses]
    clients = [stack.enter_context(servers.client(port)) for port in ports]
    _until(lambda: all(client.ping() for client in clients))
    for index, client in enumerate(clients):
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", index * 5462, min(16383, index * 5462 + 5461))
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[index], buses[index])
    _until(lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients))
    _until(lambda: all(len(client.execute_command("CLUSTER SLOTS")) == 3 for client in clients))
    return ports, clients


@pytest.mark.parametrize("tls", [False, True])
def test_a_cluster_of_three(servers: Servers, tls: bool) -> None:
    """Entries of several values on all nodes, a slot that moves, a node that dies."""
    if tls:
        servers.use_tls()
    with ExitStack() as stack:
        ports, clients = _cluster(servers, stack, 2000)
        store = RedisStore(servers.url("redis+cluster", ports[0], f",127.0.0.1:{ports[1]}"), LARGE, timeout=2)
        chunks, kv = [chunk_of(number, 200) for number in range(12)], kv_of(1, 200, LARGE)
        for chunk in chunks:
            store.put(chunk, kv)
        assert all(store.holds(chunks))
        assert all(same(store.get(chunk), kv) for chunk in chunks)
        held = [{name.split(b":")[1] for name in client.keys("prophetkv:*")} for client in clients]
        assert all(held)  # every node has some
        assert sum(map(len, held)) == 12  # and the values of an entry are together

        # The slot of the first chunk moves to another node, and nobody told the store.
        slot = clients[0].execute_command("CLUSTER", "KEYSLOT", f"{{{chunks[0].key}}}")
        owner = next(index for index, keys in enumerate(held) if f"{{{chunks[0].key}}}".encode() in keys)
        target = (owner + 1) % 3
        ids = [client.execute_command("CLUSTER", "MYID") for client in clients]
        clients[target].execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[owner])
        clients[owner].execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target])
        names = clients[owner].execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
        clients[owner].execute_command("MIGRATE", "127.0.0.1", ports[target], "", 0, 5000, "KEYS", *names)
        for client in (clients[target], clients[owner]):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", ids[target])
        assert all(store.holds(chunks))
        for _ in range(2):
            assert same(store.get(chunks[0]), kv)
        store.put(chunks[0], kv)
        assert same(store.get(chunks[0]), kv)

        servers.stop(target)
        lost = 0
        for chunk in chunks:
            try:
                lost += not same(store.get(chunk), kv)
            except StoreUnavailable:
                lost += 1
        assert lost >= 1
        store.close()


def test_a_replica_takes_the_place_of_a_node_of_a_cluster(servers: Servers) -> None:
    with ExitStack() as stack:
        ports, clients = _cluster(servers, stack, 1000)
        bus = free_port()
        spare = servers.start("cluster-enabled yes", "cluster-node-timeout 1000", f"cluster-port {bus}")
        replica: Any = stack.enter_context(redis.Redis(port=spare))
        _until(replica.ping)
        clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", spare, bus)
        lead = clients[0].execute_command("CLUSTER", "MYID")
        _until(lambda: replica.execute_command("CLUSTER", "REPLICATE", lead))
        _until(lambda: replica.info("replication")["master_link_status"] == "up")
        store = RedisStore(f"redis+cluster://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}", LAYOUT)
        chunks = [chunk_of(number) for number in range(12)]
        for number, chunk in enumerate(chunks):
            store.put(chunk, kv_of(number))
        clients[0].wait(1, 5000)
        servers.stop(0)
        _until(lambda: replica.info("replication")["role"] == "master")

        def held() -> bool:
            try:
                return all(store.holds(chunks))
            except StoreUnavailable:
                return False

        _until(held)
        assert all(same(store.get(chunk), kv_of(number)) for number, chunk in enumerate(chunks))
        store.close()


@pytest.mark.parametrize("tls", [False, True])
def test_a_master_behind_sentinel_that_changes(servers: Servers, tls: bool) -> None:
    if tls:
        servers.use_tls()
    first = servers.start()
    second = servers.start(f"replicaof 127.0.0.1 {first}")
    watch = servers.start(
        f"sentinel monitor kv 127.0.0.1 {first} 1",
        "sentinel down-after-milliseconds kv 500",
        "sentinel failover-timeout kv 3000",
        sentinel=True,
    )
    with servers.client(second) as replica, servers.client(watch) as sentinel:
        _until(lambda: replica.info("replication")["master_link_status"] == "up")
        _until(lambda: sentinel.execute_command("SENTINEL", "REPLICAS", "kv") != [])
        store = RedisStore(servers.url("redis+sentinel", watch, "/kv"), LAYOUT, timeout=1)
        store.put(chunk_of(1), kv_of(1))
        _until(lambda: len(replica.keys("*")) == 1)
        servers.stop(0)
        with pytest.raises(StoreUnavailable):
            store.get(chunk_of(1))
        _until(lambda: replica.info("replication")["role"] == "master")

        def found() -> bool:
            try:
                return same(store.get(chunk_of(1)), kv_of(1))
            except StoreUnavailable:
                return False

        _until(found)
        store.close()


@pytest.mark.parametrize("frozen", [1, 3])
def test_a_cluster_with_frozen_nodes_is_slow_a_few_times_only(servers: Servers, frozen: int) -> None:
    """What the other nodes have is found all the time."""
    with ExitStack() as stack:
        ports, clients = _cluster(servers, stack, 60_000)
        url = ",".join(f"127.0.0.1:{port}" for port in ports)
        tier = RedisStore(f"redis+cluster://{url}", LAYOUT, timeout=0.25)
        store = TieredStore([MemoryStore(0), tier], answer={"redis": 1})
        chunks = [chunk_of(number) for number in range(30)]
        for number, chunk in enumerate(chunks):
            tier.put(chunk, kv_of(number))
        healthy = {name for client in clients[frozen:] for name in client.keys("prophetkv:*")}
        well = [f"prophetkv:{{{chunk.key}}}:0".encode() in healthy for chunk in chunks]
        assert store.holds(chunks) == [True] * 30
        for index in range(frozen):
            servers.signal(index, signal.SIGSTOP)
        start = time.monotonic()
        for _ in range(100):
            assert store.holds(chunks) == (well if frozen == 1 else [False] * 30)
        assert time.monotonic() - start < 5
        assert 3 <= tier.stats.errors <= 10
        for chunk, there in zip(chunks, well, strict=True):
            assert store.holds([chunk]) == [there]  # also when only the sick node is asked
            assert not there or store.lookup(chunk).tier == "redis"
        for index in range(frozen):
            servers.signal(index, signal.SIGCONT)
        _until(lambda: all(store.holds(chunks)))
        store.close()


def test_a_bad_entry_that_cannot_be_removed_is_a_miss(servers: Servers) -> None:
    port = servers.start()
    with redis.Redis(port=port) as client:
        _until(lambda: bool(client.ping()))
        tier = RedisStore(f"redis://127.0.0.1:{port}", LAYOUT)
        store = TieredStore([MemoryStore(0), tier])
        store.put(chunk_of(1), kv_of(1))
        store.put(chunk_of(2), kv_of(2))
        store.flush()
        client.setrange(f"prophetkv:{{{chunk_of(1).key}}}:0", 5000, b"rubbish")
        client.execute_command("ACL", "SETUSER", "default", "-unlink")
        for _ in range(4):
            assert store.lookup(chunk_of(1)).kv is None
        assert (tier.stats.misses, tier.stats.rejected["block checksum"]) == (4, 4)
        assert store.lookup(chunk_of(2)).tier == "redis"
        store.close()


def test_a_host_whose_name_is_never_resolved_holds_up_nobody_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def silent(*arguments: Any, **options: Any) -> Any:
        gate.wait()
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    store = TieredStore([MemoryStore(0), RedisStore("redis://nowhere", LAYOUT)], answer={"redis": 0.1})
    told = [store.locate_many([chunk_of(1)]) for _ in range(5)]
    unanswered, paused = "redis tier: no answer in 0.1 s", "redis tier: paused after repeated failures"
    assert told == [([None], (fault,)) for fault in (unanswered, unanswered, unanswered, paused, paused)]
    gate.set()
    deadline = time.monotonic() + 30
    while any(thread.name == "kv-asking" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
    store.close()


@pytest.mark.parametrize("kind", ["refusing", "silent"])
def test_sentinels_that_are_down_or_frozen_cost_a_timeout_in_all(kind: str) -> None:
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(3)]
        places = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
        if kind == "refusing":
            stack.close()
        store = RedisStore(f"redis+sentinel://{','.join(places)}/kv", LAYOUT, timeout=0.25)
        start = time.monotonic()
        for call in (lambda: store.holds([chunk_of(1)]), lambda: store.get(chunk_of(1))):
            with pytest.raises(StoreUnavailable, match="MasterNotFoundError"):
                call()
        assert time.monotonic() - start < 2
        assert store.stats.errors == 2
        store.close()


def test_over_tls(servers: Servers) -> None:
    servers.use_tls()
    port = servers.start()
    store = RedisStore(servers.url("redis", port, "/0"), LARGE, timeout=2)

    def put() -> bool:
        try:
            store.put(chunk_of(1, 1024), kv_of(1, 1024, LARGE))
        except StoreUnavailable:
            return False
        return True

    _until(put)
    assert same(store.get(chunk_of(1, 1024)), kv_of(1, 1024, LARGE))
    assert store.get(chunk_of(2, 1024)) is None
    with servers.client(port) as client:
        client.delete(f"prophetkv:{{{chunk_of(1).key}}}:2")
    assert store.get(chunk_of(1, 1024)) is None
    assert store.stats.rejected == {"incomplete": 1}
    store.close()
