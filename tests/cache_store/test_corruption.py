"""Ten thousand mutations on disk and in Redis: none is accepted, none leaves anything but a miss and a count."""

from __future__ import annotations

import random
import socket
import socketserver
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest
import redis
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache_store import entry
from cache_store.base import ALIGN, ChunkKV, KVLayout, OwnMemory, Retention
from cache_store.codec import CODECS
from cache_store.disk import DiskStore
from cache_store.redis import RedisStore
from cache_store.resp import Address, Connection, EntryReader
from errors import CorruptEntry, StoreUnavailable
from tests.cache_store.conftest import chunk_of, kv_of, same
from tests.conftest import RedisServer

TINY = KVLayout(layers=2, kv_heads=1, head_dim=8, dtype=torch.float32)
HEADER = ALIGN
WORDS = [b"$", b"-1", b"5", b"100", b"\r\n", b"+OK", b"-ERR", b":1", b"*2", b"12345", b"9" * 30, b"\n"]


def stored(number: int, layout: KVLayout = TINY, key: int | None = None) -> bytes:
    return b"".join(entry.encode(chunk_of(number if key is None else key), kv_of(number, layout=layout)))


def sealed(data: bytearray) -> bytearray:
    """With a header checksum that is right, as if its author had meant it."""
    data[HEADER - 16 : HEADER] = xxhash.xxh3_128_digest(bytes(data[: HEADER - 16]))
    return data


def mutations(seed: int, count: int) -> Iterator[tuple[str, bytes]]:
    """Damages of the entry of chunk 1, each by name."""
    good, other = stored(1), stored(2)
    chance = random.Random(seed)

    def spot() -> int:
        return chance.randrange(len(good))

    def flip(data: bytearray) -> bytearray:
        data[spot()] ^= 1 << chance.randrange(8)
        return data

    def field(data: bytearray) -> bytearray:
        """A header that was written so: other version, codec, dtype or shape, small or absurd."""
        offset, kind = chance.choice([(8, "<H"), (10, "<B"), (11, "<B"), *((at, "<I") for at in (12, 16, 20, 24))])
        size = struct.calcsize(kind)
        present = struct.unpack_from(kind, data, offset)[0]
        values = [0, 1, 2, present + 1, (1 << 8 * size) - 1, chance.randrange(1 << 8 * size)]
        struct.pack_into(kind, data, offset, chance.choice([value for value in values if value != present]))
        return sealed(data)

    def zeroes(data: bytearray) -> bytearray:
        start, stop = sorted((spot(), spot()))
        data[start : stop + 1] = bytes(stop + 1 - start)
        return data

    def exchanged(data: bytearray) -> bytearray:
        """One block of another chunk, whose checksum is right there but not here."""
        data[HEADER : 2 * HEADER] = other[HEADER : 2 * HEADER]
        return data

    def rekeyed(data: bytearray) -> bytearray:
        """Another tenant's or another model's entry for the same tokens: only the key differs."""
        return bytearray(stored(1, key=chance.randrange(2, 1 << 60)))

    kinds: dict[str, Callable[[bytearray], bytearray]] = {
        "flip": flip,
        "field": field,
        "zeroes": zeroes,
        "truncated": lambda data: data[: spot()],
        "longer": lambda data: data + chance.randbytes(chance.randrange(1, 3000)),
        "turned": lambda data: data[(cut := chance.randrange(1, len(data))) :] + data[:cut],
        "swapped": lambda data: bytearray(other),
        "exchanged": exchanged,
        "rekeyed": rekeyed,
        "other dtype": lambda data: bytearray(stored(1, replace(TINY, dtype=torch.float16))),
        "other codec": lambda data: bytearray(stored(1, replace(TINY, codec="int8"))),
        "empty": lambda data: bytearray(),
        "noise": lambda data: bytearray(chance.randbytes(len(data))),
    }
    while count:
        name = chance.choice(list(kinds))
        bad = bytes(kinds[name](bytearray(good)))
        if bad != good:
            count -= 1
            yield name, bad


