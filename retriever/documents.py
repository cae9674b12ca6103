"""What parsing yields and chunking takes: text, and where in the document each part of it stands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Section:
    """From character `start` on, the text stands on `page` (from 1) and under `heading`."""

    start: int
    page: int | None = None
    heading: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A document's text. Sections are sorted by start; the first starts at 0 when there is any."""

    text: str
    title: str | None = None
    sections: tuple[Section, ...] = field(default_factory=tuple)

    def section_at(self, offset: int) -> Section:
        """The section in which the character at `offset` stands."""
        index = bisect_right([section.start for section in self.sections], offset) - 1
        return self.sections[index] if index >= 0 else Section(0)


class TextEncoder(Protocol):
    """The language model's tokenizer as chunking needs it."""

    def __call__(self, text: str, /) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        """Token ids and the characters [start, end) that each covers; text never becomes a special token."""
