"""RULER (arXiv 2404.06654): 13 tasks of any length for any tokenizer, the same for a seed, and their scores."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from random import Random

from benchmarks.quality import metrics
from benchmarks.quality.haystack import read_sentences
from benchmarks.quality.qa_sets import QuestionSet, read_hotpotqa, read_squad
from benchmarks.quality.ruler_tasks import (
    Draft,
    Needles,
    common_words,
    frequent_words,
    needles,
    numbered,
    question_answering,
    variable_tracking,
)
from benchmarks.quality.sample import Sample, choose
from errors import InvalidInput, PromptTooLong
from retriever.documents import TextEncoder

_NEEDLES = {
    "niah_single_1": Needles("noise", "words", "numbers"),
    "niah_single_2": Needles("essay", "words", "numbers"),
    "niah_single_3": Needles("essay", "words", "uuids"),
    "niah_multikey_1": Needles("essay", "words", "numbers", key_count=4),
    "niah_multikey_2": Needles("needles", "words", "numbers"),
    "niah_multikey_3": Needles("needles", "uuids", "uuids"),
    "niah_multivalue": Needles("essay", "words", "numbers", values_each=4),
    "niah_multiquery": Needles("essay", "words", "numbers", key_count=4, asked=4),
}
_QA = {"qa_1": read_squad, "qa_2": read_hotpotqa}
# What the tasks that are not generated need.
NEEDS = {"qa_1": "needs the path of a SQuAD 2.0 JSON file", "qa_2": "needs the path of a HotpotQA JSON file"}
TASKS = (*_NEEDLES, "vt", "cwe", "fwe", *_QA)


class Ruler:
    """Samples of the tasks.

    `length`: tokens of header, context, question, answer prefix and the longest answer together, each tokenised by
    itself; what a chat template adds comes on top. A context is as long as fits. `haystack`: see `read_sentences`;
    every sample begins at a sentence of its own in it, where RULER always begins with the first.

    `not_run`: the tasks that cannot be made, with the reason. Raises InvalidInput for a path that does not hold what it
    should.
    """

    def __init__(
        self,
        encode: TextEncoder,
        length: int,
        *,
        seed: int = 0,
        haystack: Path | None = None,
        squad: Path | None = None,
        hotpotqa: Path | None = None,
    ) -> None:
        self._encode = encode
        self._length = length
        self._seed = seed
        self._essay = read_sentences(haystack)
        paths = {"qa_1": squad, "qa_2": hotpotqa}
        self._questions: dict[str, QuestionSet] = {
            task: _QA[task](path) for task, path in paths.items() if path is not None
        }
        self.not_run = {task: reason for task, reason in NEEDS.items() if task not in self._questions}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that can be made, in RULER's order."""
        return tuple(task for task in TASKS if task not in self.not_run)

    def count(self, task: str, samples: int) -> int:
        """How many samples there are of a task where so many are asked for: no question comes twice."""
        return min(samples, len(self._questions[task].questions)) if task in self._questions else samples

    def sample(self, task: str, index: int) -> Sample:
        """Sample `index` of a task. The same seed, text and tokenizer give the same sample.

        Raises InvalidInput for an unknown task or one that is not run, PromptTooLong when it does not fit into the
        length.
        """
        if task not in self.tasks:
            reason = self.not_run.get(task, f"there are {', '.join(TASKS)}")
            raise InvalidInput(f"no RULER task {task!r}: {reason}", field="task")
        draft = self._draft(task, index)
        fixed = sum(self._tokens(text) for text in (draft.header, draft.question, draft.answer_prefix))
        budget = self._length - draft.max_tokens - fixed
        units = _largest(lambda count: self._tokens(draft.context(count)), budget, draft.least, draft.most or budget)
        if units < draft.least:
            raise PromptTooLong(f"{task} {index} does not fit into {self._length} tokens")
        return Sample(
            suite=f"ruler-{self._length}",
            task=task,
            index=index,
            header=draft.header,
            context=(draft.context(units),),
            question=draft.question,
            answer_prefix=draft.answer_prefix,
            answers=draft.answers,
            max_tokens=draft.max_tokens,
        )

    def _draft(self, task: str, index: int) -> Draft:
        chance, example = (Random(f"ruler:{self._seed}:{task}:{which}") for which in (index, "example"))
        if task in _NEEDLES:
            return needles(_NEEDLES[task], chance, self._essay)
        if task == "vt":
            return variable_tracking(chance, example)
        if task == "cwe":
            return common_words(chance, example, self._length)
        if task == "fwe":
            return frequent_words(chance, self._length)
        source = self._questions[task]
        order = choose(len(source.questions), len(source.questions), self._seed)
        return question_answering(source, order[index], chance)

    def _tokens(self, text: str) -> int:
        return len(self._encode(text)[0])


def score(sample: Sample, prediction: str) -> float:
    """The published score, 0 to 1: any answer in the prediction for QA, else the share of the answers in it."""
    match = metrics.string_match_part if sample.task in _QA else metrics.string_match_all
    return match(prediction, sample.answers)


def gold(sample: Sample) -> str:
    """A right answer as it would follow the answer prefix: all answers in the order and form of the task.

    The values of one key stand in the order of the text, in which a model that reads it will find them.
    """
    answers = list(sample.answers)
    if sample.task in _QA:
        return f" {answers[0]}"
    if sample.task == "cwe":
        return f" {numbered(answers, ' ')}"
    if sample.task == "niah_multivalue":
        answers.sort(key="".join(sample.context).index)
    return " " + (" " if sample.task == "vt" else ", ").join(answers)


def _largest(tokens: Callable[[int], int], budget: int, least: int, most: int) -> int:
    """The largest count in least..most with `tokens(count)` within the budget; least - 1 if there is none."""
    high = least
    while high < most and tokens(high) <= budget:
        high = min(2 * high, most)
    return least - 1 + bisect_right(range(least, high + 1), budget, key=tokens)
