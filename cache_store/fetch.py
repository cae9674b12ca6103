"""One chunk on its way up from the tiers, and the bound on the bytes that are on their way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from cache_store.base import Chunk, ChunkKV, host_memory

_LOOK_SECONDS = 0.05  # what one look at a silent read counts at most


class Room:
    """At most `limit` bytes at a time, one larger piece excepted when nothing else is there. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self.peak = 0
        self._limit = limit
        self._changed = threading.Condition()

    def take(self, nbytes: int) -> None:
        """Waits until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self.taken or self.taken + nbytes <= self._limit)
            self.taken += nbytes
            self.peak = max(self.peak, self.taken)

    def give_back(self, nbytes: int) -> None:
        """Makes room for others."""
        with self._changed:
            self.taken -= nbytes
            self._changed.notify_all()


class Fetch:
    """A chunk that is being looked for: a Landing for the tier that reads, a promise for those who wait.

    `kv` may be read up to the layers that have arrived, and never has fewer of them than before, unless no tier has the
    chunk after all: then it is None. `tier` is where it comes from, None when no tier had it, and
    `faults` what failed on the way; both are final when `over`. `given_up`: it is over because a tier hung.
    """

    def __init__(self, chunk: Chunk, room: Room, pinned: bool, watch: Callable[[], None] = lambda: None) -> None:
        """`watch`: what whoever waits calls, to give up on the reads that hang."""
        self.chunk = chunk
        self.kv: ChunkKV | None = None
        self.tier: str | None = None
        self.faults: tuple[str, ...] = ()
        self.over = False
        self.given_up = False
        self._watch = watch
        self._patience: float | None = None
        self._looked: float | None = None  # when the tier that reads gave a byte or was found silent; None: it need not
        self._silent = 0.0  # seconds that were waited since its last byte
        self._room = room
        self._pinned = pinned
        self._held = 0
        self._turns = 1  # who is to drop what was read before the room is free: the reader, and those who wait
        self._layers = 0
        self._changed = threading.Condition()

    def buffer(self, nbytes: int) -> Tensor:
        """See Landing. A second buffer is for another tier's attempt, so the first one's room is free again."""
        self._release()
        self.rest()  # that others take the room is not the tier's fault
        self._room.take(nbytes)
        self._held = nbytes
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) if self._pinned else host_memory(nbytes)
        self.moving()
        return memory

    def begin(self, tier: str, patience: float | None) -> None:
        """A tier begins to read. It may be without a byte for `patience` seconds; None: as long as it likes."""
        with self._changed:
            if not self.over:
                self.tier = tier
            self._patience, self._looked, self._silent = patience, time.monotonic(), 0.0

    def rest(self) -> None:
        """No tier reads now."""
        with self._changed:
            self._looked = None

    def moving(self) -> None:
        """See Landing."""
        with self._changed:
            self._looked, self._silent = time.monotonic(), 0.0

    def arrived(self, kv: ChunkKV, layers: int) -> None:
        """See Landing."""
        self.moving()
        with self._changed:
            # Fewer are there when a tier has taken over that is not as far as the one that failed.
            if layers > self._layers and not self.over:
                self.kv, self._layers = kv, layers
                self._changed.notify_all()

    def failed(self, fault: str) -> None:
        """A tier has failed; the next may be asked."""
        with self._changed:
            if not self.over:
                self.faults += (fault,)

    def settle(self, kv: ChunkKV | None, tier: str | None, faults: tuple[str, ...]) -> None:
        """Ends the fetch, unless it was given up: nothing more will arrive."""
        with self._changed:
            if self.over:
                return
            self.kv, self.tier, self.faults = kv, tier, faults
            self._layers = kv.layout.layers if kv is not None else 0
            self.over = True
            self._changed.notify_all()
            if kv is None:
                self._release()

    def end(self) -> None:
        """The reader is done: it found nothing unless it has said otherwise, and holds nothing any more.

        The room is free when those who are in `wait` have had their turn: else much would be read before they take any.
        """
        self.settle(None, None, self.faults)
        self._leave()

    def give_up(self) -> bool:
        """Ends the fetch when the tier that reads has tried the patience; True when it did.

        The reader may go on. Its room is given back, or the reads that hang would leave none to the others.
        """
        with self._changed:
            if self.over or self._patience is None or self._looked is None:
                return False
            now = time.monotonic()
            # A process that was busy or stopped for long has not waited so long: its readers had no turn either.
            self._silent += min(now - self._looked, _LOOK_SECONDS)
            self._looked = now
            if self._silent < self._patience:
                return False
            self.failed(f"{self.tier} tier: no byte in {self._patience:g} s")
            self.settle(None, None, self.faults)
            self.given_up = True
            return True

    def wait(self, layer: int, seconds: float) -> bool:
        """True when the layer can be read or the fetch is over; waits for that up to `seconds`."""
        self._watch()
        with self._changed:
            self._turns += 1
            try:
                return self._changed.wait_for(lambda: self.over or self._layers > layer, seconds)
            finally:
                self._leave()

    def _leave(self) -> None:
        with self._changed:
            self._turns -= 1
            if not self._turns:
                self._release()

    def _release(self) -> None:
        with self._changed:
            held, self._held = self._held, 0
        if held:
            self._room.give_back(held)