def test_no_mutation_of_a_file_is_accepted(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, TINY, 1 << 20)
    store.put(chunk_of(1), kv_of(1, layout=TINY))
    path = next(tmp_path.rglob("*.kv"))
    tried = 0
    for name, bad in mutations(1, 5000):
        path.write_bytes(bad)
        assert store.get(chunk_of(1)) is None, name
        assert not path.exists(), name
        tried += 1
    assert store.stats.rejected.total() == store.stats.misses == tried == 5000
    assert list(tmp_path.rglob("*.*")) == []
    store.put(chunk_of(1), kv_of(1, layout=TINY))
    assert same(store.get(chunk_of(1)), kv_of(1, layout=TINY))


def test_no_mutation_of_a_redis_value_is_accepted(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, TINY)
    name = f"prophetkv:{{{chunk_of(1).key}}}:0"
    tried = 0
    with redis.Redis.from_url(redis_server.url) as client:
        for kind, bad in mutations(2, 5000):
            client.set(name, bad)
            assert store.get(chunk_of(1)) is None, kind
            tried += 1
        assert client.dbsize() == 0
    assert store.stats.rejected.total() == store.stats.misses == tried == 5000
    assert store.stats.errors == 0
    store.put(chunk_of(1), kv_of(1, layout=TINY))
    assert same(store.get(chunk_of(1)), kv_of(1, layout=TINY))
    store.close()


def test_maintenance_accepts_whole_entries_of_any_model() -> None:
    for layout in (TINY, replace(TINY, codec="int4", head_dim=32), replace(TINY, dtype=torch.bfloat16, layers=5)):
        assert entry.examine(memoryview(stored(7, layout))) == chunk_of(7).key


def test_maintenance_accepts_no_mutation() -> None:
    for name, bad in mutations(3, 2000):
        if name in ("swapped", "rekeyed", "other dtype", "other codec", "field"):
            continue  # whole in themselves, if not what was asked for
        with pytest.raises(CorruptEntry):
            entry.examine(memoryview(bad))


class Agrees:
    """A checksum that is the same as any other: what the parsers do when all checksums are right."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class Counting(OwnMemory):
    """Counts what a reader asks for, which is not Python's to trace."""

    def __init__(self) -> None:
        self.asked = 0

    def buffer(self, nbytes: int) -> Tensor:
        self.asked += nbytes
        return super().buffer(nbytes)


EDITS = st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=64)), max_size=6)


@settings(max_examples=500, deadline=None, database=None)
@given(
    codec=st.sampled_from(sorted(CODECS)),
    header=EDITS,
    body=EDITS,
    cut=st.none() | st.integers(0, 1 << 20),
    more=st.just(b"") | st.binary(max_size=HEADER),
    checksums=st.booleans(),
)
def test_no_bytes_break_the_parsers(
    codec: str,
    header: list[tuple[int, bytes]],
    body: list[tuple[int, bytes]],
    cut: int | None,
    more: bytes,
    checksums: bool,
) -> None:
    """An entry overwritten anywhere, cut or longer, with checksums that matter or do not: CorruptEntry or an entry, no
    other error, and little memory."""
    layout = replace(TINY, codec=codec, head_dim=32)
    data = bytearray(stored(1, layout))
    for edits, first, size in ((header, 0, 80), (body, HEADER, len(data) - HEADER)):
        for spot, noise in edits:
            start = first + spot % size
            data[start : start + len(noise)] = noise[: len(data) - start]
    data = (data if cut is None else data[: cut % len(data)]) + more
    landing = Counting()

    def read() -> ChunkKV:
        if len(data) != entry.entry_bytes(layout, 10):
            raise CorruptEntry("length")  # as whoever reads from a medium does first
        stream = BytesIO(data)

        def fill(view: memoryview) -> None:
            stream.readinto(view)

        return entry.read(fill, chunk_of(1), layout, landing, 1 << 20)

    whole = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    parsers: list[Callable[[], ChunkKV | object]] = [
        lambda: entry.examine(memoryview(data)),
        lambda: entry.check_header(memoryview(data)[:HEADER], chunk_of(1), layout),
        lambda: entry.decode(whole, chunk_of(1), layout),
        read,
    ]
    with pytest.MonkeyPatch.context() as patch:
        if not checksums:
            patch.setattr(xxhash, "xxh3_128_digest", lambda data: Agrees())
        for parse in parsers:
            tracemalloc.start()
            try:
                found = parse()
                assert not checksums or data == stored(1, layout) or not isinstance(found, ChunkKV)
                if isinstance(found, ChunkKV):
                    for layer in range(layout.layers):
                        found.read_into(layer, *torch.empty(2, layout.kv_heads, 10, layout.head_dim))
            except CorruptEntry:
                pass
            finally:
                peak = tracemalloc.get_traced_memory()[1] + landing.asked
                tracemalloc.stop()
            assert peak <= 2 * len(data) + (1 << 20)


