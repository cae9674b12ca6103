"""The generated tasks: what they promise holds for a real tokenizer, and for any seed and length with a cheap one."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.quality import ruler_tasks
from benchmarks.quality.haystack import NOISE, read_sentences, split_sentences
from benchmarks.quality.qa_sets import read_hotpotqa, read_squad
from benchmarks.quality.ruler import TASKS, Ruler, score
from benchmarks.quality.sample import Sample, segments
from benchmarks.quality.words import ADJECTIVES, NOUNS, VERBS
from engine.model import load_tokenizer
from errors import ConfigError, InvalidInput, PromptTooLong
from retriever.documents import TextEncoder

MADE = tuple(task for task in TASKS if not task.startswith("qa"))
# Tokens of the largest unit that a context grows by: a sentence, a line with two codes, the entries of a word.
UNIT = {"niah_multikey_3": 110, "cwe": 30, "fwe": 30}
NEEDLE = re.compile(r"One of the secret (?:number|code)s of (\S+) is (\S+)\.")


def words(text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """A tokenizer whose tokens are words and signs."""
    spans = [match.span() for match in re.finditer(r"\w+|[^\w\s]", text)]
    return [0] * len(spans), spans


def total(sample: Sample, encode: TextEncoder) -> int:
    texts = (sample.header, *sample.context, sample.question, sample.answer_prefix)
    return sum(len(encode(text)[0]) for text in texts) + sample.max_tokens


@pytest.fixture(scope="module")
def make(encode: TextEncoder) -> Callable[[int, int], Ruler]:
    """Rulers by length and seed."""
    made: dict[tuple[int, int], Ruler] = {}

    def make(length: int, seed: int = 0) -> Ruler:
        if (length, seed) not in made:
            made[length, seed] = Ruler(encode, length, seed=seed)
        return made[length, seed]

    return make


@pytest.fixture(scope="module")
def hay(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A haystack that is read in no time."""
    path = tmp_path_factory.mktemp("haystack") / "hay.txt"
    path.write_text(" ".join(f"Sentence {index} says nothing of interest to anybody." for index in range(100)))
    return path


def test_there_are_the_thirteen_tasks_and_those_without_data_say_so(make: Callable[..., Ruler]) -> None:
    assert len(TASKS) == 13
    ruler = make(1024)
    assert ruler.tasks == MADE
    assert set(ruler.not_run) == {"qa_1", "qa_2"}
    with pytest.raises(InvalidInput, match="SQuAD"):
        ruler.sample("qa_1", 0)
    with pytest.raises(InvalidInput, match="no RULER task 'qa_3'"):
        ruler.sample("qa_3", 0)


@pytest.mark.parametrize("task", MADE)
def test_a_seed_makes_the_same_samples_and_another_seed_others(
    make: Callable[..., Ruler], encode: TextEncoder, task: str
) -> None:
    first = make(1024).sample(task, 3)
    assert Ruler(encode, 1024).sample(task, 3) == first
    assert len({first.digest, make(1024).sample(task, 4).digest, make(1024, 1).sample(task, 3).digest}) == 3
    assert make(1024).sample(task, 4).header == first.header  # it is part of the constant prefix


@pytest.mark.parametrize("length", [1024, 2048, 4096])
@pytest.mark.parametrize("task", MADE)
def test_the_length_is_what_was_asked_for(
    make: Callable[..., Ruler], encode: TextEncoder, task: str, length: int
) -> None:
    sample = make(length).sample(task, 0)
    assert sample.suite == f"ruler-{length}"
    assert length - UNIT.get(task, 80) < total(sample, encode) <= length


@settings(deadline=None, max_examples=60)
@example("cwe", 700, 21, 21)
@given(st.sampled_from(MADE), st.integers(700, 3000), st.integers(0, 10**6), st.integers(0, 500))
def test_any_seed_and_length_makes_a_sound_sample(hay: Path, task: str, length: int, seed: int, index: int) -> None:
    sample = Ruler(words, length, seed=seed, haystack=hay).sample(task, index)
    assert length - 100 < total(sample, words) <= length
    assert len(set(sample.answers)) == len(sample.answers)
    assert all(answer in sample.context[0] for answer in sample.answers)
    assert not any(answer in sample.header + sample.question + sample.answer_prefix for answer in sample.answers)
    assert score(sample, ", ".join(sample.answers)) == 1.0
    assert score(sample, "?") == 0.0


