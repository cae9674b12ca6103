"""A circuit breaker: what failed repeatedly is left alone for a while, so that it costs nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from errors import StoreUnavailable

_FAILURES = 3
_FIRST_SECONDS, _LONGEST_SECONDS = 1.0, 60.0


@dataclass(slots=True, eq=False)
class Call:
    """A block that a breaker guards. `late`: it came when the breaker was open. `hung`: somebody has given up on it."""

    late: bool = False
    hung: bool = False
    over: bool = False


class Breaker:
    """Opens after three failures in a row, for a second, then for twice as long each time, up to a minute.

    When the time is over one call probes while the others are still refused. None does while a call hangs: it would
    hang as well. Thread-safe.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._hanging = 0
        self._pause = _FIRST_SECONDS
        self._closed_at = 0.0  # when the present pause ends

    @contextmanager
    def guard(self, proves: bool = True) -> Iterator[Call]:
        """Raises StoreUnavailable while the breaker is open; else notes how the block ends.

        proves: whether a block that ends well shows that the thing works. One that asks for little does not, and does
        not take the probe's turn either.
        """
        call = Call()
        with self._lock:
            if self._failures >= _FAILURES:
                now = self._clock()
                if now < self._closed_at or self._hanging:
                    raise StoreUnavailable(f"{self._what}: paused after repeated failures")
                if proves:
                    self._closed_at = now + self._pause  # this call is the probe
                call.late = True
        try:
            yield call
        except StoreUnavailable:
            with self._lock:
                if not call.hung:
                    self._failed(call)
            raise
        else:
            with self._lock:
                if proves and not call.hung:
                    self._failures, self._pause = 0, _FIRST_SECONDS
        finally:
            with self._lock:
                call.over = True
                self._hanging -= call.hung

    def give_up(self, call: Call) -> None:
        """Notes, from another thread, that a call takes too long: unless it is over, it has failed however it ends."""
        with self._lock:
            if not call.over:
                call.hung = True
                self._hanging += 1
                self._failed(call)

    def _failed(self, call: Call) -> None:
        self._failures += 1
        if call.late:
            self._pause = min(2 * self._pause, _LONGEST_SECONDS)
        if self._failures >= _FAILURES:
            self._closed_at = self._clock() + self._pause