class Puppet:
    """A server on a unix socket that reads nothing and says what it is told."""

    def __init__(self, folder: Path) -> None:
        self.address = Address(path=str(folder / "puppet.sock"))
        self.says = [b""]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address.path or "")
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            with peer:
                for piece in self.says:
                    peer.sendall(piece)

    def read(self, lengths: list[int]) -> ChunkKV | None:
        connection = Connection(self.address, 0.2)
        try:
            reader = EntryReader(connection, lengths)
            if not reader.begin():
                return None
            view = memoryview(bytearray(sum(lengths)))
            reader.fill(view)
            return entry.decode(torch.frombuffer(view, dtype=torch.uint8), chunk_of(1), TINY)
        finally:
            connection.close()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture(scope="module")
def puppet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Puppet]:
    made = Puppet(tmp_path_factory.mktemp("puppet"))
    yield made
    made.close()


@settings(max_examples=200, deadline=None, database=None)
@given(
    noise=st.one_of(
        st.binary(max_size=64),
        st.lists(st.sampled_from(WORDS)).map(b"".join),
    )
)
def test_no_reply_breaks_the_client(puppet: Puppet, noise: bytes) -> None:
    puppet.says = [noise]
    tracemalloc.start()
    try:
        found = puppet.read([100, 5])
    except (StoreUnavailable, CorruptEntry):
        found = None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert found is None
    assert peak < 1 << 20


def test_an_address_that_is_none_is_a_failing_tier() -> None:
    with pytest.raises(StoreUnavailable, match="redis tier: UnicodeError"):
        Connection(Address("a" * 80, 6379), 0.2)


def test_torn_replies_are_read_and_replies_out_of_order_are_refused(puppet: Puppet) -> None:
    data, other = stored(1), stored(2)
    cut = [data[:HEADER], data[HEADER:]]
    reply = b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in cut)
    puppet.says = [reply[start : start + 777] for start in range(0, len(reply), 777)]
    assert same(puppet.read([len(part) for part in cut]), kv_of(1, layout=TINY))
    for wrong in (cut[::-1], [other[:HEADER], cut[1]], [cut[0], other[HEADER:]]):
        puppet.says = [b"$%d\r\n%b\r\n" % (len(part), part) for part in wrong]
        with pytest.raises(CorruptEntry):
            puppet.read([len(part) for part in cut])


