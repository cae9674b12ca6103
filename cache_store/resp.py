"""The part of RESP2 that moves bulk values, straight between a socket and the caller's buffers.

What redis-py copies three or four times goes here from the kernel into its final place: several times the rate for
values of megabytes. Everything else is redis-py's.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from errors import CorruptEntry, StoreMoved, StoreUnavailable

_LINE_BYTES = 1 << 12  # no reply line is longer, errors included
_BUFFER_BYTES = 1 << 14
_MAX_PIECES = 512  # buffers in one system call; the system takes 1024


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Redis listens, and who we are there. `path`: of a unix socket, else host and port count."""

    host: str = ""
    port: int = 0
    path: str | None = None
    username: str | None = None
    password: str | None = None
    db: int = 0


class Connection:
    """One connection. After an error it is in no known state and must be closed.

    Raises StoreUnavailable when no byte comes or goes for `timeout` seconds, the peer hangs up, answers with an error
    or with what is no RESP; StoreMoved when another node of a cluster has the key.
    """

    def __init__(self, address: Address, timeout: float) -> None:
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._start = self._stop = 0  # of what was received and not yet taken
        self._socket = _connected(address, timeout)
        try:
            self._introduce(address)
        except BaseException:
            self._socket.close()
            raise

    def quiet(self) -> bool:
        """True when nothing was said since the last reply: the peer is there, and no reply is left over."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return self._start == self._stop
        except OSError:
            return False
        return False

    def close(self) -> None:
        """Hangs up."""
        self._socket.close()

    def send(self, commands: Iterable[Sequence[bytes | Sequence[memoryview]]]) -> None:
        """Sends commands, one behind the other. An argument may be in pieces, which are not copied."""
        pieces: deque[memoryview] = deque()
        for arguments in commands:
            head = b"*%d\r\n" % len(arguments)
            for argument in arguments:
                parts = [memoryview(argument)] if isinstance(argument, bytes) else argument
                pieces.append(memoryview(head + b"$%d\r\n" % sum(map(len, parts))))
                pieces.extend(part for part in parts if len(part))
                head = b"\r\n"
            pieces.append(memoryview(head))
        while pieces:
            try:
                count = self._socket.sendmsg([pieces[index] for index in range(min(len(pieces), _MAX_PIECES))])
            except OSError as error:
                raise _unavailable(error) from error
            while pieces and count >= len(pieces[0]):
                count -= len(pieces.popleft())
            if count:
                pieces[0] = pieces[0][count:]

    def read_ok(self) -> None:
        """Takes a reply that must be a simple string."""
        line = self._line()
        if not line.startswith(b"+"):
            raise StoreUnavailable(f"redis tier: not a status: {line[:16]!r}")

    def read_length(self) -> int | None:
        """Takes the beginning of a bulk reply: its length, None for nil."""
        line = self._line()
        if line == b"$-1":
            return None
        if line[:1] != b"$" or not line[1:].isdigit() or len(line) > 16:
            raise StoreUnavailable(f"redis tier: not a bulk reply: {line[:16]!r}")
        return int(line[1:])

    def read_into(self, view: memoryview) -> None:
        """Takes the next bytes of a bulk reply."""
        done = min(len(view), self._stop - self._start)
        view[:done] = self._buffer[self._start : self._start + done]
        self._start += done
        while done < len(view):
            done += self._receive(view[done:])

    def read_end(self) -> None:
        """Takes the end of a bulk reply."""
        if self._line():
            raise StoreUnavailable("redis tier: a value does not end where it should")

    def _introduce(self, address: Address) -> None:
        if address.password is not None:
            who = [address.username.encode()] if address.username else []
            self.send([[b"AUTH", *who, address.password.encode()]])
            self.read_ok()
        if address.db:
            self.send([[b"SELECT", b"%d" % address.db]])
            self.read_ok()

    def _line(self) -> bytes:
        """The next line. Raises what an error reply says."""
        line = bytearray()
        while not line.endswith(b"\r\n"):
            if len(line) > _LINE_BYTES:
                raise StoreUnavailable("redis tier: a reply line without end")
            if self._start == self._stop:
                self._start, self._stop = 0, self._receive(self._buffer)
            end = bytes(self._buffer[self._start : self._stop]).find(b"\n") + 1
            stop = self._start + end if end else self._stop
            line += self._buffer[self._start : stop]
            self._start = stop
        if line.startswith(b"-"):
            told = line[1:-2].decode(errors="replace")
            if told.startswith(("MOVED ", "ASK ")):
                raise StoreMoved(f"redis tier: {told}")
            raise StoreUnavailable(f"redis tier: {told}")
        return bytes(line[:-2])

    def _receive(self, view: memoryview, flags: int = 0) -> int:
        try:
            count = self._socket.recv_into(view, 0, flags)
        except OSError as error:
            raise _unavailable(error) from error
        if not count:
            raise StoreUnavailable("redis tier: the connection was closed")
        return count


class EntryReader:
    """The values of an entry, asked for at once, read as one run of bytes."""

    def __init__(self, connection: Connection, lengths: Sequence[int]) -> None:
        """`lengths`: what each value must measure."""
        self._connection = connection
        self._lengths = deque(lengths)
        self._left = 0  # of the value that is being read
        self._inside = False

    def begin(self) -> bool:
        """Takes the first value's length; False when the entry is not there, and then all replies are taken.

        Raises CorruptEntry for another length.
        """
        if self._next():
            return True
        for _ in range(len(self._lengths)):
            if self._connection.read_length() is not None:
                raise CorruptEntry("incomplete", "the first value is missing, others are there")
        return False

    def fill(self, view: memoryview) -> None:
        """Takes the entry's next bytes. Raises CorruptEntry when a value is missing or has another length."""
        done = 0
        while done < len(view):
            if not self._left:
                self._end()
                if not self._next():
                    raise CorruptEntry("incomplete", "a value is missing")
            count = min(self._left, len(view) - done)
            self._connection.read_into(view[done : done + count])
            done += count
            self._left -= count
        if not self._left and not self._lengths:
            self._end()

    def _next(self) -> bool:
        expected = self._lengths.popleft()
        found = self._connection.read_length()
        if found is None:
            return False
        if found != expected:
            raise CorruptEntry("length", f"a value of {found} bytes instead of {expected}")
        self._left, self._inside = expected, True
        return True

    def _end(self) -> None:
        if self._inside:
            self._connection.read_end()
            self._inside = False


def _connected(address: Address, timeout: float) -> socket.socket:
    try:
        if address.path is None:
            made = socket.create_connection((address.host, address.port), timeout)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            made = socket.socket(socket.AF_UNIX)
            made.settimeout(timeout)
            try:
                made.connect(address.path)
            except OSError:
                made.close()
                raise
    except (OSError, ValueError) as error:  # the second: nothing is called so, whoever told us
        raise _unavailable(error) from error
    # From here on the kernel keeps the time: one system call a read, where Python's own timeout takes two.
    made.settimeout(None)
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    for direction in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        made.setsockopt(socket.SOL_SOCKET, direction, limit)
    return made


def _unavailable(error: OSError | ValueError) -> StoreUnavailable:
    if isinstance(error, BlockingIOError | TimeoutError):
        return StoreUnavailable("redis tier: Timeout: no byte in time")
    return StoreUnavailable(f"redis tier: {type(error).__name__}: {error}")
