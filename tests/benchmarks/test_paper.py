from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.quality.commands import workers_of
from benchmarks.quality.evaluator import Evaluator, ModelSource
from benchmarks.quality.measure import Measured, PromptRun
from benchmarks.quality.methods import Method, parse_methods
from benchmarks.quality.paper import figures, tables
from benchmarks.quality.paper.artefacts import Artefact
from benchmarks.quality.paper.attention import (
    QUERY,
    Overlaps,
    Recoveries,
    Residuals,
    _attended_by_question,
    _attended_while_decoding,
    oracle_methods,
)
from benchmarks.quality.paper.job import RULER_NAMES, Data, Job, Scale, difference, mean, shared
from benchmarks.quality.paper.published import (
    LONGBENCH,
    LONGBENCH_EXTENDED,
    LONGBENCH_PLAIN,
    RULER_4K,
    RULER_8K,
    RULER_16K,
    TTFT,
)
from benchmarks.quality.paper.reproduce import PARTS, Part, check, reproduce
from benchmarks.quality.results import load
from benchmarks.quality.runner import Budget
from benchmarks.quality.sample import Sample
from benchmarks.quality.suites import PromptId
from engine.model import Model
from errors import ConfigError, InvalidInput, NumericalFault, PromptTooLong
from tests.benchmarks.records import record
from tests.benchmarks.test_runner import write_longbench, write_musique
from tests.benchmarks.tiny_prompts import CHUNK_TOKENS, one_thread, sample, without_times
from tests.tiny import plain_module

FIGURES = ("figure-2", "figure-3", "figure-4", "figure-6", "figure-8", "figure-9", "figure-10")
TABLES = ("table-ruler-620", "table-ttft", "table-longbench", "time")


@pytest.fixture(autouse=True)
def _tiny_work() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    return Model.load(tiny_folder, "cpu", "float32")


def job(model: Model, out: Path, **data: Path) -> Job:
    return Job(model, "tiny", out, Scale([620], 1, 0, ["vt"]), Data(**data), Console(quiet=True))


def test_the_folder_is_complete(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "RATIOS", (0.1, 0.5))
    monkeypatch.setattr(figures, "SMALL_RATIOS", (0.05, 0.2))
    longbench, musique = write_longbench(tmp_path / "longbench", count=1), write_musique(tmp_path / "m.json", count=1)
    asked = job(model, tmp_path / "out", longbench=longbench, musique=musique)
    assert reproduce(asked, Budget(10), "prophetkv eval paper")
    for stem in (*FIGURES, *TABLES):
        with (asked.out / f"{stem}.csv").open() as file:
            assert len(list(csv.reader(file))) > 1, stem
        assert (asked.out / f"{stem}.md").read_text().startswith("| ")
    for stem in FIGURES:
        assert (asked.out / f"{stem}.png").read_bytes().startswith(b"\x89PNG")
    page = (asked.out / "index.md").read_text()
    for told in (
        "`prophetkv eval paper`",
        "model: tiny, float32, KV codec raw, on",
        "machine:",
        "seed 0",
        "date: 20",
        "torch",
    ):
        assert told in page
    assert page.count("![") == len(FIGURES)
    assert page.count("\nThe paper, ") == len(FIGURES) + 6
    with (asked.out / "table-ruler-620-detail.csv").open() as file:
        assert {row["measure"] for row in csv.DictReader(file)} == {"score", "kl", "nll"}
    assert "| prefill oracle | " in (asked.out / "time.md").read_text()
    assert page.count("**Not run.**") == 1  # there are no extended sets of LongBench
    # Everything is kept: a second run computes nothing.
    before = {path.name: path.read_bytes() for path in (asked.out / "records").iterdir()}
    assert reproduce(asked, Budget(10), "again")
    assert {path.name: path.read_bytes() for path in (asked.out / "records").iterdir()} == before