@pytest.mark.parametrize("task", [task for task in MADE if task.startswith("niah")])
def test_needles_hold_the_answers_and_no_chunk_breaks_one(
    make: Callable[..., Ruler], encode: TextEncoder, smollm: Path, task: str
) -> None:
    tokenizer = load_tokenizer(smollm)
    for index in range(3):
        sample = make(2048).sample(task, index)
        found = NEEDLE.findall(sample.context[0])
        held: dict[str, list[str]] = {}
        for key, value in found:
            held.setdefault(key, []).append(value)
        asked = [key for key in held if key in sample.question]
        assert sorted(value for key in asked for value in held[key]) == sorted(sample.answers)
        assert all(key in sample.answer_prefix for key in asked)
        chunks = [tokenizer.decode(chunk) for chunk in segments(sample.context, encode)]
        assert [needle for chunk in chunks for needle in NEEDLE.findall(chunk)] == found


@pytest.mark.parametrize(
    ("task", "keys", "answers", "asked", "form"),
    [
        ("niah_single_1", 1, 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, 1, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        ("niah_multikey_1", 4, 1, 1, r"\d{7}"),
        ("niah_multikey_2", None, 1, 1, r"\d{7}"),
        ("niah_multikey_3", None, 1, 1, r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"),
        ("niah_multivalue", 1, 4, 1, r"\d{7}"),
        ("niah_multiquery", 4, 4, 4, r"\d{7}"),
    ],
)
def test_needle_tasks_are_as_published(
    make: Callable[..., Ruler], task: str, keys: int | None, answers: int, asked: int, form: str
) -> None:
    sample = make(2048).sample(task, 0)
    held = {key for key, _ in NEEDLE.findall(sample.context[0])}
    assert keys == len(held) if keys else len(held) > 15
    assert len(sample.answers) == answers
    assert all(re.fullmatch(form, answer) for answer in sample.answers)
    assert sum(key in sample.question for key in held) == asked
    assert (NOISE in sample.context[0]) is (task == "niah_single_1")
    assert sample.max_tokens == 128


def test_needles_lie_at_all_depths(make: Callable[..., Ruler]) -> None:
    depths = []
    for index in range(40):
        text = make(1024).sample("niah_single_1", index).context[0]
        needle = NEEDLE.search(text)
        assert needle is not None
        depths.append(needle.start() / len(text))
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert 0.35 < sum(depths) / len(depths) < 0.65


def test_a_chain_gives_its_value_to_exactly_the_answers(make: Callable[..., Ruler]) -> None:
    sample = make(2048).sample("vt", 0)
    values: dict[str, str] = {}
    for name, source in re.findall(r"^VAR (\w+) = (?:VAR )?(\w+)$", sample.context[0], re.MULTILINE):
        values[name] = values.get(source, source)
    assert set(values) == set(sample.answers)
    (value,) = set(values.values())
    assert value in sample.question
    assert value in sample.answer_prefix
    assert len(sample.answers) == 5
    assert all(re.fullmatch("[A-Z]{5}", name) for name in sample.answers)
    assert sample.max_tokens == 30
    assert sample.header.count("VAR") == 9  # the worked example: five names, four of them twice


@pytest.mark.parametrize(("length", "often", "seldom"), [(2048, 6, 1), (4096, 30, 3)])
def test_ten_words_are_common_and_the_others_are_not(
    make: Callable[..., Ruler], length: int, often: int, seldom: int
) -> None:
    sample = make(length).sample("cwe", 0)
    lines = sample.context[0].split("\n")
    assert [line.split(". ")[0] for line in lines] == [str(number) for number in range(1, len(lines) + 1)]
    counts = Counter(line.split(". ")[1] for line in lines)
    assert {counts.pop(word) for word in sample.answers} == {often}
    assert set(counts.values()) == {seldom}
    assert not any(word in other for word in sample.answers for other in counts)
    assert len(sample.answers) == 10
    assert sample.max_tokens == 120


def test_a_list_longer_than_the_vocabulary_is_of_pairs(hay: Path) -> None:
    sample = Ruler(words, 40_000, haystack=hay).sample("cwe", 0)
    counts = Counter(re.findall(r"\. (\S+)", sample.context[0]))
    assert len(counts) > len(NOUNS) + len(ADJECTIVES) + len(VERBS)
    assert {counts[word] for word in sample.answers} == {30}
    assert set(counts.values()) == {3, 30}


@pytest.mark.parametrize("length", [700, 2048, 8192])
def test_the_three_coded_words_are_the_most_frequent(hay: Path, length: int) -> None:
    sample = Ruler(words, length, haystack=hay).sample("fwe", 0)
    ranked = Counter(sample.context[0].split()).most_common()
    assert [word for word, _ in ranked[:4]] == ["...", *sample.answers]
    assert ranked[3][1] > ranked[4][1]
    assert sample.max_tokens == 50


def test_what_does_not_fit_is_refused(make: Callable[..., Ruler]) -> None:
    with pytest.raises(PromptTooLong, match="vt 0 does not fit into 300 tokens"):
        make(300).sample("vt", 0)


def test_no_word_stands_twice() -> None:
    every = (*NOUNS, *ADJECTIVES, *VERBS)
    assert len(set(every)) == len(every)
    assert all(re.fullmatch("[a-z]+", word) for word in every)


@given(st.integers(1, 30), st.integers(0, 40), st.data())
def test_inserted_lines_keep_their_order_and_nothing_is_lost(count: int, lines: int, data: st.DataObject) -> None:
    depths = sorted(data.draw(st.lists(st.integers(0, 39), min_size=count, max_size=count)))
    hay, inserted = [f"hay {index}" for index in range(lines)], [f"needle {index}" for index in range(count)]
    woven = ruler_tasks._weave(hay, inserted, depths)
    assert [line for line in woven if line.startswith("hay")] == hay
    assert [line for line in woven if line.startswith("needle")] == inserted


# The haystack


def test_the_shipped_haystack_is_prose() -> None:
    sentences = read_sentences(None)
    assert sum(len(sentence.split()) for sentence in sentences) > 10_000
    assert all(sentence.endswith(".") and sentence == " ".join(sentence.split()) for sentence in sentences)


def test_a_short_haystack_is_repeated(encode: TextEncoder, tmp_path: Path) -> None:
    path = tmp_path / "hay.txt"
    path.write_text("First sentence here. Is this the second? It is!\n\nA third (so it says.) A fourth\n")
    sample = Ruler(encode, 1024, haystack=path).sample("niah_single_2", 0)
    assert sample.context[0].count("First sentence here.") > 20
    assert 944 < total(sample, encode) <= 1024


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two? Three!", ["One.", "Two?", "Three!"]),
        ('He said "no." Then he left.', ['He said "no."', "Then he left."]),
        ("A heading\n\nA  line\nbroken. End", ["A heading", "A line broken.", "End"]),
        ("2.5 metres of 3.", ["2.5 metres of 3."]),
        ("  \n\n ", []),
    ],
)
def test_sentences(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


def test_haystacks_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("From a text.")
    (tmp_path / "b.json").write_text(json.dumps({"text": "From RULER's essays."}))
    (tmp_path / "c.html").write_text("<p>From a page.</p>")
    assert read_sentences(tmp_path / "b.json") == ("From RULER's essays.",)
    assert read_sentences(tmp_path) == ("From a text.", "From RULER's essays.", "From a page.")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "no haystack at"),
        ("empty.txt", "  \n", "cannot be read"),
        ("bad.json", "{", "cannot be read"),
        ("other.json", '{"essays": []}', "cannot be read"),
        ("bad.pdf", "no PDF", "cannot be read"),
        ("unknown.xyz", "text", "cannot be read"),
    ],
)
def test_a_bad_haystack_is_refused(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInput, match=message) as refusal:
        read_sentences(path)
    assert str(path) in str(refusal.value)


