from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality.longbench import DATA_SETS, find, load, score, truncate_middle
from benchmarks.quality.sample import Sample
from errors import InvalidInput, PromptTooLong
from retriever.documents import TextEncoder

LINE: dict[str, Any] = {
    "input": "Where is the {context}?",
    "context": "The harbour lies in the north.",
    "answers": ["in the north", "north"],
    "length": 5000,
    "dataset": "hotpotqa",
    "language": "en",
    "all_classes": None,
    "_id": "0123",
}


def write(folder: Path, name: str, *lines: object) -> Path:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def sample(task: str, *answers: str, classes: tuple[str, ...] = ()) -> Sample:
    return Sample(
        suite="longbench",
        task=task,
        index=0,
        header="",
        context=(),
        question="",
        answer_prefix="",
        answers=answers,
        max_tokens=1,
        classes=classes,
    )


@pytest.mark.parametrize("task", DATA_SETS)
def test_every_set_is_read(tmp_path: Path, task: str) -> None:
    answers = {"passage_retrieval_en": ["Paragraph 3"], "passage_retrieval_zh": ["段落3"]}.get(task, LINE["answers"])
    line = {**LINE, "answers": answers, "all_classes": ["north", "south"]}
    first, second = load(write(tmp_path, task, line, {**line, "context": "Elsewhere.", "input": "Other?"}))
    assert (first.suite, first.task, first.index, second.index) == ("longbench", task, 0, 1)
    assert first.context == (LINE["context"],)
    assert first.answers == tuple(answers)
    assert first.header == second.header
    assert "{input}" not in first.question + first.header
    # Summaries, counting and lcc have no question of their own.
    asks = task not in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert (LINE["input"] in first.question) is asks
    assert first.digest != second.digest
    assert first.group == ""


def test_the_published_limits_and_metrics() -> None:
    limits = {
        **dict.fromkeys(("narrativeqa", "qasper", "dureader", "samsum"), 128),
        **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count"), 32),
        **dict.fromkeys(("passage_retrieval_en", "passage_retrieval_zh"), 32),
        **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64),
    }
    assert {name: data_set.max_tokens for name, data_set in DATA_SETS.items()} == limits
    assert {name for name, data_set in DATA_SETS.items() if data_set.first_line} == {
        "trec",
        "triviaqa",
        "samsum",
        "lsht",
    }
    bare = {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}
    assert {name for name, data_set in DATA_SETS.items() if not data_set.chat} == bare
    assert len(DATA_SETS) == 21


@pytest.mark.parametrize(
    ("task", "answers", "prediction", "points"),
    [
        ("hotpotqa", ["in the north", "north"], "North.", 1.0),  # the reference that fits best
        ("hotpotqa", ["north"], "\nNorth\nof here", 0.5),  # all lines count: 1/3 and 1
        ("triviaqa", ["north"], "\nNorth\nQuestion: of what?", 1.0),  # the first line only
        ("triviaqa", ["north"], " \nNorth", 0.0),  # which may be blank
        ("narrativeqa", ["the north"], "a north", 1.0),
        ("multifieldqa_zh", ["北京"], "我在北京", 0.5),
        ("dureader", ["我来到北京"], "北京", 0.5),
        ("gov_report", ["a c d x"], "a b c d", 0.75),
        ("samsum", ["a b c"], "a b c\n\nDialogue: x", 1.0),
        ("passage_retrieval_en", ["Paragraph 3"], "Paragraph 3, not 4", 0.5),
        ("passage_retrieval_zh", ["段落3"], "段落3", 1.0),
        ("passage_count", ["7"], "There are 7.", 1.0),
        ("lcc", ["return x"], "return x\n", 1.0),
        ("repobench-p", ["abcx"], "abcd", 0.75),
        ("passage_retrieval_en_e", ["Paragraph 3"], "3", 1.0),
    ],
)
def test_scores(task: str, answers: list[str], prediction: str, points: float) -> None:
    assert score(sample(task, *answers), prediction) == pytest.approx(points, abs=1e-7)


def test_classes_are_scored_among_all_classes() -> None:
    asked = sample("trec", "Food", classes=("Food", "Date"))
    assert score(asked, "Food\nType: Date") == 1.0
    assert score(asked, "Food, Date") == 0.5
    assert score(replace(asked, task="lsht"), "Date") == 0.0


