"""Redis tier: an entry cut into values of at most 2 MiB, for larger ones are slow to move (ADR 3).

The server evicts by itself (`maxmemory`, `allkeys-lfu`); a missing value makes the entry a miss. Bulk values travel
over connections of our own (`resp.py`), to the node that Sentinel or the cluster names; redis-py does everything else,
and the bulk values too where it must: over TLS, and when a cluster has moved a key.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.connection import parse_url
from redis.exceptions import AskError
from redis.retry import Retry
from redis.sentinel import Sentinel

from cache_store import entry
from cache_store.base import KEEP, OWN_MEMORY, Chunk, ChunkKV, KVLayout, Landing, Retention, StoreStats
from cache_store.breaker import Breaker
from cache_store.resp import Address, Connection, EntryReader
from errors import CorruptEntry, StoreMoved, StoreUnavailable

log = logging.getLogger(__name__)

# Of an entry in one value, and read before they are verified: in smaller steps the server waits too often.
VALUE_BYTES = 2 << 20
MAX_VALUES = 256  # 512 MiB an entry; larger ones are not kept here
_IDLE_CONNECTIONS = 8
_PIPELINED = 1000  # commands on their way at a time

T = TypeVar("T")

# These have no type hints.
_Cluster: Any = RedisCluster
_Node: Any = ClusterNode
_Sentinel: Any = Sentinel
_parse: Any = parse_url


class RedisStore:
    """Entries in the Redis at `url`; no operation waits longer than `timeout` seconds for a byte.

    Besides the URLs of redis-py there are `redis+sentinel://[user:password@]host:port[,host:port]/service[/db]` and
    `redis+cluster://[user:password@]host:port[,host:port]`, over TLS with `rediss`, and with redis-py's options.
    """

    name = "redis"

    def __init__(self, url: str, layout: KVLayout, timeout: float = 0.25, budget: int = 0, direct: bool = True) -> None:
        """`budget`: nothing is written that would make the server hold more bytes; 0: as its own maxmemory says.

        `direct`: bulk values over connections of our own where that can be; else redis-py moves them too.
        """
        self.stats = StoreStats()
        self._layout = layout
        self._timeout = timeout
        self._budget = budget
        self._direct = direct
        self._server = _Server(url, timeout)
        self._breakers: dict[str, Breaker] = {}  # of the nodes of a cluster
        self._idle: list[tuple[Address, Connection]] = []
        self._lock = threading.Lock()

    def get(self, chunk: Chunk, landing: Landing = OWN_MEMORY) -> ChunkKV | None:
        start = time.perf_counter()
        lengths = _lengths(entry.entry_bytes(self._layout, len(chunk.token_ids)))
        if len(lengths) > MAX_VALUES:
            return None
        try:
            with self._counted():
                kv = self._read(chunk, lengths, landing)
        except CorruptEntry as error:
            self.stats.reject(error.reason)
            self._remove_remains(chunk.key)
            kv = None
        if kv is None:
            self.stats.count("misses")
            return None
        self.stats.hit(kv.nbytes, start)
        return kv

    def holds(self, chunks: Sequence[Chunk]) -> list[bool]:
        """See KVStore. A node of a cluster that fails holds nothing, and is left alone for a while if it does again."""
        there: dict[str, bool] = {}
        failed: list[StoreUnavailable] = []
        count = self._ask(_node_count)
        for node, names in self._ask(partial(_nodes, [_name(chunk.key, 0) for chunk in chunks])).items():
            try:
                with self._guard(node):
                    replies = self._ask(partial(_pipelined, [("EXISTS", name) for name in names], node))
                there.update(zip(names, map(bool, replies), strict=True))
            except StoreUnavailable as error:
                failed.append(error)
        if len(failed) == count:
            raise failed[-1]
        if failed:
            log.warning("a part of the %s", failed[-1])  # "redis tier: ..."
        return [there.get(_name(chunk.key, 0), False) for chunk in chunks]

    def put(self, chunk: Chunk, kv: ChunkKV, retention: Retention = KEEP) -> None:
        values = _cut(entry.encode(chunk, kv))
        size = entry.entry_bytes(kv.layout, kv.tokens)
        if len(values) > MAX_VALUES or (self._budget and self.used_bytes() + size > self._budget):
            self.stats.count("dropped_writes")
            return
        try:
            with self._counted():
                self._write(chunk.key, values, retention)
        except BaseException:
            self._remove_remains(chunk.key)
            raise
        self.stats.count("writes")

    def retain(self, keys: Iterable[str], retention: Retention) -> None:
        """See KVStore. The server evicts as it likes: nothing can be pinned here."""
        wanted = list(keys)
        for start in range(0, len(wanted), _PIPELINED):
            held = wanted[start : start + _PIPELINED]
            for index in range(MAX_VALUES):
                keys = {_name(key, index): key for key in held}
                held = []
                for node, names in self._ask(partial(_nodes, list(keys))).items():
                    replies = self._ask(partial(_pipelined, _retaining(names, retention), node))
                    held += [keys[name] for name, found in zip(names, replies[1::2], strict=True) if found]
                if not held:
                    break

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask(partial(_unlink, [_name(key, index) for index in range(MAX_VALUES)]))

    def entry_keys(self) -> list[str]:
        """Of all entries, of whatever model: for maintenance, as it looks at every name that the server holds."""
        return self._ask(_entry_keys)

    def whole(self, key: str) -> bytes:
        """An entry's bytes unverified, as far as its values are there: for maintenance."""
        return self._ask(lambda client: b"".join(_values(key, client)))

    def used_bytes(self) -> int:
        """Memory that the server uses, for whatever it holds."""
        return self._ask(_used_bytes)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()
        self._server.close()

    def _read(self, chunk: Chunk, lengths: list[int], landing: Landing) -> ChunkKV | None:
        names = [_name(chunk.key, index) for index in range(len(lengths))]
        address = self._server.address(names[0]) if self._direct else None
        if address is not None:
            try:
                with self._connection(address) as connection:
                    connection.send([[b"GET", name.encode()] for name in names])
                    reader = EntryReader(connection, lengths)
                    if not reader.begin():
                        return None
                    return entry.read(reader.fill, chunk, self._layout, landing, VALUE_BYTES)
            except StoreMoved:
                pass  # redis-py follows, and learns the cluster's new shape

        def fetch(client: Any) -> list[Any]:
            (node,) = _nodes(names, client)
            return _pipelined([("GET", name) for name in names], node, client)

        values = self._server.ask(fetch)
        if values[0] is None:
            return None
        for value, length in zip(values, lengths, strict=True):
            if not isinstance(value, bytes | None):
                raise StoreUnavailable(f"redis tier: not a bulk reply: {type(value).__name__}")
            if value is None or len(value) != length:
                raise CorruptEntry("incomplete" if value is None else "length")
        return entry.read(_Bytes(values).fill, chunk, self._layout, landing, VALUE_BYTES)

    def _write(self, key: str, values: list[list[memoryview]], retention: Retention) -> None:
        """The value with the header goes last: where it is, there is the whole entry."""
        ttl = [] if retention.seconds is None else [b"PX", b"%d" % _milliseconds(retention.seconds)]
        order = list(enumerate(values))[::-1]
        address = self._server.address(_name(key, 0)) if self._direct else None
        if address is not None:
            try:
                with self._connection(address) as connection:
                    connection.send([[b"SET", _name(key, index).encode(), value, *ttl] for index, value in order])
                    for _ in order:
                        connection.read_ok()
                    return
            except StoreMoved:
                pass
        for index, value in order:
            options = {} if retention.seconds is None else {"px": _milliseconds(retention.seconds)}
            self._server.ask(partial(_set, _name(key, index), b"".join(value), options))

    @contextmanager
    def _connection(self, address: Address) -> Iterator[Connection]:
        """A connection to `address`, kept for later unless the block raises."""
        connection = self._kept(address)
        if connection is None:
            try:
                connection = Connection(address, self._timeout)
            except StoreUnavailable:
                self._server.forget()
                raise
        try:
            yield connection
        except BaseException as error:
            connection.close()
            if isinstance(error, StoreUnavailable):
                self._server.forget()
            raise
        with self._lock:
            self._idle.append((address, connection))
            surplus = self._idle[:-_IDLE_CONNECTIONS]
            del self._idle[:-_IDLE_CONNECTIONS]
        for _, old in surplus:
            old.close()

    def _kept(self, address: Address) -> Connection | None:
        """A connection to `address` from the kept ones that is still good, if there is any."""
        while True:
            with self._lock:
                item = next((item for item in reversed(self._idle) if item[0] == address), None)
                if item is None:
                    return None
                self._idle.remove(item)
            if item[1].quiet():
                return item[1]
            item[1].close()

    def _ask(self, call: Callable[[Any], T]) -> T:
        with self._counted():
            return self._server.ask(call)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable:
            self.stats.count("errors")
            raise

    def _guard(self, node: Any) -> AbstractContextManager[object]:
        if node is None:
            return nullcontext()
        return self._breakers.setdefault(node.name, Breaker(f"redis tier: node {node.name}")).guard()

    def _remove_remains(self, key: str) -> None:
        """After a write that failed half-way, which may leave values without their header."""
        with suppress(StoreUnavailable):  # when it does not answer, that is said already
            self.delete([key])