def test_without_the_shipped_documents_a_path_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("benchmarks.quality.haystack.SHIPPED", tmp_path / "none")
    with pytest.raises(ConfigError, match="give the path"):
        read_sentences(None)


# Question answering


@pytest.fixture
def squad(tmp_path: Path) -> Path:
    """Six articles of five paragraphs, each with a question and one that has no answer."""
    articles = [
        {
            "paragraphs": [
                {
                    "context": f"Fact {article}-{number} is colour{article}x{number}. "
                    + "Filler words stand here. " * 8,
                    "qas": [
                        {
                            "question": f"What is fact {article}-{number}?",
                            "answers": [{"text": f"colour{article}x{number}"}, {"text": "another"}],
                            "is_impossible": False,
                        },
                        {"question": "Impossible?", "answers": [], "is_impossible": True},
                        {"question": "Not answered?", "answers": []},
                    ],
                }
                for number in range(5)
            ]
        }
        for article in range(6)
    ]
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": articles}))
    return path


@pytest.fixture
def hotpotqa(tmp_path: Path) -> Path:
    """Twelve questions with three paragraphs each."""
    entries = [
        {
            "question": f"Question {index}?",
            "answer": f"answer{index}x",
            "context": [[f"Title {index}-{part}", [f"This is answer{index}x.", " More of it."]] for part in range(3)],
        }
        for index in range(12)
    ]
    path = tmp_path / "hotpotqa.json"
    path.write_text(json.dumps(entries))
    return path