def test_extended_sets_are_grouped_by_length(tmp_path: Path) -> None:
    lines = [{**LINE, "length": length} for length in (3999, 4000, 7999, 8000)]
    samples = load(write(tmp_path, "hotpotqa_e", *lines))
    assert [one.group for one in samples] == ["0-4k", "4-8k", "4-8k", "8k+"]
    assert {one.task for one in samples} == {"hotpotqa_e"}


def test_a_folder_is_searched_for_known_sets(tmp_path: Path) -> None:
    expected = {name: write(tmp_path, name, LINE) for name in ("2wikimqa_e", "hotpotqa", "repobench-p")}
    write(tmp_path, "other", LINE)
    assert find(tmp_path) == expected
    with pytest.raises(InvalidInput, match="no LongBench file"):
        find(tmp_path / "none")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((LINE, "{"), "line 2 is malformed"),
        ((LINE, LINE, "[]"), "line 3 is malformed"),
        (("",), "line 1 is malformed"),
        (({**LINE, "answers": []},), "line 1 is malformed: .*empty"),
        (({**LINE, "answers": "north"},), "line 1 is malformed"),
        (({**LINE, "context": None},), "line 1 is malformed: .*not text"),
        (({**LINE, "length": "long"},), "line 1 is malformed"),
        (({key: value for key, value in LINE.items() if key != "input"},), "line 1 is malformed: 'input'"),
        ((), "holds no samples"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, lines: tuple[object, ...], message: str) -> None:
    path = write(tmp_path, "hotpotqa", *lines)
    with pytest.raises(InvalidInput, match=message) as refusal:
        load(path)
    assert str(path) in str(refusal.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, "hotpotqa", LINE)
    path.write_bytes(path.read_bytes() + b'{"input": "\xff"}\n')
    with pytest.raises(InvalidInput, match=r"hotpotqa\.jsonl: line 2 is malformed: .*can't decode byte 0xff"):
        load(path)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("trec", {}, "all_classes is empty"),
        ("lsht_e", {"all_classes": []}, "all_classes is empty"),
        ("trec", {"all_classes": "Food"}, "all_classes is missing, empty or not text"),
        ("hotpotqa", {"length": float("inf")}, "cannot convert float infinity to integer"),
        ("passage_retrieval_en", {}, "'in the north' names no paragraph, such as 'Paragraph 12'"),
        ("passage_retrieval_zh_e", {"answers": ["段落3", "Paragraph 3"]}, "'Paragraph 3' names no .* '段落12'"),
    ],
)
def test_what_could_not_be_scored_is_named(tmp_path: Path, task: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=f"line 1 is malformed: .*{message}"):
        load(write(tmp_path, task, {**LINE, **changes}))


def test_missing_and_unknown_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no file at"):
        load(tmp_path / "hotpotqa.jsonl")
    with pytest.raises(InvalidInput, match="none of LongBench's sets"):
        load(write(tmp_path, "hotpot", LINE))


def test_the_middle_of_a_long_context_is_left_out(tmp_path: Path, encode: TextEncoder) -> None:
    context = " ".join(f"Line {index} of the log." for index in range(400))
    (full,) = load(write(tmp_path, "hotpotqa", {**LINE, "context": context}))
    head, tail = (len(encode(text)[0]) for text in (full.header, full.question))
    limit = 600
    cut = truncate_middle(full, encode, limit)
    first, last = cut.context
    assert (cut.header, cut.question, cut.answers) == (full.header, full.question, full.answers)
    assert context.startswith(first)
    assert context.endswith(last)
    # Of the whole prompt, 300 tokens of its beginning and 300 of its end.
    assert head + len(encode(first)[0]) == pytest.approx(300, abs=1)
    assert tail + len(encode(last)[0]) == pytest.approx(300, abs=1)
    assert cut.digest != full.digest
    whole = head + len(encode(context)[0]) + tail
    assert truncate_middle(full, encode, whole) == full
    assert truncate_middle(full, encode, whole - 1) != full
    with pytest.raises(PromptTooLong, match="exceed 60 tokens"):
        truncate_middle(full, encode, 60)


def test_truncation_breaks_no_character(tmp_path: Path, encode: TextEncoder) -> None:
    (full,) = load(write(tmp_path, "hotpotqa", {**LINE, "context": "🙂漢字🏳️" * 300}))
    for limit in range(200, 210):
        first, last = truncate_middle(full, encode, limit).context
        assert full.context[0].startswith(first)
        assert full.context[0].endswith(last)
        assert len(first) + len(last) > 40
