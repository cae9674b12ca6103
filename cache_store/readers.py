"""The threads that read, of which those that hang can be replaced."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable


class Readers:
    """Runs jobs in the order of their coming, `places` at a time. Thread-safe.

    Threads that hang in a system call cannot be ended. They are daemons, so they keep no process from ending.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: set[threading.Thread] = set()
        self._idle = 0
        self._closed = False
        self._changed = threading.Condition()

    def submit(self, job: Callable[[], None]) -> None:
        """`job` raises nothing."""
        with self._changed:
            self._jobs.append(job)
            self._grow()

    def add(self, places: int) -> None:
        """Makes places for others beside threads that hang; takes them away, below 0, when these have come back."""
        with self._changed:
            self._places += places
            self._grow()

    def close(self, seconds: float) -> None:
        """Drops the jobs that have not begun, and waits for the others up to `seconds`."""
        with self._changed:
            self._closed = True
            self._jobs.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _grow(self) -> None:
        """Under the lock: sees to it that somebody takes the jobs."""
        self._changed.notify(len(self._jobs))
        for _ in range(min(len(self._jobs) - self._idle, self._places - len(self._threads))):
            thread = threading.Thread(target=self._work, name="kv-reader", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _work(self) -> None:
        while True:
            with self._changed:
                if len(self._threads) > self._places:
                    self._threads.discard(threading.current_thread())
                    return
                self._idle += 1
                self._changed.wait_for(lambda: self._jobs or self._closed)
                self._idle -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()
