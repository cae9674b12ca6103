"""Tokens to text, as they come: whole characters only, no part of a stop string, and the citations in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_CITATION = re.compile(r"\[(\d{1,3})\]")


@dataclass(frozen=True, slots=True)
class Cited:
    """Source `number` is cited at characters [start, end) of the answer."""

    number: int
    start: int
    end: int


class AnswerText:
    """Accumulates one answer. `text` is what was given out so far; `stopped` tells that a stop string ended it."""

    def __init__(self, decode: Callable[[int], str], stop: Sequence[str], sources: int) -> None:
        """`decode` gives the text that a token completes; `sources` is how many there are to cite."""
        self.text = ""
        self.stopped = False
        self._decode = decode
        self._stop = tuple(stop)
        self._sources = sources
        self._held = ""  # decoded, but it may be the beginning of a stop string
        self._searched = 0

    def add(self, token: int) -> str:
        """Takes a token; returns the text that can be shown now, maybe none."""
        self._held += self._decode(token)
        cuts = [self._held.index(stop) for stop in self._stop if stop in self._held]
        if cuts:
            self.stopped = True
            return self._release(min(cuts))
        return self._release(len(self._held) - self._undecided())

    def finish(self) -> str:
        """The text held back until now."""
        return "" if self.stopped else self._release(len(self._held))

    def new_citations(self) -> list[Cited]:
        """Citations completed since the last call, of sources that exist."""
        found = [
            Cited(int(match[1]), match.start(), match.end()) for match in _CITATION.finditer(self.text, self._searched)
        ]
        if found:
            self._searched = found[-1].end
        return [cited for cited in found if 1 <= cited.number <= self._sources]

    def _release(self, count: int) -> str:
        fresh, self._held = self._held[:count], self._held[count:]
        self.text += fresh
        return fresh

    def _undecided(self) -> int:
        """How many characters at the end may begin a stop string."""
        sizes = (
            size
            for stop in self._stop
            for size in range(min(len(stop) - 1, len(self._held)), 0, -1)
            if self._held.endswith(stop[:size])
        )
        return max(sizes, default=0)
