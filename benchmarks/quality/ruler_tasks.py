"""How each of RULER's tasks (arXiv 2404.06654) is drawn: a draft whose context can be made as long as is asked for.

The definitions and all numbers are RULER's but where it is said; the words of the prompts are ours, so absolute scores
are near the published ones and not the same. Everything random is drawn before the length is known: the draft of a seed
is one prompt, of any length.

Depths are RULER's where the haystack is an essay: without repetition from 40 equally spaced ones, of which the first is
before all sentences and the last behind them; RULER rounds them to whole percents of the text, these are not rounded.
Among noise and other needles, and for variable tracking, RULER draws any place between two lines, which depends on the
length; here it is one of the same 40 depths, so that a needle stays where it is when the length changes.
"""

from __future__ import annotations

import math
import string
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from benchmarks.quality.haystack import NOISE
from benchmarks.quality.qa_sets import QuestionSet
from benchmarks.quality.words import ADJECTIVES, NOUNS, VERBS

# Of the text, from before its first line to behind its last.
_DEPTHS = 40
# Below this many tokens the word lists are shorter in proportion, as RULER makes them.
_SHORT = 4096

Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A prompt without its final length: `context(n)` is the text of n units (sentences, lines, words, documents)."""

    header: str
    context: Callable[[int], str]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_tokens: int
    least: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Needles:
    """A needle-in-a-haystack task: what the hay is, what keys and values are, and how many there are of each."""

    haystack: Literal["noise", "essay", "needles"]
    keys: Kind
    values: Literal["numbers", "uuids"]
    key_count: int = 1
    values_each: int = 1
    asked: int = 1


def needles(form: Needles, chance: Random, essay: Sequence[str]) -> Draft:
    """Sentences that give keys secret values, in a haystack. Asked for: all values of one key, or of several keys."""
    thing = {"numbers": "number", "uuids": "code"}[form.values]
    many = form.values_each * form.asked > 1

    def needle(key: str, value: str) -> str:
        return f"One of the secret {thing}s of {key} is {value}."

    keys = _distinct(form.key_count, lambda: _draw(form.keys, chance))
    drawn = iter(_distinct(form.key_count * form.values_each, lambda: _draw(form.values, chance)))
    values = {key: [next(drawn) for _ in range(form.values_each)] for key in keys}
    hidden = [needle(key, value) for key in keys for value in values[key]]
    chance.shuffle(hidden)
    depths = sorted(chance.sample(range(_DEPTHS), len(hidden)))
    start, filler_seed = chance.randrange(len(essay)), chance.getrandbits(64)

    def hay(count: int) -> list[str]:
        if form.haystack == "noise":
            return [NOISE] * count
        if form.haystack == "essay":
            return [essay[(start + index) % len(essay)] for index in range(count)]
        filler = Random(filler_seed)
        others = (_other(keys, lambda: _draw(form.keys, filler)) for _ in range(count))
        return [needle(key, _draw(form.values, filler)) for key in others]

    separator = " " if form.haystack == "essay" else "\n"
    queries = chance.sample(keys, form.asked)
    asked = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
    what = f"secret {thing}{'s' if many else ''} of {asked} that the text tells"
    return Draft(
        header=f"The text below tells secret {thing}s. Remember them: you will be asked for them afterwards.\n\n",
        context=lambda count: separator.join(_weave(hay(count), hidden, depths)),
        question=f"\n\nWhat {'are all' if many else 'is'} the {what}?",
        answer_prefix=f" The {what} {'are' if many else 'is'}",
        answers=tuple(value for key in queries for value in values[key]),
        max_tokens=128,
    )


def variable_tracking(chance: Random, example: Random) -> Draft:
    """One chain of five variables, each given the value of the one before it, among noise. Asked for: all five.

    A worked example with names of three letters comes first. RULER's is as long as fits 500 tokens; this one has ten
    lines of noise, about 400 tokens.
    """
    instruction = (
        "Lines hidden in the text below give values to variables, some by way of other variables. "
        "Keep track of which variable holds which value.\n\n"
    )
    shown_context, shown_question, shown_prefix, shown_names = _chain(example, 3)
    shown = f"{shown_context(10)}{shown_question}{shown_prefix} {' '.join(shown_names)}\n\n\n"
    context, question, prefix, names = _chain(chance, 5)
    return Draft(
        header=instruction + shown + instruction,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=names,
        max_tokens=30,
    )


def common_words(chance: Random, example: Random, length: int) -> Draft:
    """A numbered list with ten words that stand in it ten times as often as the rest (six times in short prompts).

    RULER puts the list on one line; here an entry has its own, so that no chunk ends between a number and its word.
    """
    instruction = (
        "Below is a numbered list of words. Some of them stand in it more often than others: remember those.\n\n"
    )
    question = "\n\nWhich 10 words stand in the list above most often?"
    prefix = " Answer: The 10 words that stand in the list most often are:"
    short = length < _SHORT
    shown_list, shown_words = _word_list(example, *((3, 1) if short else (10, 3)))
    shown = f"{shown_list(20 if short else 40)}{question}{prefix} {numbered(shown_words, ' ')}\n\n\n"
    header = instruction + shown + instruction
    context, words = _word_list(chance, *((6, 1) if short else (30, 3)), header + question + prefix)
    return Draft(
        header=header,
        context=context,
        question=question,
        answer_prefix=prefix,
        answers=words,
        max_tokens=120,
        least=20,
    )


def frequent_words(chance: Random, length: int) -> Draft:
    """Coded words of six letters, the k-th as often as a zeta distribution with exponent 2 has it; the first is dots.

    Asked for: the second to fourth. The number of different words is a fiftieth of the tokens.
    """
    max_tokens = 50
    kinds = max((length - max_tokens) // 50, 5)
    coded = _distinct(kinds, lambda: "".join(chance.choices(string.ascii_lowercase, k=6)))
    ranked = ["...", *coded[1:]]
    order_seed = chance.getrandbits(64)

    def context(count: int) -> str:
        shares = (count / (rank**2 * math.pi**2 / 6) for rank in range(1, kinds + 1))
        words = [word for word, share in zip(ranked, shares, strict=True) for _ in range(int(share))]
        Random(order_seed).shuffle(words)
        return " ".join(words)

    return Draft(
        header="Read the coded text below and count how often each coded word stands in it.\n\n",
        context=context,
        question=(
            "\n\nWhich three coded words stand in the text above most often? "
            "Leave out the dots '...' and explain nothing."
        ),
        answer_prefix=" Answer: The three coded words that stand in the text most often are:",
        answers=tuple(ranked[1:4]),
        max_tokens=max_tokens,
        least=100,  # with fewer the fourth and the fifth may stand equally often
    )


def question_answering(source: QuestionSet, number: int, chance: Random) -> Draft:
    """Question `number` of a set, the documents that answer it, and others to distract, the related ones first."""
    question = source.questions[number]
    related = list(question.related)
    taken = {*question.gold, *related}
    others = [index for index in range(len(source.documents)) if index not in taken]
    chance.shuffle(related)
    chance.shuffle(others)
    wanted = [*question.gold, *related, *others]
    order_seed = chance.getrandbits(64)

    def context(count: int) -> str:
        shown = [source.documents[index] for index in wanted[:count]]
        Random(order_seed).shuffle(shown)
        return "\n\n".join(f"Document {index}:\n{text}" for index, text in enumerate(shown, start=1))

    return Draft(
        header="Answer a question from the documents below. Give the answer alone, in no other words.\n\n",
        context=context,
        question=(
            "\n\nAnswer from the documents above. Give the answer alone, in no other words."
            f"\n\nQuestion: {question.text}"
        ),
        answer_prefix=" Answer:",
        answers=question.answers,
        max_tokens=32,
        least=len(question.gold),
        most=len(wanted),
    )


def _chain(chance: Random, letters: int) -> tuple[Callable[[int], str], str, str, tuple[str, ...]]:
    """Context by its lines of noise, question, answer prefix and the names of a chain of five variables."""
    names = _distinct(5, lambda: "".join(chance.choices(string.ascii_uppercase, k=letters)))
    value = str(chance.randint(10000, 99999))
    sources = [value, *(f"VAR {name}" for name in names[:-1])]
    lines = [f"VAR {name} = {source}" for name, source in zip(names, sources, strict=True)]
    depths = sorted(chance.sample(range(_DEPTHS), len(lines)))
    question = f"\n\nQuestion: Which variables in the text above hold the value {value}?"
    prefix = f" Answer: {len(names)} variables in the text above hold the value {value}. They are:"
    return lambda count: "\n".join(_weave([NOISE] * count, lines, depths)), question, prefix, tuple(names)


def _word_list(
    chance: Random, often: int, seldom: int, shown: str = ""
) -> tuple[Callable[[int], str], tuple[str, ...]]:
    """List by its number of different words, and the ten that stand in it `often` times; the rest do `seldom` times.

    None of the ten is part of another word: naming that word would score. None is in `shown`: repeating that would.
    When the vocabulary is used up, all words are pairs (`quiet-otter`), of which there are 245,000.
    """
    single, paired, order_seed = chance.getrandbits(64), chance.getrandbits(64), chance.getrandbits(64)
    words = list(_vocabulary())
    Random(single).shuffle(words)
    common = tuple([word for word in words if word not in _parts_of_words() and word not in shown][:10])
    rest = [word for word in words if word not in common]

    def context(count: int) -> str:
        seldom_words = rest[: count - 10]
        if len(seldom_words) < count - 10:
            filler = Random(paired)
            seldom_words = _distinct(count - 10, lambda: _draw("words", filler))
        entries = [*common * often, *seldom_words * seldom]
        Random(order_seed).shuffle(entries)
        return numbered(entries, "\n")

    return context, common


def numbered(words: Sequence[str], separator: str) -> str:
    """As common words are listed and asked for: `1. word`."""
    return separator.join(f"{index}. {word}" for index, word in enumerate(words, start=1))


@cache
def _vocabulary() -> tuple[str, ...]:
    return tuple(sorted((*NOUNS, *ADJECTIVES, *VERBS)))


@cache
def _parts_of_words() -> frozenset[str]:
    words = _vocabulary()
    return frozenset(word for word in words if any(word in other and word != other for other in words))


def _weave(lines: Sequence[str], inserted: Sequence[str], depths: Sequence[int]) -> list[str]:
    """`inserted` in order among `lines`, each at its depth."""
    woven: list[str] = []
    done = 0
    for line, depth in zip(inserted, depths, strict=True):
        cut = len(lines) * depth // (_DEPTHS - 1)
        woven += [*lines[done:cut], line]
        done = cut
    return [*woven, *lines[done:]]


def _draw(kind: Kind, chance: Random) -> str:
    if kind == "words":
        return f"{chance.choice(ADJECTIVES)}-{chance.choice(NOUNS)}"
    if kind == "numbers":
        return str(chance.randint(1_000_000, 9_999_999))
    return str(uuid.UUID(int=chance.getrandbits(128), version=4))


def _distinct(count: int, draw: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw()] = None
    return list(found)


def _other(taken: Sequence[str], draw: Callable[[], str]) -> str:
    while (drawn := draw()) in taken:
        pass
    return drawn
