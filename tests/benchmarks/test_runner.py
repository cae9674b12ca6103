from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.quality import suites
from benchmarks.quality.evaluator import Evaluator, ModelSource, Work
from benchmarks.quality.methods import Method
from benchmarks.quality.paper.attention import QUERY, Overlaps
from benchmarks.quality.results import Record, load, open_results
from benchmarks.quality.runner import Budget, Workers, _Pace, progress, run
from benchmarks.quality.sample import Sample
from benchmarks.quality.suites import Plan, PromptId, longbench_plan, musique_plan, ruler_plan
from benchmarks.quality.summary import summary, time_split
from engine.forward import Steps
from engine.model import Model
from engine.prefill import Prefill
from engine.strategies.epic import Epic
from engine.strategies.full import Full
from errors import ConfigError, InvalidInput, NumericalFault, PromptTooLong
from service.version import __version__
from tests.benchmarks import records as made
from tests.benchmarks.tiny_prompts import (
    CHUNK_TOKENS,
    SETTINGS,
    methods,
    one_thread,
    plan,
    run_into,
    sample,
    without_times,
)


@pytest.fixture(autouse=True)
def _tiny_work() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> ModelSource:
    return ModelSource("tiny", tiny_folder, "cpu", "float32")


@pytest.fixture(scope="module")
def evaluator(source: ModelSource) -> Evaluator:
    return Evaluator(source.load(), source.name, CHUNK_TOKENS)


