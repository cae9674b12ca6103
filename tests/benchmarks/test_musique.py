from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import musique
from benchmarks.quality.sample import segments
from errors import InvalidInput
from retriever.documents import TextEncoder

ENTRY: dict[str, Any] = {
    "question": "Where was the author of Hannibal educated?",
    "answers": ["Exeter College", "Exeter"],
    "ctxs": [{"title": "", "text": f"passage {index} " + "of some words " * 20} for index in range(10)],
}


def write(folder: Path, content: object) -> Path:
    path = folder / "musique.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def test_questions_are_read_with_their_passages(tmp_path: Path, encode: TextEncoder) -> None:
    titled = {**ENTRY, "question": "Who?", "ctxs": [{"title": "Exeter", "text": "a college"}]}
    first, second = musique.load(write(tmp_path, [ENTRY, titled]))
    assert (first.suite, first.task, first.index, second.index) == ("musique", "musique", 0, 1)
    assert first.context == tuple(passage["text"] for passage in ENTRY["ctxs"])
    assert len(segments(first.context, encode, None)) == 10
    assert second.context == ("Exeter\n\na college",)
    assert ENTRY["question"] in first.question
    assert first.answers == ("Exeter College", "Exeter")
    assert first.header == second.header
    assert first.max_tokens == 32
    assert first.digest != second.digest


@pytest.mark.parametrize(
    ("prediction", "f1", "match"),
    [
        ("Exeter College", 1.0, 1.0),
        ("exeter.", 1.0, 1.0),  # the other reference
        ("the Exeter College, Oxford", 0.8, 1.0),  # 2/3 and 1
        ("He went to Exeter College in Oxford", 4 / 9, 1.0),  # 2/7 and 1
        ("Oxford", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_scores(tmp_path: Path, prediction: str, f1: float, match: float) -> None:
    (sample,) = musique.load(write(tmp_path, [ENTRY]))
    assert musique.score(sample, prediction) == pytest.approx(f1)
    assert musique.match(sample, prediction) == match


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a list of questions"),
        ('{"data": []}', "is not a list of questions"),
        ([ENTRY, 3], "entry 2 is malformed"),
        ([ENTRY, ENTRY, {**ENTRY, "ctxs": []}], "entry 3 is malformed"),
        ([{**ENTRY, "answers": []}], "entry 1 is malformed"),
        ([{**ENTRY, "answers": "Exeter"}], "entry 1 is malformed"),
        ([{**ENTRY, "question": ""}], "entry 1 is malformed"),
        ([{**ENTRY, "ctxs": [{"title": "", "text": ""}]}], "entry 1 is malformed: a passage without text"),
        ([{**ENTRY, "ctxs": [{"text": "x"}]}], "entry 1 is malformed: 'title'"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(InvalidInput, match=message) as refusal:
        musique.load(path)
    assert str(path) in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no file at"):
        musique.load(tmp_path / "none.json")
