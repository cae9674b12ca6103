"""LongBench (arXiv 2308.14508) and LongBench-E: 21 data sets read from the published JSONL files, and their scores.

The prompts say what the published ones say, in our own words; limits, metrics and rules are the published ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from benchmarks.quality import metrics
from benchmarks.quality.sample import Sample
from errors import InvalidInput, PromptTooLong
from retriever.documents import TextEncoder

Metric = Literal[
    "qa_f1",
    "qa_f1_zh",
    "rouge_l",
    "rouge_l_zh",
    "classification",
    "retrieval",
    "retrieval_zh",
    "count",
    "code_similarity",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """How a data set is asked and scored. `{input}` in the question stands for the line's own.

    chat: the publication leaves the chat template out for few-shot and code sets; first_line: only the first line of an
    answer is scored, for the model goes on with examples of its own.
    """

    header: str
    question: str
    metric: Metric
    max_tokens: int
    chat: bool = True
    first_line: bool = False


_CONCISE = "as briefly as you can, in one phrase if that is possible, and do not explain it"
_UNANSWERABLE = (
    "as briefly as you can, in one phrase or sentence if that is possible. If the article does not hold the answer, "
    'write "unanswerable". If it is a yes/no question, write "yes", "no" or "unanswerable". Do not explain the answer'
)
_ONLY_ANSWER = "Give the answer alone, in no other words."
_PASSAGES = DataSet(
    header=f"Answer a question from the passages below. {_ONLY_ANSWER}\n\nThese are the passages.\n",
    question=f"\n\nAnswer the question from the passages above. {_ONLY_ANSWER}\n\nQuestion: {{input}}\nAnswer:",
    metric="qa_f1",
    max_tokens=32,
)

DATA_SETS: dict[str, DataSet] = {
    "narrativeqa": DataSet(
        header=f"Below are a story, a novel or a film script, and a question. Answer it {_CONCISE}.\n\nStory: ",
        question=f"\n\nNow answer the question about the story {_CONCISE}.\n\nQuestion: {{input}}\n\nAnswer:",
        metric="qa_f1",
        max_tokens=128,
    ),
    "qasper": DataSet(
        header=f"Below are a scientific article and a question. Answer it {_UNANSWERABLE}.\n\nArticle: ",
        question=f"\n\nAnswer the question about the article above {_UNANSWERABLE}.\n\nQuestion: {{input}}\n\nAnswer:",
        metric="qa_f1",
        max_tokens=128,
    ),
    "multifieldqa_en": DataSet(
        header="Read the text below and give a short answer.\n\n",
        question=f"\n\nNow answer this question from the text above. {_ONLY_ANSWER}\n\nQuestion: {{input}}\nAnswer:",
        metric="qa_f1",
        max_tokens=64,
    ),
    "multifieldqa_zh": DataSet(
        header="请阅读下面的文字，并用中文作简短的回答。\n\n",
        question="\n\n现在请根据以上文字回答问题，只给出答案，不要说别的话。\n\n问题：{input}\n回答：",
        metric="qa_f1_zh",
        max_tokens=64,
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": DataSet(
        header="请根据下面的文章回答问题。\n\n文章：",
        question="\n\n请根据以上文章回答这个问题。\n\n问题：{input}\n回答：",
        metric="rouge_l_zh",
        max_tokens=128,
    ),
    "gov_report": DataSet(
        header="Below is a report of a government agency. Sum it up on one page.\n\nReport:\n",
        question="\n\nNow sum up the report on one page.\n\nSummary:",
        metric="rouge_l",
        max_tokens=512,
    ),
    "qmsum": DataSet(
        header="Below are the transcript of a meeting and a query, a question or an instruction. "
        "Answer it in one or more sentences.\n\nTranscript:\n",
        question="\n\nAnswer the query about the meeting above in one or more sentences.\n\nQuery: {input}\nAnswer:",
        metric="rouge_l",
        max_tokens=512,
    ),
    "multi_news": DataSet(
        header="Below are several pieces of news. Sum up all of them on one page.\n\nNews:\n",
        question="\n\nNow sum up all the news on one page.\n\nSummary:",
        metric="rouge_l",
        max_tokens=512,
    ),
    "vcsum": DataSet(
        header="下面是一份会议记录。请阅读，然后写一段话总结会议内容。\n会议记录：\n",
        question="\n\n会议总结：",
        metric="rouge_l_zh",
        max_tokens=512,
    ),
    "trec": DataSet(
        header="Say of what type the last question is. Other questions come first, as examples.\n\n",
        question="\n{input}",
        metric="classification",
        max_tokens=64,
        chat=False,
        first_line=True,
    ),
    "triviaqa": DataSet(
        header=f"Answer the last question from its passage. {_ONLY_ANSWER} Some examples come first.\n\n",
        question="\n\n{input}",
        metric="qa_f1",
        max_tokens=32,
        chat=False,
        first_line=True,
    ),
    "samsum": DataSet(
        header="Sum up the last dialogue in a few short sentences. Some examples come first.\n\n",
        question="\n\n{input}",
        metric="rouge_l",
        max_tokens=128,
        chat=False,
        first_line=True,
    ),
    "lsht": DataSet(
        header="请判断最后一条新闻属于哪一类。前面是一些例子。\n\n",
        question="\n{input}",
        metric="classification",
        max_tokens=64,
        chat=False,
        first_line=True,
    ),
    "passage_count": DataSet(
        header="Below are paragraphs from Wikipedia, some of which may stand there more than once. Read them with care "
        "and find out how many different paragraphs there are when repetitions are not counted.\n\n",
        question="\n\nHow many different paragraphs are there when repetitions are not counted? "
        "Write the number only, such as 1, 2 or 3.\n\nThe number is: ",
        metric="count",
        max_tokens=32,
    ),
    "passage_retrieval_en": DataSet(
        header="Below are 30 paragraphs from Wikipedia, and an abstract of one of them. "
        "Find out of which paragraph it is the abstract.\n\n",
        question="\n\nThis is the abstract.\n\n{input}\n\nWrite the number of the paragraph it is the abstract of, "
        'in the form "Paragraph 1", "Paragraph 2" and so on.\n\nThe answer is: ',
        metric="retrieval",
        max_tokens=32,
    ),
    "passage_retrieval_zh": DataSet(
        header="下面有若干段文字，以及其中一段的摘要。请找出摘要出自哪一段。\n\n",
        question='\n\n这是摘要。\n\n{input}\n\n请写出它所属段落的编号，格式为"段落1"、"段落2"等。\n\n答案：',
        metric="retrieval_zh",
        max_tokens=32,
    ),
    "lcc": DataSet(
        header="Continue the code below.\n",
        question="Next line of code:\n",
        metric="code_similarity",
        max_tokens=64,
        chat=False,
    ),
    "repobench-p": DataSet(
        header="Continue the code below.\n",
        question="{input}Next line of code:\n",
        metric="code_similarity",
        max_tokens=64,
        chat=False,
    ),
}


def find(folder: Path) -> dict[str, Path]:
    """Task -> file of the data sets in a folder of `NAME.jsonl` and, extended, `NAME_e.jsonl`.

    Raises InvalidInput when there is none.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl")) if _base(path.stem) in DATA_SETS}
    if not files:
        raise InvalidInput(f"no LongBench file such as hotpotqa.jsonl in {folder}", field="longbench")
    return files