def test_times_are_of_interleaved_rounds_and_kept(model: Model, tmp_path: Path) -> None:
    asked = job(model, tmp_path)

    def of(*lengths: int) -> Job:
        return replace(asked, scale=replace(asked.scale, ttft_lengths=lengths))

    (table,) = tables.ttft_table(of(600), Budget(10))
    assert table.table is not None
    (row,) = table.table.rows
    assert row[0] == 600
    assert all(isinstance(cell, float) and cell > 0 for cell in row[1:])
    (table,) = tables.ttft_table(of(600, 700), Budget(10))
    assert table.table is not None
    assert [line[0] for line in table.table.rows] == [600, 700]
    assert table.table.rows[0] == row  # not measured again
    for budget in (Budget(0), Budget(60).part(1e-9)):
        (table,) = tables.ttft_table(of(600, 900), budget)
        assert "the budget left out 900 tokens" in table.notes[0]
        assert table.table is not None


def test_the_time_of_a_length_is_judged_by_the_nearest() -> None:
    def told(length: int, seconds: float) -> dict[str, Any]:
        return {"context_tokens": length, "methods": {"full": {"ttft_s": seconds}}, "plain_against_full": {}}

    measured = [told(1024, 10.0), told(4096, 50.0)]
    assert tables._expected([], 2048) == 0.0
    assert tables._expected(measured, 8192) == 4 * tables._seconds(measured[1])
    assert tables._expected(measured, 2048) == 4 * tables._seconds(measured[0])
    assert tables._expected(measured, 512) == tables._seconds(measured[0]) / 2


def test_what_the_budget_does_not_allow_is_said_and_what_there_is_is_kept(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "SMALL_RATIOS", (0.05, 0.2))
    asked = job(model, tmp_path)
    assert reproduce(asked, Budget(0), "prophetkv")
    page = (tmp_path / "index.md").read_text()
    assert page.count("**Not run.**") > 8
    assert page.count("the budget left out") > 8
    assert [path.name for path in tmp_path.glob("*.png")] == ["figure-2.png"]
    assert figures.figure_6(asked, Budget(10))[0].table is not None
    assert reproduce(asked, Budget(0), "prophetkv")
    page = (tmp_path / "index.md").read_text()
    assert "1 of 1 prompts are done, records in residual.jsonl" in page
    assert (tmp_path / "figure-6.png").exists()