def test_questions_stand_among_documents_that_answer_them(encode: TextEncoder, squad: Path, hotpotqa: Path) -> None:
    ruler = Ruler(encode, 1024, squad=squad, hotpotqa=hotpotqa)
    assert ruler.tasks == TASKS
    assert ruler.not_run == {}
    positions = set()
    for index in range(8):
        sample = ruler.sample("qa_1", index)
        article, number = re.findall(r"fact (\d)-(\d)", sample.question)[0]
        assert sample.answers == (f"colour{article}x{number}", "another")
        assert sample.answers[0] in sample.context[0]
        documents = re.findall(r"Document (\d+):\nFact (\d)-(\d)", sample.context[0])
        assert [int(document[0]) for document in documents] == list(range(1, len(documents) + 1))
        assert sum(document[1] == article for document in documents) == 5  # those of the same article come first
        assert len(documents) > 5
        positions.add([document[1:] for document in documents].index((article, number)))
        assert 1024 - 80 < total(sample, encode) <= 1024
        assert score(sample, "It is Another.") == 1.0
        assert score(sample, "It is other.") == 0.0
    assert len(positions) > 2
    assert len({ruler.sample("qa_1", index).question for index in range(30)}) == 30
    assert [ruler.count(task, 40) for task in ("qa_1", "qa_2", "vt")] == [30, 12, 40]
    hotpot = ruler.sample("qa_2", 0)
    assert hotpot.context[0].count(hotpot.answers[0]) == 3
    assert hotpot.answer_prefix == " Answer:"
    assert hotpot.max_tokens == 32


def test_all_documents_there_are_may_be_fewer_than_fit(encode: TextEncoder, hotpotqa: Path) -> None:
    sample = Ruler(encode, 4096, hotpotqa=hotpotqa).sample("qa_2", 1)
    assert sample.context[0].count("Document ") == 36


@pytest.mark.parametrize("read", [read_squad, read_hotpotqa])
@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no .* file at"), ("{", "is not"), ('{"data": 3}', "is not"), ("[3]", "is not"), ("[]", "questions.json")],
)
def test_a_bad_question_file_is_refused(
    tmp_path: Path, read: Callable[[Path], object], content: str | None, message: str
) -> None:
    path = tmp_path / "questions.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInput, match=message) as refusal:
        read(path)
    assert str(path) in str(refusal.value)
