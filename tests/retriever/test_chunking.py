from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from engine.model import text_encoder
from retriever.chunking import chunk_document
from retriever.documents import ParsedDocument, Section, TextEncoder


def words(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """An encoder whose tokens are words with the space before them, as byte-level tokenizers have them."""
    spans = [match.span() for match in re.finditer(r"\s?\S+|\s+", text)]
    return [hash(text[a:b]) % 1000 for a, b in spans], spans


@pytest.fixture(scope="module")
def encode(smollm: Path) -> Callable[[str], tuple[list[int], list[tuple[int, int]]]]:
    tokenizer = AutoTokenizer.from_pretrained(smollm)
    return text_encoder(tokenizer)


def check(document: ParsedDocument, encoder: TextEncoder, limit: int) -> None:
    chunks = chunk_document(document, encoder, limit)
    assert "".join(chunk.text for chunk in chunks) == document.text
    assert [token for chunk in chunks for token in chunk.token_ids] == list(encoder(document.text)[0])
    assert all(0 < len(chunk.token_ids) <= limit for chunk in chunks)
    assert all(document.text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(st.text(min_size=1, max_size=400), st.integers(4, 40))
def test_nothing_is_lost_whatever_the_text(encode: TextEncoder, text: str, limit: int) -> None:
    if encode(text)[0]:
        check(ParsedDocument(text), encode, limit)


def test_no_character_is_split(encode: TextEncoder) -> None:
    document = ParsedDocument("🙂漢字🏳️‍🌈" * 200)
    check(document, encode, 16)
    for chunk in chunk_document(document, encode, 16):
        chunk.text.encode()  # a lone surrogate would raise


def test_a_long_text_makes_nearly_full_chunks(encode: TextEncoder) -> None:
    text = ("The boat lies in the harbour. " * 9 + "\n\n") * 60
    chunks = chunk_document(ParsedDocument(text), encode, 128)
    check(ParsedDocument(text), encode, 128)
    assert all(96 < len(chunk.token_ids) <= 128 for chunk in chunks[:-1])


@pytest.mark.parametrize(("mark", "ending"), [("\n\n", "\n\n"), (". ", "."), ("\n", "\n")])
def test_chunks_end_where_the_text_does(mark: str, ending: str) -> None:
    text = mark.join(" ".join(f"w{i}x{j}" for j in range(9)) for i in range(40))
    chunks = chunk_document(ParsedDocument(text), words, 40)
    assert all(chunk.text.rstrip(" ").endswith(ending) or chunk.text.endswith(mark.strip()) for chunk in chunks[:-1])


def test_a_chunk_knows_page_and_heading() -> None:
    text = "a b c d e f g h"
    document = ParsedDocument(text, None, (Section(0, page=1), Section(8, page=2, heading="Engines")))
    chunks = chunk_document(document, words, 4)
    assert [(chunk.page, chunk.last_page, chunk.heading) for chunk in chunks] == [(1, 1, None), (2, 2, "Engines")]
    [whole] = chunk_document(document, words, 99)
    assert (whole.page, whole.last_page, whole.heading) == (1, 2, None)


def test_a_long_text_is_cut_in_parts_and_loses_nothing(encode: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retriever.chunking._PART_CHARACTERS", 300)
    text = "Sentence one is here. And two!\n\nA paragraph of \u00fcnicode and\nlines. " * 40 + "x" * 1000
    longest = 0

    def watched(part: str) -> tuple[Sequence[int], Sequence[tuple[int, int]]]:
        nonlocal longest
        longest = max(longest, len(part))
        return encode(part)

    chunks = chunk_document(ParsedDocument(text), watched, 40)
    assert "".join(chunk.text for chunk in chunks) == text
    assert [chunk.ordinal for chunk in chunks] == list(range(len(chunks)))
    assert all(text[chunk.start : chunk.end] == chunk.text for chunk in chunks)
    assert 250 < longest <= 300