def test_records_of_other_settings_are_refused_and_the_page_stays(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.quality.paper.reproduce.PARTS", PARTS[1:3])
    asked = job(model, tmp_path)
    assert reproduce(asked, Budget(10), "prophetkv")
    page = (tmp_path / "index.md").read_bytes()
    for other in (
        replace(asked, scale=replace(asked.scale, seed=1)),
        replace(asked, codec="int8"),
        replace(asked, name="another"),
    ):
        with pytest.raises(ConfigError, match="is a run with other settings"):
            reproduce(other, Budget(10), "prophetkv")
    with pytest.raises(ConfigError, match="model was 'tiny' and is now 'another'"):
        tables.ttft_table(replace(asked, name="another"), Budget(10))
    assert (tmp_path / "index.md").read_bytes() == page


def test_a_figure_of_chunk_sizes_compares_the_same_prompts(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What chunks do not touch is the same at every size, however many prompts each has."""
    monkeypatch.setattr(figures, "CHUNK_SIZES", (128, 512))
    asked = replace(job(model, tmp_path), scale=Scale([620], 3, 0, ["vt"]))
    evaluator = asked.evaluator()
    methods = parse_methods([*figures.CURVES, "naive"], [0.2], model.layout.layers)
    asked.run("ruler", evaluator, asked.ruler(evaluator, [620]), methods, Budget(10))
    one = replace(asked, scale=replace(asked.scale, samples=1))
    one.run("ruler-chunks-128", one.evaluator(chunk_tokens=128), one.ruler(evaluator, [620]), methods, Budget(10))
    (figure,) = figures.figure_10(asked, Budget(0))
    assert figure.table is not None
    rows = {row[1]: row[2:] for row in figure.table.rows}
    assert rows["full"][0] == 1
    assert rows["full"][1] == rows["full"][2]
    assert figure.detail is not None
    assert {row[3] for row in figure.detail.rows} == {1}


def test_processes_measure_the_same(
    model: Model, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What attention tells and answers over chunks of several sizes, by the same processes."""
    monkeypatch.setattr(figures, "SMALL_RATIOS", (0.2,))
    monkeypatch.setattr(figures, "CHUNK_SIZES", (128, 512))
    here, there = (replace(job(model, tmp_path / name), codec="int8") for name in ("here", "there"))
    with workers_of(ModelSource("tiny", tiny_folder, "cpu", "float32", "int8"), 2, 2) as workers:
        for part in (figures.figures_3_and_4, figures.figure_6, figures.figure_9, figures.figure_10):
            part(here, Budget(10))
            part(replace(there, workers=workers), Budget(10))
    names = sorted(path.name for path in here.out.glob("records/*"))
    assert names == ["overlap.jsonl", "recovery.jsonl", "residual.jsonl", "ruler-chunks-128.jsonl", "ruler.jsonl"]
    for name in names:
        made_here, made_there = (load(one.out / "records" / name) for one in (here, there))
        assert made_here[0] == made_there[0]
        assert without_times(made_here[1]) == without_times(made_there[1])


def test_a_part_that_fails_is_said_and_the_others_go_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, budget: Budget) -> list[Artefact]:
        raise RuntimeError("out of luck")

    parts = (Part(fail, 1, (("figure-3", "Figure 3"),)), Part(figures.figure_2, 1, (("figure-2", "Figure 2"),)))
    monkeypatch.setattr("benchmarks.quality.paper.reproduce.PARTS", parts)
    assert not reproduce(job(model, tmp_path), Budget(10), "prophetkv")
    page = (tmp_path / "index.md").read_text()
    assert "failed: RuntimeError: out of luck" in page
    assert (tmp_path / "figure-2.png").exists()


def test_a_part_without_its_data_takes_no_time_from_the_others(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float] = []

    def note(job: Job, budget: Budget) -> list[Artefact]:
        given.append(budget.left())
        return []

    parts = (Part(note, 1, ()), Part(note, 3, (), needs="longbench"))
    monkeypatch.setattr("benchmarks.quality.paper.reproduce.PARTS", parts)
    for data in ({}, {"longbench": tmp_path}):
        assert reproduce(job(model, tmp_path, **data), Budget(100), "prophetkv")
    assert [round(seconds, -2) for seconds in given] == [6000, 0, 1500, 6000]


def test_bad_paths_are_said_before_the_work_begins(model: Model, tmp_path: Path) -> None:
    for data in ({"longbench": tmp_path}, {"musique": tmp_path / "none"}, {"haystack": tmp_path / "none"}):
        with pytest.raises(InvalidInput):
            check(job(model, tmp_path, **data))


def test_times_beyond_the_window_are_refused_or_left_out(model: Model, tmp_path: Path) -> None:
    asked = job(model, tmp_path)
    for length in (model.window - 64, 10**12):
        with pytest.raises(InvalidInput, match=f"a context of {length} tokens .* window of {model.window}"):
            check(replace(asked, scale=replace(asked.scale, ttft_lengths=[600, length])))
    check(replace(asked, scale=replace(asked.scale, ttft_lengths=[model.window - 1000])))
    (table,) = tables.ttft_table(replace(asked, scale=replace(asked.scale, lengths=[model.window - 64])), Budget(10))
    assert table.table is None
    assert "beyond the model's window" in table.notes[0]


def test_a_file_cannot_be_the_folder(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match=r"cannot be a folder: .* Name another with --out"):
            reproduce(job(model, out), Budget(0), "prophetkv")


def test_a_named_task_without_its_data_is_refused(model: Model, tmp_path: Path) -> None:
    asked = job(model, tmp_path)
    with pytest.raises(InvalidInput, match="qa_1 needs the path of a SQuAD"):
        check(replace(asked, scale=replace(asked.scale, tasks=["qa_1"])))
    with pytest.raises(InvalidInput, match="qa_2 needs the path of a HotpotQA"):
        asked.ruler(asked.evaluator(), [620], ["qa_2"])


def refuse(prompt: PromptId) -> Sample:
    raise PromptTooLong("too long")


def test_tasks_that_are_not_run_and_prompts_that_fail_are_told(model: Model, tmp_path: Path) -> None:
    asked = replace(job(model, tmp_path), scale=Scale([1024], 1, 0))
    evaluator = asked.evaluator()
    plan = asked.ruler(evaluator, [1024])
    assert {prompt.task for prompt in plan.prompts} == set(RULER_NAMES) - {"qa_1", "qa_2"}
    one = replace(plan, prompts=plan.prompts[:1])
    notes = asked.run("ruler", evaluator, one, [Method("naive")], Budget(10))[1]
    assert "qa_1 not run: needs the path of a SQuAD 2.0 JSON file" in notes
    assert "qa_2 not run: needs the path of a HotpotQA JSON file" in notes
    failing = replace(plan, prompts=plan.prompts[1:2], make=refuse)
    records, notes = asked.run("ruler", evaluator, failing, [Method("naive")], Budget(10))
    assert records == []
    assert notes[1].startswith("1 records are of failures, which count nowhere and which the same command tries again")
    assert notes[1].endswith("the first: PromptTooLong: too long")
    assert asked.ruler(evaluator, [1024], ["vt"]).not_run == {}


# What the figures measure


@pytest.fixture
def run(model: Model) -> Iterator[PromptRun]:
    with torch.inference_mode():
        found = Evaluator(model, "tiny", CHUNK_TOKENS).start(sample(max_tokens=8))
        found.full()
        yield found


def attention_maps(run: PromptRun, tokens: tuple[int, ...]) -> torch.Tensor:
    """[layers, heads, rows, keys] of the prompt and `tokens` behind it, by the plain model."""
    assert run.reference is not None
    plain = plain_module(run.model._module.config, "eager")
    plain.load_state_dict(run.model._module.state_dict())
    ids = torch.cat((run.reference.prefill.layout.ids, torch.tensor(tokens, dtype=torch.int64)))
    return torch.stack(plain(ids[None], output_attentions=True).attentions)[:, 0]


def test_attention_is_that_of_the_plain_model(run: PromptRun) -> None:
    assert run.reference is not None
    layout, answer = run.reference.prefill.layout, run.reference.answer
    maps = attention_maps(run, answer)
    decoding = maps[:, :, len(layout) : len(layout) + len(answer) - 1, :].sum((0, 1, 2))[layout.context]
    found = _attended_while_decoding(run)
    assert float((found - decoding).abs().max()) < 1e-4 * float(decoding.max())
    asking = maps[:, :, layout.suffix_start : len(layout), :].mean((0, 1)).sum(0)[layout.context]
    found = _attended_by_question(run.reference.prefill)
    assert float((found - asking).abs().max()) < 1e-4 * float(asking.max())


def test_overlaps(model: Model, run: PromptRun) -> None:
    everything, nothing = Method("epic", {"ratio": 1.0}), Method("epic", {"ratio": 0.0})
    methods = [everything, nothing, QUERY, Method("prophetkv", {"ratio": 0.2})]
    shares = [share for _, share, _ in Overlaps(model, "tiny", CHUNK_TOKENS).shares(run, methods)]
    assert shares[:2] == [1.0, 0.0]
    assert 0.2 < shares[2] <= 1.0
    assert 0.2 < shares[3] <= 1.0


def test_the_ideal_leaves_least(model: Model, run: PromptRun) -> None:
    methods = oracle_methods(("ideal", "delta_phi", "v"), (0.0, 0.1, 0.5, 1.0))
    found: dict[str, list[float]] = {}
    for method, share, _ in Residuals(model, "tiny", CHUNK_TOKENS).shares(run, methods):
        found.setdefault(str(method.options["factor"]), []).append(share)
    for shares in found.values():
        assert shares == sorted(shares, reverse=True)
        assert shares[0] == 1.0
        assert shares[-1] == pytest.approx(0.0, abs=1e-6)
    for factor in ("delta_phi", "v"):
        assert all(least <= other for least, other in zip(found["ideal"], found[factor], strict=True))


def test_recomputing_everything_recovers_everything(model: Model, run: PromptRun) -> None:
    methods = oracle_methods(("ideal", "phi", "kvshare"), (0.1, 1.0))
    found = {
        (method.options["factor"], method.options["ratio"]): (share, more["ideal"])
        for method, share, more in Recoveries(model, "tiny", CHUNK_TOKENS).shares(run, methods)
    }
    for factor in ("ideal", "phi", "kvshare"):
        assert found[factor, 1.0] == (1.0, 1.0)
        assert found[factor, 0.1][0] < 1.0
    assert found["ideal", 0.1][1] == 1.0
    assert found["phi", 0.1][1] < 1.0


def test_what_fails_on_one_prompt_is_said_and_the_next_goes_on(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = replace(job(model, tmp_path), scale=Scale([620], 2, 0, ["vt"]))
    evaluator = asked.evaluator(Overlaps)
    plan = asked.ruler(evaluator, [620])
    first = plan.make(plan.prompts[0]).digest
    full = PromptRun.full

    def fail(run: PromptRun) -> Measured:
        if failing.pop():
            raise NumericalFault("NaN")
        return full(run)

    failing = [False, True]
    monkeypatch.setattr(PromptRun, "full", fail)
    methods = [QUERY, Method("epic", {"ratio": 0.2})]
    records, notes = asked.run("overlap", evaluator, plan, methods, Budget(10))
    assert [record.method for record in records] == ["query", "epic ratio=0.2"]
    assert first not in {record.digest for record in records}
    assert "2 records are of failures" in notes[1]
    assert notes[1].endswith("NumericalFault: NaN")


def test_a_curve_lacks_what_failed_on_every_prompt() -> None:
    records = [record(method) for method in ("full", "none", "prophetkv ratio=0.2", "epic ratio=0.1")]
    lines = figures._accuracy_lines(records)
    assert [ratio for ratio, _ in lines["prophetkv"]] == [0.2, 1.0]
    assert [ratio for ratio, _ in lines["none"]] == [0.0, 1.0]


def test_too_few_prompts_are_not_called_alike() -> None:
    """Five of a task, and one of each of six tasks, whose spread is unknown, show nothing; six that are alike do."""
    told = {"few": ["vt"] * 5, "single": [*"abcdef"], "alike": ["vt"] * 6}
    gaps = {
        name: {
            0.2: difference({str(n): (task, 1.0) for n, task in enumerate(tasks)}, dict.fromkeys("012345", ("", 1.0)))
        }
        for name, tasks in told.items()
    }
    few = "on too few prompts to be told apart"
    assert figures._told_apart(gaps, "prophetkv") == [
        f"paired with prophetkv, few is {few}",
        f"paired with prophetkv, single is {few}",
        "paired with prophetkv, alike is nowhere told apart",
    ]


def test_means_are_of_shared_prompts() -> None:
    records = [record("a", 0, 1.0), record("a", 1, 0.0), record("b", 0, 0.5)]
    found = shared(records, lambda one: one.method)
    told = {name: (mean(values).mean, mean(values).pairs) for name, values in found.items()}
    assert told == {"a": (1.0, 1), "b": (0.5, 1)}
    assert difference(found["a"], found["b"]).mean == 0.5
    assert shared([record("a", 0), record("b", 1)], lambda one: one.method) == {}
    assert shared([], lambda one: one.method) == {}


def test_the_papers_numbers_add_up() -> None:
    """Rows are complete, and where the mean is that of the shown columns it is what stands there."""
    for table, count in ((RULER_4K, 18), (RULER_8K, 18), (RULER_16K, 18), (LONGBENCH, 18), (LONGBENCH_PLAIN, 18)):
        assert len(table.table.rows) == count
    assert len(LONGBENCH_EXTENDED.table.rows) == 18
    assert len(TTFT.table.rows) == 9
    for table in (RULER_4K, LONGBENCH, LONGBENCH_PLAIN, LONGBENCH_EXTENDED):
        for row in table.table.rows:
            numbers = [float(cell) for cell in row[2:-1] if cell is not None]
            assert float(row[-1] or 0) == pytest.approx(sum(numbers) / len(numbers), abs=0.6), (table.source, row)