@pytest.fixture(scope="module")
def whole(evaluator: Evaluator, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing disturbed: two prompts of two tasks, eight methods."""
    path = tmp_path_factory.mktemp("whole") / "run.jsonl"
    with one_thread():
        outcome = run_into(path, evaluator)
    assert (outcome.added, outcome.left, outcome.errors) == (32, 0, [])
    return path


def test_a_rerun_adds_nothing(evaluator: Evaluator, whole: Path) -> None:
    before = whole.read_bytes()
    assert run_into(whole, evaluator).added == 0
    assert whole.read_bytes() == before


class Interrupted(Evaluator):
    """Ends after a few records, as by a key press."""

    left = 11

    def records(self, work: Work) -> Iterator[Record]:
        for record in super().records(work):
            if not self.left:
                raise KeyboardInterrupt
            self.left -= 1
            yield record


def test_an_interrupted_run_goes_on_and_ends_the_same(evaluator: Evaluator, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run_into(path, Interrupted(evaluator.model, "tiny", CHUNK_TOKENS))
    assert len(load(path)[1]) == 11
    with path.open("ab") as file:
        file.write(b'{"model": "tiny", "suite"')  # and the machine went down
    outcome = run_into(path, evaluator)
    assert outcome.added == 21
    assert without_times(load(path)[1]) == without_times(load(whole)[1])


def test_more_prompts_and_methods_can_be_added(evaluator: Evaluator, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    assert run_into(path, evaluator, count=1, wanted=methods("prophetkv")).added == 8
    assert run_into(path, evaluator).added == 24
    assert without_times(load(path)[1]) == without_times(load(whole)[1])


def test_processes_compute_the_same(source: ModelSource, evaluator: Evaluator, whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    workers = Workers(2, source, threads=2)
    try:
        assert run_into(path, evaluator, workers=workers).added == 32
    finally:
        workers.close()
    assert without_times(load(path)[1]) == without_times(load(whole)[1])


def test_other_settings_are_refused(evaluator: Evaluator, whole: Path) -> None:
    with pytest.raises(ConfigError, match="chunk_tokens was 24 and is now 48"):
        run_into(whole, Evaluator(evaluator.model, "tiny", 48))


def test_other_prompts_are_refused(evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they came to differ: of the same name and with the same settings."""
    path = tmp_path / "run.jsonl"
    run_into(path, evaluator, count=1, wanted=methods("naive"))
    monkeypatch.setattr("tests.benchmarks.tiny_prompts.TEXT", "Something else. ")
    with pytest.raises(ConfigError, match="ruler-200 vt 0 differs"):
        run_into(path, evaluator, count=1)


def test_prompts_are_the_same_for_every_method(whole: Path) -> None:
    digests: dict[tuple[str, int], set[str]] = {}
    for record in load(whole)[1]:
        digests.setdefault((record.task, record.index), set()).add(record.digest)
    assert len(digests) == 4
    assert all(len(found) == 1 for found in digests.values())
    assert len(set.union(*digests.values())) == 4


def test_records_tell_what_was_measured(whole: Path) -> None:
    records = load(whole)[1]
    by_method = {record.method: record for record in records if (record.task, record.index) == ("vt", 0)}
    assert list(by_method)[:3] == ["full", "none", "random ratio=0.2"]
    assert by_method["full"].kl == 0.0
    assert by_method["none"].tokens["context"] == 0
    assert by_method["random ratio=0.2"].tokens["recomputed"] == int(0.2 * by_method["full"].tokens["context"])
    for record in records:
        assert record.nll is not None
        assert record.kl is not None
        assert record.machine.endswith(f"1 threads, torch {torch.__version__}, prophetkv {__version__}")
        assert {"prefill", "ttft", "decode", "forced", "score"} <= set(record.timings)
    assert sum("prepare" in record.timings for record in records) == 4
    assert sum("encode" in record.timings for record in records) == 4


def test_the_time_split_is_the_sum_of_the_records(whole: Path) -> None:
    records = load(whole)[1]
    table = time_split(records)
    seconds = {str(row[0]): float(row[1] or 0) for row in table.rows}
    parts = ("prepare", "encode", "prefill", "decode", "forced", "score")
    expected = sum(record.timings.get(part, 0.0) for record in records for part in parts) / 1000
    assert seconds.pop("sum") == pytest.approx(expected)
    assert sum(seconds.values()) == pytest.approx(expected)
    assert "prefill prophetkv ratio=0.2" in seconds


# Failures


def fail(self: object, prefill: Prefill) -> Steps:
    raise NumericalFault("scores are NaN")
    yield


def test_a_failure_is_recorded_and_the_others_go_on(
    evaluator: Evaluator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Epic, "prefill", fail)
    path = tmp_path / "run.jsonl"
    outcome = run_into(path, evaluator, count=1)
    settings, records = load(path)
    failed = [record for record in records if record.error]
    assert outcome.errors == failed
    assert [(record.strategy, record.error, record.score, record.kl) for record in failed] == [
        ("epic", "NumericalFault: scores are NaN", 0.0, None)
    ] * 2
    assert len(records) == 16
    page = summary(settings, records)
    assert "- epic ratio=0.2 failed on 2 prompts: NumericalFault: scores are NaN" in page
    assert "| epic ratio=0.2 | - | - | - |" in page
    monkeypatch.undo()
    outcome = run_into(path, evaluator, count=1)  # tries them again
    assert (outcome.added, outcome.errors) == (2, [])
    assert not any(record.error for record in load(path)[1])


def test_a_prompt_that_does_not_fit_is_recorded_and_the_others_go_on(evaluator: Evaluator, tmp_path: Path) -> None:
    def make(prompt: PromptId) -> Sample:
        if prompt.index == 0:
            raise PromptTooLong("instructions and question alone exceed 60 tokens")
        return sample(prompt.index, context=("word " * 20000,)) if prompt.index == 1 else sample(prompt.index)

    plan = Plan(tuple(PromptId("ruler-200", "vt", index) for index in range(3)), make, SETTINGS, {})
    path = tmp_path / "run.jsonl"
    with open_results(path, {**evaluator.settings(), **SETTINGS}) as results:
        outcome = run(plan, evaluator, methods("naive"), results, Budget(None), console=Console(quiet=True))
    assert (outcome.added, outcome.left) == (12, 0)
    settings, records = load(path)
    assert outcome.errors == [record for record in records if record.error]
    assert [(record.index, bool(record.error)) for record in records] == [
        (index, index < 2) for index in range(3) for _ in range(4)
    ]
    assert records[0].error == "PromptTooLong: instructions and question alone exceed 60 tokens"
    assert "window is 16384" in records[4].error
    assert "- naive failed on 1 prompts: PromptTooLong: " in summary(settings, records)
    shares = Overlaps(evaluator.model, "tiny", CHUNK_TOKENS)
    (refused,) = shares.records(Work(make(plan.prompts[1]), (QUERY,)))
    assert "window is 16384" in refused.error


def test_without_full_prefill_there_is_no_divergence(
    evaluator: Evaluator, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Full, "prefill", fail)
    path = tmp_path / "run.jsonl"
    run_into(path, evaluator, count=1)
    expected = {record.key: record for record in load(whole)[1]}
    for record in load(path)[1]:
        failed = record.strategy in ("full", "none")
        assert bool(record.error) == failed
        assert record.kl is None
        if not failed:
            assert record.prediction == expected[record.key].prediction
            assert record.nll == expected[record.key].nll


# Budgets


class Slow(Evaluator):
    """Takes a second for every record but the first."""

    def records(self, work: Work) -> Iterator[Record]:
        for record in super().records(work):
            yield record
            time.sleep(1.0)


def test_the_end_of_a_budget_cuts_a_prompt_and_nothing_is_lost(
    evaluator: Evaluator, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run.jsonl"
    outcome = run_into(path, evaluator, minutes=0)
    assert (outcome.added, outcome.left) == (0, 32)
    outcome = run_into(path, Slow(evaluator.model, "tiny", CHUNK_TOKENS), minutes=1 / 60)
    assert 0 < outcome.added < 8
    assert run_into(path, evaluator).left == 0
    assert without_times(load(path)[1]) == without_times(load(whole)[1])


def test_a_process_that_dies_loses_nothing_that_was_done(
    source: ModelSource, evaluator: Evaluator, whole: Path
) -> None:
    workers = Workers(1, source, threads=1)
    work = (Work(sample(index), tuple(methods())) for index in range(40))
    records = workers.records(evaluator, work, math.inf)
    kept = [next(records) for _ in range(11)]
    (child,) = multiprocessing.active_children()
    os.kill(child.pid or 0, signal.SIGKILL)
    with pytest.raises(ConfigError, match="has died"):
        kept.extend(records)
    workers.close()
    expected = [record for record in load(whole)[1] if (record.task, record.index) == ("vt", 0)]
    assert without_times(kept[:8]) == without_times(expected)


def test_a_part_of_a_budget_does_not_cut_the_first_prompt(evaluator: Evaluator, tmp_path: Path) -> None:
    with open_results(tmp_path / "run.jsonl", {**evaluator.settings(), **SETTINGS}) as results:
        part = Budget(60).part(0)
        outcome = run(plan(2), evaluator, methods(), results, part, console=Console(quiet=True))
    assert (outcome.added, outcome.left) == (8, 24)


def test_a_prompt_at_work_says_nothing_of_the_time_that_one_takes() -> None:
    prompts = [PromptId("ruler-200", "vt", index) for index in range(3)]
    pace = _Pace(Budget(2), {(prompt.suite, prompt.task, prompt.index): 8 for prompt in prompts})
    assert pace.allows(prompts[2])
    for prompt, count, seconds in ((prompts[0], 8, 25.0), (prompts[1], 1, 1.0)):
        for _ in range(count):
            timings = {"prefill": 1000 * seconds}
            pace.observe(made.record(index=prompt.index, suite=prompt.suite, task=prompt.task, timings=timings))
        assert not pace.allows(prompts[2])


def test_a_budget_is_divided() -> None:
    assert Budget(None).left() == Budget(None).part(0.1).left() == float("inf")
    whole = Budget(10)
    assert 599 < whole.left() <= 600
    assert 149 < whole.part(0.25).left() <= 150
    assert Budget(10, started=whole.started - 700).left() < 0
    assert Budget(10, started=whole.started - 700).part(0.5).left() <= 0
    assert whole.part(0.25).part(0.5).whole_end == whole.end


def test_progress_says_how_long_it_will_take(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(Console(width=200), 40) as advance:
        for step in range(40):
            advance(f"step {step}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 of 40: step 1" or lines[0].startswith("2 of 40, 0 minutes left")
    assert any("20 of 40, 0 minutes left: step 19" in line for line in lines)


# Prompts of the suites


def test_the_prompt_has_the_samples_parts(evaluator: Evaluator) -> None:
    model, one = evaluator.model, sample()
    prompt = evaluator.builder(one, CHUNK_TOKENS)

    def text(ids: tuple[int, ...]) -> str:
        return str(model.tokenizer.decode(ids))

    head, tail = text(prompt.prefix), text(prompt.suffix)
    assert head.endswith("user\nRead the text.\n\n")
    assert tail.startswith("\n\nWhen does the tide turn?<|im_end|>")
    assert tail.endswith("assistant\n It turns at")
    assert text(prompt.suffix[slice(*prompt.question)]) == "\n\nWhen does the tide turn?"
    assert "".join(text(part.chunk.token_ids) for part in prompt.parts) == one.context[0]
    assert all(0 < len(part.chunk.token_ids) <= CHUNK_TOKENS for part in prompt.parts)
    assert text(prompt.gold) == " noon twelve midday"
    plain = evaluator.builder(replace(one, chat=False), CHUNK_TOKENS)
    assert text(plain.prefix) == "Read the text.\n\n"
    assert text(plain.suffix) == "\n\nWhen does the tide turn? It turns at"
    whole = evaluator.builder(replace(one, suite="musique", context=("One.", "Two.", "Three.")), None)
    assert [text(part.glue) for part in whole.parts] == ["", "\n\n", "\n\n"]
    assert [text(part.chunk.token_ids) for part in whole.parts] == ["One.", "Two.", "Three."]


def test_what_does_not_fit_the_window_is_refused(evaluator: Evaluator) -> None:
    with pytest.raises(PromptTooLong, match=r"ruler-200 vt 0 .* window is 16384"):
        evaluator.builder(sample(context=("word " * 20000,)), CHUNK_TOKENS)


def test_ruler_plans(evaluator: Evaluator) -> None:
    encode = evaluator.builder.encode
    found = ruler_plan(encode, 4096, lengths=[700, 900], samples=2, tasks=["vt", "niah_single_1"])
    assert [(prompt.suite, prompt.task, prompt.index) for prompt in found.prompts] == [
        (suite, task, index)
        for index in (0, 1)
        for suite in ("ruler-700", "ruler-900")
        for task in ("vt", "niah_single_1")
    ]
    made = [found.make(prompt) for prompt in found.prompts]
    assert [(one.suite, one.task, one.index) for one in made] == [
        (prompt.suite, prompt.task, prompt.index) for prompt in found.prompts
    ]
    for one in made:
        assert suites.score(one, suites.gold(one)) == (1.0, {})
        assert suites.settled(one, suites.gold(one))
        assert not suites.settled(one, suites.gold(one)[:-2])
    everything = ruler_plan(encode, 4096, lengths=[1024], samples=1)
    assert len(everything.prompts) == 11
    assert set(everything.not_run) == {"qa_1", "qa_2"}


def test_a_question_that_does_not_fit_stands_in_the_way_of_no_other(evaluator: Evaluator, tmp_path: Path) -> None:
    entries = [
        {
            "question": f"Who is {index}?",
            "answer": f"x{index}",
            "context": [["One", ["Ann. "]], [f"{index}", ["Bob. "]]],
        }
        for index in range(4)
    ]
    entries[0]["context"] = [[f"Title {part}", [f"Many words of {part}. " * 40]] for part in range(20)]
    path = tmp_path / "hotpotqa.json"
    path.write_text(json.dumps(entries))
    for seed in range(20):
        asked: dict[str, Any] = {"lengths": [700], "samples": 9, "tasks": ["qa_2"], "hotpotqa": path, "seed": seed}
        try:
            plan = ruler_plan(evaluator.builder.encode, 4096, **asked)
            break
        except InvalidInput:  # the first is the long one
            continue
    assert [prompt.index for prompt in plan.prompts] == [0, 1, 2, 3]
    with open_results(tmp_path / "run.jsonl", {**evaluator.settings(), **plan.settings}) as results:
        outcome = run(plan, evaluator, methods("naive"), results, Budget(None), console=Console(quiet=True))
    assert {record.error for record in outcome.errors} == {
        f"PromptTooLong: qa_2 {outcome.errors[0].index} does not fit into 700 tokens"
    }
    assert (outcome.added, outcome.left) == (16, 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"samples": 0}, "at least one"),
        ({"lengths": [5000]}, "5000 is beyond the model's window, which leaves 4096"),
        ({"lengths": []}, "no length"),
        ({"lengths": [60]}, "does not fit into 60 tokens"),
        ({"tasks": ["niah"]}, "unknown task 'niah'; there are niah_single_1,"),
        ({"tasks": ["qa_1"]}, "qa_1 needs the path of a SQuAD"),
        ({"haystack": Path("nowhere")}, "no haystack at nowhere"),
        ({"squad": Path("nowhere")}, "no SQuAD file at nowhere"),
    ],
)
def test_bad_ruler_plans_say_what_is_wrong(evaluator: Evaluator, changes: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"lengths": [1024], "samples": 1, "tasks": ["vt"], **changes}
    with pytest.raises(InvalidInput, match=message):
        ruler_plan(evaluator.builder.encode, 4096, **asked)


def test_another_haystack_is_another_run(evaluator: Evaluator, tmp_path: Path) -> None:
    (tmp_path / "hay.txt").write_text("One sentence. And another one.")
    asked: dict[str, Any] = {"lengths": [512], "samples": 1, "tasks": ["niah_single_2"]}
    found = ruler_plan(evaluator.builder.encode, 4096, **asked, haystack=tmp_path / "hay.txt")
    assert found.settings != ruler_plan(evaluator.builder.encode, 4096, **asked).settings


def write_longbench(folder: Path, name: str = "hotpotqa", count: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [
        {
            "input": f"Who is {index}?",
            "context": "Ann is one. " * 60,
            "answers": ["Ann"],
            "length": 180,
            "all_classes": None,
        }
        for index in range(count)
    ]
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def write_musique(path: Path, count: int = 2) -> Path:
    passages = [{"title": f"Title {index}", "text": "The mill is old. " * 8} for index in range(3)]
    entries = [
        {"question": f"How old is {index}?", "answers": ["very old"], "ctxs": passages} for index in range(count)
    ]
    path.write_text(json.dumps(entries))
    return path


def test_longbench_plans(evaluator: Evaluator, tmp_path: Path) -> None:
    folder = write_longbench(write_longbench(tmp_path), "samsum_e", count=1)
    found = longbench_plan(evaluator.builder.encode, 300, folder, samples=2)
    assert [prompt.task for prompt in found.prompts] == ["hotpotqa", "samsum_e", "hotpotqa"]
    assert "trec" in found.not_run
    made = found.make(found.prompts[0])
    assert len(made.context) == 2  # its middle is left out
    assert suites.gold(made) == "Ann"
    assert not suites.settled(made, "Ann\nand")
    dialogue = found.make(found.prompts[1])
    assert [suites.settled(dialogue, text) for text in ("\nAnn", "\nAnn calls\n")] == [False, True]
    with pytest.raises(InvalidInput, match="unknown task 'trec'"):
        longbench_plan(evaluator.builder.encode, 300, folder, samples=2, tasks=["trec"])


def test_musique_plans(evaluator: Evaluator, tmp_path: Path) -> None:
    found = musique_plan(write_musique(tmp_path / "musique.json"), samples=5)
    assert len(found.prompts) == 2
    made = found.make(found.prompts[0])
    score, more = suites.score(made, "It is very old")
    assert score == pytest.approx(2 / 3)
    assert more == {"match": 1.0}
    records = list(Evaluator(evaluator.model, "tiny", None).records(Work(made, (Method("naive"),))))
    assert [(record.strategy, record.tokens["chunks"]) for record in records] == [("naive", 3)]
    assert "match" in records[0].more


def test_gold_answers_take_the_form_of_the_task() -> None:
    values = sample(task="niah_multivalue", context=("of x is 77. Then of x is 12.",), answers=("12", "77"))
    assert suites.gold(values) == " 77, 12"
    assert suites.gold(sample(task="niah_multiquery")) == " noon, twelve, midday"
    assert suites.gold(sample(task="cwe", answers=("one", "two"))) == " 1. one 2. two"
    assert suites.gold(sample(task="qa_2")) == " noon"
    assert suites.gold(sample(suite="musique", question="Answer:")) == "noon"
    assert suites.gold(sample(suite="longbench", question="Answer:")) == "noon"
    assert suites.gold(sample(suite="longbench", question="Answer:", chat=False)) == " noon"
    assert suites.gold(sample(suite="longbench", question="Next line of code:\n", chat=False)) == "noon"


def test_a_model_without_chat_template_is_refused(evaluator: Evaluator, tiny_folder: Path) -> None:
    model = Model.load(tiny_folder, "cpu", "float32")
    model.tokenizer.chat_template = None
    with pytest.raises(Exception, match="chat template cannot be used"):
        Evaluator(model, "tiny", CHUNK_TOKENS)
