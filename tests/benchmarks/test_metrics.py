"""The scorers on cases worked out by hand."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality import metrics
from errors import ConfigError, InvalidInput


def close(value: float) -> object:
    return pytest.approx(value, abs=1e-7)  # ROUGE's 1e-8 in the denominator is below that


@pytest.mark.parametrize(
    ("prediction", "answers", "every", "some"),
    [
        ("1234567 and 7654321.", ["1234567", "7654321"], 1.0, 1.0),
        ("1234567", ["1234567", "7654321"], 0.5, 1.0),
        ("12345678", ["1234567"], 1.0, 1.0),  # a part of a longer number counts, as published
        ("ABCDE", ["abcde"], 1.0, 1.0),
        ("", ["x"], 0.0, 0.0),
        ("nothing", ["a", "b", "c", "h"], 0.25, 1.0),
        ("x y z", ["q", "w"], 0.0, 0.0),
    ],
)
def test_string_match(prediction: str, answers: list[str], every: float, some: float) -> None:
    assert metrics.string_match_all(prediction, answers) == close(every)
    assert metrics.string_match_part(prediction, answers) == close(some)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("Paris", "paris", 1.0),
        ("The Paris!", "Paris", 1.0),  # articles and punctuation do not count
        ("in Paris France", "Paris", 0.5),  # 1/3 and 1
        ("cat cat dog", "cat dog dog", 2 / 3),  # one cat and one dog are shared
        ("New York City", "New York", 0.8),  # 2/3 and 1
        ("a the", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("no", "yes", 0.0),
        ("well-known", "wellknown", 1.0),  # punctuation is dropped, not replaced
        ("theatre", "atre", 0.0),  # an article is a word
    ],
)
def test_qa_f1(prediction: str, answer: str, score: float) -> None:
    assert metrics.qa_f1(prediction, answer) == close(score)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("我来到北京清华大学", ["我", "来到", "北京", "清华大学"]),
        ("段落12", ["段落", "12"]),
        ("增长12.7%。", ["增长", "12.7%", "。"]),
        ("GPT-4模型", ["GPT", "-", "4", "模型"]),
        ("用C++写", ["用", "C++", "写"]),  # in the dictionary
        ("a b\n", ["a", " ", "b", "\n"]),
        ("", []),
    ],
)
def test_chinese_is_cut_as_jieba_cuts_it(text: str, words: list[str]) -> None:
    assert metrics.cut_chinese(text) == words


@given(st.text(alphabet=st.sampled_from("北京很大在我的aB9.-_%+# ，。\n")))
def test_cutting_keeps_every_character(text: str) -> None:
    assert "".join(metrics.cut_chinese(text)) == text


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("北京", "北京", 1.0),
        ("北京。", "“北京”", 1.0),
        ("我在北京", "北京", 0.5),  # 我 在 北京: 1/3 and 1
        ("上海", "北京", 0.0),
        ("", "北京", 0.0),
        ("。，！", "北京", 0.0),
        ("GPT", "gpt-4", 2 / 3),  # gpt 4: 1 and 1/2
        ("北京 北京", "北京", 2 / 3),  # 1/2 and 1
    ],
)
def test_qa_f1_in_chinese(prediction: str, answer: str, score: float) -> None:
    assert metrics.qa_f1_zh(prediction, answer) == close(score)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("a b c", "a b c", 1.0),
        ("a b c d", "a c d x", 0.75),  # a c d: 3/4 and 3/4
        ("a b", "a b c d", 2 / 3),  # 1 and 1/2
        ("c d a b", "a b c d", 0.5),  # order counts within a sentence: two words of four
        ("a b. c d", "c d. a b", 1.0),  # and not between sentences
        ("a a a", "a", 1.0),  # a repeated word counts once
        ("a a b", "a c", 0.5),  # a: 1/2 and 1/2
        ("A b", "a b", 0.5),  # case counts
        ("a. ", "a", 2 / 3),  # the white space behind the stop is a sentence of one empty word, as published
        ("x y", "a b", 0.0),
        ("", "a", 0.0),
        ("...", "a", 0.0),
    ],
)
def test_rouge_l(prediction: str, answer: str, score: float) -> None:
    assert metrics.rouge_l(prediction, answer) == close(score)


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("我来到北京", "我来到北京", 1.0),
        ("我来到上海", "我来到北京", 2 / 3),
        ("北京", "我来到北京", 0.5),  # 1 and 1/3
        ("北京来到我", "我来到北京", 1 / 3),  # one word in order
        ("上海", "北京", 0.0),
        ("", "北京", 0.0),
    ],
)
def test_rouge_l_in_chinese(prediction: str, answer: str, score: float) -> None:
    assert metrics.rouge_l_zh(prediction, answer) == close(score)


def test_rouge_l_of_one_long_sentence_has_a_score() -> None:
    """The published code recurses once a word, and scores 0 where Python's recursion ends."""
    text = " ".join(f"word{index}" for index in range(1500))
    assert metrics.rouge_l(text, text) == close(1.0)