def load(path: Path) -> list[Sample]:
    """All samples of a file, whose name says which set it is. The task keeps the `_e` of an extended set.

    Samples of an extended set are grouped by their length as LongBench-E reports it: 0-4k, 4-8k, 8k+ words.
    Raises InvalidInput for a missing file, an unknown set, or a line that is malformed or lacks what the set's score
    needs, which it names.
    """
    task = path.stem
    if _base(task) not in DATA_SETS:
        raise InvalidInput(f"{path} is none of LongBench's sets: {', '.join(DATA_SETS)}", field="longbench")
    if not path.is_file():
        raise InvalidInput(f"no file at {path}", field="longbench")
    samples = [_sample(task, index, line) for index, line in enumerate(_lines(path, DATA_SETS[_base(task)].metric))]
    if not samples:
        raise InvalidInput(f"{path} holds no samples", field="longbench")
    return samples


def score(sample: Sample, prediction: str) -> float:
    """The published score, 0 to 1: that of the reference which fits best."""
    data_set = DATA_SETS[_base(sample.task)]
    if data_set.first_line:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric: Callable[[str, str], float] = (
        partial(metrics.classification, classes=sample.classes)
        if data_set.metric == "classification"
        else getattr(metrics, data_set.metric)
    )
    return max(metric(prediction, answer) for answer in sample.answers)