class Liar(socketserver.ThreadingUnixStreamServer):
    """A Redis that holds nothing, says what it is told to some commands, and hangs up then."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / "liar.sock")
        self.lies: dict[bytes, list[bytes]] = {}  # a reply in the pieces in which it comes; b"*": to whatever is asked
        super().__init__(self.path, _Lying)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class _Lying(socketserver.StreamRequestHandler):
    server: Liar

    def handle(self) -> None:
        truth = {
            b"HELLO": b"%1\r\n+proto\r\n:3\r\n",
            b"GET": b"$-1\r\n",
            b"EXISTS": b":0\r\n",
            b"INFO": b"$13\r\nused_memory:1\r\n",
        }
        while head := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(head[1:]))]
            lie = self.server.lies.get(words[0], self.server.lies.get(b"*"))
            for piece in [truth.get(words[0], b"+OK\r\n")] if lie is None else lie:
                self.wfile.write(piece)
            if lie is not None:
                return


@pytest.fixture(scope="module")
def liar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Liar]:
    made = Liar(tmp_path_factory.mktemp("liar"))
    yield made
    made.shutdown()
    made.server_close()


def _uses(store: RedisStore) -> dict[str, Callable[[], object]]:
    return {
        "get": lambda: store.get(chunk_of(1)),
        "holds": lambda: store.holds([chunk_of(1)]),
        "put": lambda: store.put(chunk_of(1), kv_of(1, layout=TINY)),
        "retain": lambda: store.retain([chunk_of(1).key], Retention()),
        "delete": lambda: store.delete([chunk_of(1).key]),
        "used_bytes": store.used_bytes,
        "whole": lambda: store.whole(chunk_of(1).key),
    }


@pytest.mark.parametrize(
    ("command", "lie", "use"),
    [
        ("HELLO", b":1\r\n", "holds"),
        ("HELLO", b"*0\r\n", "get"),
        ("GET", b":5\r\n", "get"),
        ("GET", b":5\r\n", "whole"),
        ("GET", b"*1\r\n$1\r\nx\r\n", "get"),
        ("INFO", b":1\r\n", "put"),
        ("INFO", b"*0\r\n", "used_bytes"),
        ("INFO", b"$0\r\n\r\n", "put"),
        ("EXISTS", b"*9999999999999999999999\r\n", "holds"),
    ],
)
def test_a_reply_of_another_kind_is_a_failing_tier(liar: Liar, command: str, lie: bytes, use: str) -> None:
    liar.lies = {command.encode(): [lie]}
    store = RedisStore(f"unix://{liar.path}", TINY, timeout=0.2, budget=1 << 30, direct=False)
    with pytest.raises(StoreUnavailable, match="redis tier: "):
        _uses(store)[use]()
    assert store.stats.errors == 1
    store.close()


@settings(max_examples=150, deadline=None, database=None)
@given(
    noise=st.one_of(
        st.binary(max_size=64), st.lists(st.sampled_from([*WORDS, b"%1", b"_", b"(9", b",x"])).map(b"".join)
    ),
    command=st.sampled_from([b"*", b"GET", b"INFO", b"EXISTS", b"SET"]),
    direct=st.booleans(),
)
def test_no_reply_breaks_the_store(liar: Liar, noise: bytes, command: bytes, direct: bool) -> None:
    liar.lies = {command: [noise]}
    store = RedisStore(f"unix://{liar.path}", TINY, timeout=0.2, budget=1 << 30, direct=direct)
    for name, use in _uses(store).items():
        with suppress(StoreUnavailable):
            assert use() is None or name != "get"
    store.close()


@pytest.mark.parametrize("direct", [True, False])
def test_torn_replies_are_read_and_those_of_others_refused_whoever_reads(liar: Liar, direct: bool) -> None:
    store = RedisStore(f"unix://{liar.path}", TINY, direct=direct)
    data, other = (b"$%d\r\n%b\r\n" % (len(entry), entry) for entry in (stored(1), stored(2)))
    liar.lies = {b"GET": [data[start : start + 777] for start in range(0, len(data), 777)]}
    assert same(store.get(chunk_of(1)), kv_of(1, layout=TINY))
    for wrong in (other, data[:100] + other[100:]):
        liar.lies = {b"GET": [wrong]}
        assert store.get(chunk_of(1)) is None
    assert store.stats.rejected.total() == 2
    assert store.stats.errors == 0
    liar.lies = {b"GET": [data[: len(data) // 2]]}
    with pytest.raises(StoreUnavailable):
        store.get(chunk_of(1))
    liar.lies = {}
    assert store.get(chunk_of(1)) is None
    store.close()