@pytest.mark.parametrize(
    ("prediction", "answer", "classes", "score"),
    [
        ("Food", "Food", ["Food", "Date"], 1.0),
        ("Type: Food.", "Food", ["Food", "Date"], 1.0),
        ("Food or Date", "Food", ["Food", "Date"], 0.5),
        ("Date", "Food", ["Food", "Date"], 0.0),
        ("food", "Food", ["Food", "Date"], 0.0),  # case counts
        ("", "Food", ["Food", "Date"], 0.0),
        ("Other number", "Other number", ["number", "Date", "Other number"], 1.0),  # a part of the right name
        # The removal skips a class: of "b", "c" and "bc" only "b" goes, and two are left.
        ("bc", "bc", ["b", "c", "bc"], 0.5),
    ],
)
def test_classification(prediction: str, answer: str, classes: list[str], score: float) -> None:
    assert metrics.classification(prediction, answer, classes) == close(score)


@pytest.mark.parametrize(
    ("prediction", "number", "score"),
    [
        ("Paragraph 12", "12", 1.0),
        ("12", "12", 1.0),
        ("Paragraph 12 or 13", "12", 0.5),
        ("12, 12, 7", "12", 2 / 3),
        ("Paragraph 112", "12", 0.0),
        ("012", "12", 0.0),
        ("twelve", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_numbers(prediction: str, number: str, score: float) -> None:
    assert metrics.count(prediction, number) == close(score)
    assert metrics.retrieval(prediction, f"Paragraph {number}") == close(score)
    assert metrics.retrieval_zh(prediction, f"段落{number}") == close(score)


@pytest.mark.parametrize("metric", [metrics.retrieval, metrics.retrieval_zh])
def test_an_answer_without_a_paragraph_is_bad_data(metric: object) -> None:
    assert callable(metric)
    with pytest.raises(InvalidInput, match="names no paragraph"):
        metric("1", "12")


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        ("return x", "return x", 1.0),
        ("\n\nreturn x\nreturn y", "return x", 1.0),  # the first line only
        ("```python\n# comment\n// other\nreturn x", "return x", 1.0),  # the first line of code
        ("abcd", "abcx", 0.75),  # 2 * 3 of 8
        ("abc", "abcdef", 0.67),  # 6/9, in hundredths
        ("# comment", "return x", 0.0),
        ("", "x", 0.0),
        ("", "", 1.0),
        (" \nreturn x", "return x", 0.22),  # white space is a line: 2 * 1 of 9
    ],
)
def test_code_similarity(prediction: str, answer: str, score: float) -> None:
    assert metrics.code_similarity(prediction, answer) == close(score)


def test_without_the_library_chinese_is_refused_and_not_scored_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics._segmenter.cache_clear()
    monkeypatch.setitem(sys.modules, "rjieba", None)
    with pytest.raises(ConfigError, match=r"prophetkv-service\[eval\]"):
        metrics.qa_f1_zh("北京", "北京")