def settled(sample: Sample, text: str) -> bool:
    """Only the first line is scored, and it has ended."""
    return DATA_SETS[_base(sample.task)].first_line and "\n" in text.lstrip("\n")


def truncate_middle(sample: Sample, encode: TextEncoder, limit: int) -> Sample:
    """The sample with a prompt of about `limit` tokens at most: the middle is left out, as published.

    Of the whole prompt the first and the last limit // 2 tokens stay; they must hold header and question, whose middle
    is never touched. Raises PromptTooLong when they cannot.
    """
    text = "".join(sample.context)
    offsets = encode(text)[1]
    head = len(encode(sample.header)[0])
    tail = len(encode(sample.question)[0]) + len(encode(sample.answer_prefix)[0])
    if head + len(offsets) + tail <= limit:
        return sample
    first, last = limit // 2 - head, limit // 2 - tail
    if min(first, last) < 1:
        raise PromptTooLong(f"{sample.task} {sample.index}: instructions and question alone exceed {limit} tokens")
    # A character of several tokens has the same offsets in each: it goes if any of them does.
    end, start = offsets[first][0], max(offsets[-last][0], offsets[-last - 1][1])
    return replace(sample, context=(text[:end], text[start:]))


def _base(task: str) -> str:
    return task.removesuffix("_e")


def _lines(path: Path, metric: Metric) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield _checked(json.loads(line.decode()), metric)
            except (ValueError, KeyError, TypeError, OverflowError, InvalidInput) as error:
                raise InvalidInput(f"{path}: line {number} is malformed: {error}", field="longbench") from error


def _checked(line: Any, metric: Metric) -> dict[str, Any]:
    answers, classes = line["answers"], line.get("all_classes") or []
    texts = (line["input"], line["context"], *answers, *classes)
    lists = isinstance(answers, list) and isinstance(classes, list)
    if not (lists and answers and all(isinstance(text, str) for text in texts)):
        raise ValueError("input, context, answers or all_classes is missing, empty or not text")
    if metric == "classification" and not classes:
        raise ValueError("all_classes is empty: there is nothing to choose from")
    if metric in ("retrieval", "retrieval_zh"):
        for answer in answers:
            getattr(metrics, metric)("", answer)  # raises for an answer that names no paragraph
    return {**line, "all_classes": classes, "length": int(line["length"])}


def _sample(task: str, index: int, line: dict[str, Any]) -> Sample:
    data_set = DATA_SETS[_base(task)]
    return Sample(
        suite="longbench",
        task=task,
        index=index,
        header=data_set.header,
        context=(line["context"],),
        question=data_set.question.replace("{input}", line["input"]),
        answer_prefix="",
        answers=tuple(line["answers"]),
        max_tokens=data_set.max_tokens,
        chat=data_set.chat,
        classes=tuple(line["all_classes"]),
        group=_length_group(line["length"]) if task != _base(task) else "",
    )


def _length_group(words: int) -> str:
    return "0-4k" if words < 4000 else "4-8k" if words < 8000 else "8k+"
