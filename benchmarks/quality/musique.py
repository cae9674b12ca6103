"""MuSiQue (arXiv 2108.00573), multi-hop questions over ten passages of about 512 tokens, as CacheBlend prepared it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.quality import metrics
from benchmarks.quality.sample import Sample
from errors import InvalidInput

# As LongBench allows for the same questions.
MAX_TOKENS = 32

# Between passages, as CacheBlend puts them; it belongs to no chunk.
SEPARATOR = "\n\n"

_HEADER = "Answer a question from the passages below. Give the answer alone, in at most five words.\n\nPassages:\n"
_QUESTION = "\n\nAnswer from the passages above. Give the answer alone, in at most five words.\n\nQuestion: "


def load(path: Path) -> list[Sample]:
    """Samples of a JSON list of `{question, answers: [text], ctxs: [{title, text}]}`, a passage per context text.

    Raises InvalidInput when the file is missing, malformed (it says which entry) or empty.
    """
    if not path.is_file():
        raise InvalidInput(f"no file at {path}", field="musique")
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(f"{path} is not JSON: {error}", field="musique") from error
    if not isinstance(entries, list) or not entries:
        raise InvalidInput(f"{path} is not a list of questions", field="musique")
    samples = []
    for index, entry in enumerate(entries):
        try:
            samples.append(_sample(index, entry))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"{path}: entry {index + 1} is malformed: {error}", field="musique") from error
    return samples


def score(sample: Sample, prediction: str) -> float:
    """F1 over words with the best reference, 0 to 1: the score that MuSiQue, LongBench and CacheBlend report."""
    return max(metrics.qa_f1(prediction, answer) for answer in sample.answers)


def match(sample: Sample, prediction: str) -> float:
    """1 if a reference stands in the prediction, else 0; unlike F1 it does not punish words around the answer."""
    return metrics.string_match_part(prediction, sample.answers)


def _sample(index: int, entry: Any) -> Sample:
    question, answers, passages = entry["question"], entry["answers"], entry["ctxs"]
    if not (isinstance(answers, list) and answers and passages):
        raise ValueError("answers or ctxs is empty or no list")
    if not all(isinstance(text, str) and text for text in (question, *answers)):
        raise ValueError("the question or an answer is empty or not text")
    return Sample(
        suite="musique",
        task="musique",
        index=index,
        header=_HEADER,
        context=tuple(_passage(passage["title"], passage["text"]) for passage in passages),
        question=f"{_QUESTION}{question}\nAnswer:",
        answer_prefix="",
        answers=tuple(answers),
        max_tokens=MAX_TOKENS,
    )


def _passage(title: str, text: str) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError("a passage without text")
    return f"{title}\n\n{text}" if title else text