class _Server:
    """redis-py's client for one Redis, one behind Sentinel, or a cluster; and where bulk values go."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        scheme, _, rest = url.partition("://")
        protocol, _, self._kind = scheme.partition("+")
        self._rest, _, self._query = rest.partition("?")
        self._tls = protocol == "rediss"
        # Nothing is asked twice: whoever asks has another tier to turn to.
        self._options = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        self._lock = threading.Lock()
        self._client: Any = None
        self._master: Address | None = None
        self._stale = False  # what the client knows of the cluster

    def ask(self, call: Callable[[Any], T]) -> T:
        """`call` of the client, with redis-py's errors as StoreUnavailable."""
        try:
            return call(self._connected())
        except StoreUnavailable:
            raise
        except Exception as error:  # where a reply is of another kind than it should be redis-py stumbles anywhere
            self.forget()
            raise StoreUnavailable(f"redis tier: {type(error).__name__}: {error}") from error

    def address(self, name: str) -> Address | None:
        """Where the value `name` is; None when only redis-py can reach it."""
        if self._tls:
            return None
        if self._kind == "cluster":
            return self.ask(partial(_node_address, name, self._credentials()))
        if self._master is None:
            self._master = self.ask(self._find_master)
        return self._master

    def forget(self) -> None:
        """After a failure: asks anew who the master is, or which node has what."""
        self._master = None
        self._stale = True

    def close(self) -> None:
        """Closes the client's connections."""
        if self._client is not None:
            self._client.close()

    def _connected(self) -> Any:
        with self._lock:
            if self._client is None:
                self._client = self._connect()
            elif self._stale and self._kind == "cluster":
                self._client.nodes_manager.initialize()
            self._stale = False
            return self._client

    def _connect(self) -> Any:
        never = Retry(NoBackoff(), 0)
        if not self._kind:
            return redis.Redis.from_url(self._url, retry=never, **self._options)
        common = {"retry": never, "ssl": self._tls, **_parse(f"redis://?{self._query}"), **self._options}
        nodes = self._nodes()
        if self._kind == "cluster":
            return _Cluster(startup_nodes=[_Node(*node) for node in nodes], **self._credentials(), **common)
        service, _, db = self._path().partition("/")
        # They are asked one after the other: none of them may take the time of all.
        patience = {name: seconds / len(nodes) for name, seconds in self._options.items()}
        sentinel = _Sentinel(nodes, sentinel_kwargs={**common, **patience})
        return sentinel.master_for(service, db=int(db or 0), **self._credentials(), **common)

    def _find_master(self, client: redis.Redis) -> Address | None:
        if self._kind == "sentinel":
            pool: Any = client.connection_pool
            host, port = pool.get_master_address()
            _, _, db = self._path().partition("/")
            return Address(host, port, db=int(db or 0), **self._credentials())
        found = client.connection_pool.connection_kwargs
        return Address(
            found.get("host", "localhost"),
            found.get("port", 6379),
            found.get("path"),  # of a Unix socket
            found.get("username"),
            found.get("password"),
            int(found.get("db") or 0),
        )

    def _nodes(self) -> list[tuple[str, int]]:
        hosts = self._rest.partition("/")[0].rpartition("@")[2]
        pairs = [host.rpartition(":") for host in hosts.split(",")]
        return [(host or port, int(port) if host else 6379) for host, _, port in pairs]

    def _path(self) -> str:
        return self._rest.partition("/")[2]

    def _credentials(self) -> dict[str, Any]:
        who, _, _ = self._rest.partition("/")[0].rpartition("@")
        user, _, password = who.partition(":")
        return {"username": unquote(user) or None, "password": unquote(password) or None}


