"""Cuts a document into chunks of the language model's own tokens, without overlap and without loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from retriever.documents import ParsedDocument, TextEncoder

VERSION = 2  # part of the index signature: a change here re-chunks every document

# Documents are tokenised in parts of about this many characters, which bounds memory; a part ends with a paragraph.
_PART_CHARACTERS = 200_000

# Where a chunk may end early, best first. Only the last quarter of a chunk is searched, so chunks stay nearly full.
_BREAKS = ("\n\n", "\n", ". ", " ")


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Tokens of the characters [start, end) of a document: from `page` to `last_page`, beginning under `heading`."""

    ordinal: int
    token_ids: tuple[int, ...]
    start: int
    end: int
    text: str
    page: int | None
    last_page: int | None
    heading: str | None


def chunk_document(document: ParsedDocument, encode: TextEncoder, max_tokens: int) -> list[TextChunk]:
    """Chunks of at most `max_tokens` tokens. Their texts concatenate to the document's."""
    chunks: list[TextChunk] = []
    for begin, part in _parts(document.text):
        ids, offsets = encode(part)
        for first, last in _cuts(part, offsets, max_tokens):
            start = begin + (offsets[first][0] if first else 0)
            end = begin + (offsets[last][0] if last < len(ids) else len(part))
            text = document.text[start:end]
            # The sections of the first and last word: a chunk may begin or end with the white space between two.
            first_word = document.section_at(start + len(text) - len(text.lstrip()))
            last_word = document.section_at(max(start, start + len(text.rstrip()) - 1))
            where = first_word.page, last_word.page, first_word.heading
            chunks.append(TextChunk(len(chunks), tuple(ids[first:last]), start, end, text, *where))
    return chunks


def _parts(text: str) -> Iterator[tuple[int, str]]:
    """Start and text of each part."""
    start = 0
    while start < len(text):
        stop = start + _PART_CHARACTERS
        if stop < len(text):
            ends = (text.rfind(mark, start + _PART_CHARACTERS // 2, stop) + len(mark) for mark in _BREAKS)
            stop = next((end for mark, end in zip(_BREAKS, ends, strict=True) if end >= start + len(mark)), stop)
        yield start, text[start:stop]
        start = stop


def _cuts(text: str, offsets: Sequence[tuple[int, int]], max_tokens: int) -> Iterator[tuple[int, int]]:
    """Token ranges [first, last) of the chunks."""
    first = 0
    while first < len(offsets):
        last = first + max_tokens
        if last >= len(offsets):
            yield first, len(offsets)
            return
        last = _cut_before(text, offsets, first + max_tokens * 3 // 4, last)
        yield first, last
        first = last


def _cut_before(text: str, offsets: Sequence[tuple[int, int]], low: int, high: int) -> int:
    """A token index in (low, high] at which to cut:

    after the last paragraph, line, sentence or word that ends there.
    """
    for mark in _BREAKS:
        for index in range(high, low, -1):
            start = offsets[index][0]
            ends_there = text.startswith(mark, start - len(mark)) or (
                # Byte-level tokenizers put the space before a word into the word's token.
                mark.endswith(" ") and text.startswith(mark, start - len(mark) + 1)
            )
            if ends_there and _whole_characters(offsets, index):
                return index
    return next((index for index in range(high, low, -1) if _whole_characters(offsets, index)), high)


def _whole_characters(offsets: Sequence[tuple[int, int]], index: int) -> bool:
    """No character is split between the tokens before and after a cut at `index`."""
    return offsets[index - 1][1] <= offsets[index][0]
