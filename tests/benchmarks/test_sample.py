from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.sample import Sample, choose, segments
from errors import InvalidInput
from retriever.documents import TextEncoder

SAMPLE = Sample(
    suite="suite",
    task="task",
    index=0,
    header="header",
    context=("one", "two"),
    question="question",
    answer_prefix="prefix",
    answers=("answer",),
    max_tokens=8,
)
CHANGES: dict[str, Any] = {
    "suite": "other",
    "task": "other",
    "index": 1,
    "header": "Header",
    "context": ("onet", "wo"),
    "question": "question ",
    "answer_prefix": "",
    "answers": ("answer", "more"),
    "max_tokens": 9,
    "chat": False,
    "classes": ("class",),
    "group": "8k+",
}


@pytest.mark.parametrize("name", [field.name for field in fields(Sample)])
def test_the_digest_changes_with_every_field(name: str) -> None:
    changed = replace(SAMPLE, **{name: CHANGES[name]})
    assert changed.digest != SAMPLE.digest
    assert replace(changed, **{name: getattr(SAMPLE, name)}).digest == SAMPLE.digest


def test_the_digest_is_the_same_everywhere() -> None:
    """Results are paired by it: another value than this would orphan all that were kept."""
    assert SAMPLE.digest == "71f937e1e19e350dba402de1671d1d7fa643d44abca18454e21a56444e048472"


def test_segments_lose_nothing_and_are_nearly_full(encode: TextEncoder) -> None:
    texts = ("The boat lies in the harbour. " * 200, "The tide turns at noon. " * 100)
    for size in (128, 256, 512, 1024):
        chunks = segments(texts, encode, size)
        assert all(0 < len(chunk) <= size for chunk in chunks)
        joined = [token for chunk in chunks for token in chunk]
        assert joined == [token for text in texts for token in encode(text)[0]]
        assert len(chunks) <= sum(len(encode(text)[0]) // (size * 3 // 4) + 1 for text in texts)


def test_passages_stay_whole_when_asked(encode: TextEncoder) -> None:
    texts = ("word " * 700, "", "another " * 3)
    assert [len(chunk) for chunk in segments(texts, encode, None)] == [len(encode(text)[0]) for text in texts if text]


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 3))
def test_fewer_samples_are_the_first_of_more(count: int, available: int, seed: int) -> None:
    chosen = choose(count, available, seed)
    assert len(chosen) == len(set(chosen)) == min(count, available)
    assert set(chosen) <= set(range(available))
    assert choose(count + 7, available, seed)[: len(chosen)] == chosen


def test_seeds_choose_differently() -> None:
    assert choose(10, 150, 0) != choose(10, 150, 1)


@pytest.mark.parametrize("count", [0, -1])
def test_no_samples_are_refused(count: int) -> None:
    with pytest.raises(InvalidInput, match="at least one"):
        choose(count, 10, 0)