class _Bytes:
    """Values that are here already, read as one run of bytes."""

    def __init__(self, values: Sequence[bytes | None]) -> None:
        self._values = [memoryview(value) for value in values if value is not None]

    def fill(self, view: memoryview) -> None:
        """See entry.Fill."""
        done = 0
        while done < len(view):
            part = self._values[0][: len(view) - done]
            view[done : done + len(part)] = part
            done += len(part)
            self._values[0] = self._values[0][len(part) :]
            if not self._values[0]:
                self._values.pop(0)


def _node_address(name: str, credentials: dict[str, Any], client: Any) -> Address:
    node = client.get_node_from_key(name)
    if node is None:
        raise StoreUnavailable("redis tier: no node of the cluster serves the key")
    return Address(node.host, int(node.port), **credentials)


def _nodes(names: Iterable[str], client: Any) -> dict[Any, list[str]]:
    """The nodes of a cluster that have these values, each with its own; None has them where there is no cluster."""
    nodes: dict[Any, list[str]] = {}
    for name in names:
        node = client.get_node_from_key(name) if isinstance(client, _Cluster) else None
        nodes.setdefault(node, []).append(name)
    return nodes


def _node_count(client: Any) -> int:
    """Of those that have values."""
    return len(client.get_primaries()) if isinstance(client, _Cluster) else 1


