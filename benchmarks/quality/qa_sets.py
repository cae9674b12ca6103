"""Questions with their documents from the two files that RULER builds its QA tasks of: SQuAD 2.0 and HotpotQA."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Question:
    """`gold`: indices of the documents that hold the answer; `related`: of those to distract with first."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """All documents of a file, each once, and its answerable questions."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def read_squad(path: Path) -> QuestionSet:
    """SQuAD 2.0 JSON: gold is the question's paragraph, related are the others of its article.

    Raises InvalidInput when the file is missing or not of that layout.
    """
    return _read(path, "SQuAD", _squad)


def read_hotpotqa(path: Path) -> QuestionSet:
    """HotpotQA JSON (distractor setting): all paragraphs that come with a question are gold, as RULER takes them.

    Raises InvalidInput when the file is missing or not of that layout.
    """
    return _read(path, "HotpotQA", _hotpotqa)


def _read(path: Path, layout: str, convert: Callable[[Any], QuestionSet]) -> QuestionSet:
    if not path.is_file():
        raise InvalidInput(f"no {layout} file at {path}")
    try:
        found = convert(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidInput(f"{path} is not {layout} JSON: {type(error).__name__}: {error}") from error
    if not found.questions:
        raise InvalidInput(f"{path} holds no question that can be answered")
    return found


def _squad(data: Any) -> QuestionSet:
    number = _numbered(paragraph["context"] for article in data["data"] for paragraph in article["paragraphs"])
    questions = []
    for article in data["data"]:
        documents = [number[paragraph["context"]] for paragraph in article["paragraphs"]]
        for paragraph in article["paragraphs"]:
            gold = number[paragraph["context"]]
            related = tuple(document for document in dict.fromkeys(documents) if document != gold)
            questions += [
                Question(entry["question"], tuple(answer["text"] for answer in entry["answers"]), (gold,), related)
                for entry in paragraph["qas"]
                if entry["answers"] and not entry.get("is_impossible", False)
            ]
    return QuestionSet(tuple(number), tuple(questions))


def _hotpotqa(data: Any) -> QuestionSet:
    def document(title: str, sentences: list[str]) -> str:
        return f"{title}\n{''.join(sentences)}"

    number = _numbered(document(*entry) for question in data for entry in question["context"])
    questions = [
        Question(
            entry["question"],
            (entry["answer"],),
            tuple(dict.fromkeys(number[document(*paragraph)] for paragraph in entry["context"])),
        )
        for entry in data
    ]
    return QuestionSet(tuple(number), tuple(questions))


def _numbered(documents: Iterable[str]) -> dict[str, int]:
    return {document: index for index, document in enumerate(sorted(set(documents)))}
