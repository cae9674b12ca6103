"""Scores of one answer against one reference, each from 0 to 1.

After RULER (arXiv 2404.06654: string match) and LongBench (arXiv 2308.14508: all others). Where the scorers published
with LongBench do something odd, these do the same, and say so: a score is only of use beside other people's scores.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    import rjieba

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The Chinese punctuation that LongBench drops.
_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃》「」『』【】"
    "〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"
)
_NO_CHINESE_PUNCTUATION = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)
# A run of these that is no word of the dictionary is cut at its signs.
_LATIN_RUN = re.compile(r"[a-zA-Z0-9+#&._%\-]+")
_LATIN_WORD = re.compile(r"([a-zA-Z0-9]+(?:\.\d+)?%?)")


def string_match_all(prediction: str, answers: Sequence[str]) -> float:
    """Share of the answers that the prediction contains, case aside: RULER's score of all tasks but QA."""
    return sum(_contains(prediction, answer) for answer in answers) / len(answers)


def string_match_part(prediction: str, answers: Sequence[str]) -> float:
    """1 if the prediction contains any of the answers, case aside: RULER's score of QA."""
    return float(any(_contains(prediction, answer) for answer in answers))


def qa_f1(prediction: str, answer: str) -> float:
    """F1 over words, without case, punctuation and articles."""
    return _f1(_words(prediction), _words(answer))


def qa_f1_zh(prediction: str, answer: str) -> float:
    """F1 over words of Chinese, without case and punctuation."""
    return _f1(_chinese_words(prediction), _chinese_words(answer))


def rouge_l(prediction: str, answer: str) -> float:
    """ROUGE-L F1 as the PyPI package `rouge` has it, which LongBench uses.

    A full stop ends a sentence. For every pair of sentences the words of one longest common subsequence are taken; the
    union of all of them is compared with the sets of words of both texts, so a repeated word counts once. The published
    code walks the subsequence recursively and gives 0 where that exceeds Python's recursion limit (about 1000 words in
    one sentence); this one gives the score.
    """
    predicted, reference = _rouge_sentences(prediction), _rouge_sentences(answer)
    if not predicted or not reference:
        return 0.0
    common = {word for gold in reference for mine in predicted for word in _common_subsequence(gold, mine)}
    precision = len(common) / len({word for sentence in predicted for word in sentence})
    recall = len(common) / len({word for sentence in reference for word in sentence})
    return 2.0 * precision * recall / (precision + recall + 1e-8)


def rouge_l_zh(prediction: str, answer: str) -> float:
    """ROUGE-L F1 over words of Chinese; only a Latin full stop ends a sentence."""
    return rouge_l(" ".join(cut_chinese(prediction)), " ".join(cut_chinese(answer)))


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the prediction names if the right one is among them, else 0.

    A class that is a proper part of the right class's name is not counted. The published loop removes while it
    iterates, so the class behind a removed one is never looked at; this one does the same. Its fallback to the most
    similar class is never reached, so there is none here.
    """
    named = [name for name in classes if name in prediction]
    index = 0
    while index < len(named):
        if named[index] in answer and named[index] != answer:
            del named[index]
        index += 1
    return 1.0 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the paragraph's. The answer reads "Paragraph 12".

    Raises InvalidInput when it does not.
    """
    return count(prediction, _paragraph_number("Paragraph ", answer))


def retrieval_zh(prediction: str, answer: str) -> float:
    """As `retrieval`, for answers that read "段落12"."""
    return count(prediction, _paragraph_number("段落", answer))


def count(prediction: str, answer: str) -> float:
    """Share of the numbers in the prediction that are the answer, written the same way."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(answer) / len(numbers) if numbers else 0.0


def code_similarity(prediction: str, answer: str) -> float:
    """Likeness of the prediction's first line of code to the answer, in hundredths.

    A line with a backquote, `#` or `//` is taken for prose or a comment. The published scorer takes `ratio` of
    fuzzywuzzy, which without the optional python-Levenshtein is difflib's, rounded to whole percents.
    """
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def cut_chinese(text: str) -> list[str]:
    """Words of Chinese text, all characters kept.

    LongBench cuts with jieba, which is no longer maintained; this is rjieba, its port to Rust with the same dictionary.
    The port leaves runs such as GPT-4 whole where jieba cuts at the sign, so they are cut here: on 3,000 random
    sentences with Latin words, numbers and rare characters all but one were then cut the same.

    Raises ConfigError when rjieba is not installed: another way of cutting would give other scores.
    """
    segmenter = _segmenter()
    words = []
    for word in segmenter.cut(text):
        if _LATIN_RUN.fullmatch(word) and not segmenter.has_word(word):
            words += [piece for piece in _LATIN_WORD.split(word) if piece]
        else:
            words.append(word)
    return words


@cache
def _segmenter() -> rjieba.Jieba:
    try:
        import rjieba
    except ImportError as error:
        raise ConfigError("Chinese scores need rjieba: pip install 'prophetkv-service[eval]'") from error
    return rjieba.Jieba()


def _contains(prediction: str, answer: str) -> bool:
    return answer.lower() in prediction.lower()


def _words(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split()


def _chinese_words(text: str) -> list[str]:
    words = ("".join(word.lower().translate(_NO_CHINESE_PUNCTUATION).split()) for word in cut_chinese(text))
    return [word for word in words if word]


def _f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    same = (Counter(prediction) & Counter(answer)).total()
    if not same:
        return 0.0
    precision, recall = same / len(prediction), same / len(answer)
    return 2 * precision * recall / (precision + recall)


def _rouge_sentences(text: str) -> list[list[str]]:
    """Words of each sentence. One of white space only has one empty word, as published."""
    return [piece.split() or [""] for piece in text.split(".") if piece]


def _common_subsequence(left: Sequence[str], right: Sequence[str]) -> list[str]:
    """The words of one longest common subsequence. Which one, where there are several, is as published."""
    lengths = [[0] * (len(right) + 1)]
    for word in left:
        above, row = lengths[-1], [0]
        for column, other in enumerate(right):
            row.append(above[column] + 1 if word == other else max(above[column + 1], row[column]))
        lengths.append(row)
    words = []
    i, j = len(left), len(right)
    while i and j:
        if left[i - 1] == right[j - 1]:
            words.append(left[i - 1])
            i, j = i - 1, j - 1
        elif lengths[i - 1][j] > lengths[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return words


def _paragraph_number(label: str, answer: str) -> str:
    found = re.search(rf"{label}(\d+)", answer)
    if found is None:
        raise InvalidInput(f"the answer {answer!r} names no paragraph, such as '{label}12'")
    return found[1]