def _pipelined(commands: Sequence[tuple[str | int, ...]], node: Any, client: Any) -> list[Any]:
    """The replies of one node. redis-py's pipeline for a cluster would ask a silent one again for each command."""
    asked = client if node is None else client.get_redis_connection(node)
    pipeline = asked.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    for index, reply in enumerate(replies):
        if isinstance(reply, AskError):  # the client follows, and learns where the key is now
            replies[index] = client.execute_command(*commands[index])
        elif isinstance(reply, Exception):
            raise reply
    return replies


def _set(name: str, value: bytes, options: dict[str, int], client: Any) -> None:
    client.set(name, value, **options)


def _used_bytes(client: Any) -> int:
    """Of the server, or of all nodes of a cluster."""
    told = client.info("memory")
    nodes = [told] if not told or "used_memory" in told else told.values()
    return sum(int(node["used_memory"]) for node in nodes)


def _entry_keys(client: Any) -> list[str]:
    names = client.scan_iter(match=_name("*", 0).replace("{*}", "[{]*[}]"), count=1000)
    return sorted({bytes(name).partition(b"{")[2].partition(b"}")[0].decode(errors="replace") for name in names})


def _values(key: str, client: Any) -> Iterator[bytes]:
    for index in range(MAX_VALUES):
        value = client.get(_name(key, index))
        if value is None:
            return
        yield value


def _unlink(names: list[str], client: Any) -> None:
    client.unlink(*names)


def _retaining(names: Iterable[str], retention: Retention) -> list[tuple[str | int, ...]]:
    """Two commands for each of the values, of which the second says whether there is one."""
    if retention.seconds is None:
        return [command for name in names for command in (("PERSIST", name), ("EXISTS", name))]
    life = _milliseconds(retention.seconds)
    return [command for name in names for command in (("PEXPIRE", name, life), ("EXISTS", name))]


def _lengths(size: int) -> list[int]:
    """Of the values of an entry of `size` bytes."""
    return [min(VALUE_BYTES, size - start) for start in range(0, size, VALUE_BYTES)]


def _cut(pieces: Iterable[memoryview]) -> list[list[memoryview]]:
    """The pieces of each value. Nothing is copied."""
    values: list[list[memoryview]] = [[]]
    room = VALUE_BYTES
    for piece in pieces:
        while len(piece):
            if not room:
                values.append([])
                room = VALUE_BYTES
            part, piece = piece[:room], piece[room:]
            values[-1].append(part)
            room -= len(part)
    return values


def _milliseconds(seconds: float) -> int:
    return max(1, int(seconds * 1000))


def _name(key: str, index: int) -> str:
    # The hash tag keeps the values of an entry in one cluster slot.
    return f"prophetkv:{{{key}}}:{index}"
