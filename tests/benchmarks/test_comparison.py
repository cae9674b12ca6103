from __future__ import annotations

import pytest

from benchmarks.quality.comparison import MEAN, Gap, compare, gap_table, gaps, orderings, uninformative
from benchmarks.quality.results import Record
from benchmarks.quality.summary import findings, summary
from benchmarks.quality.tables import Table, score_table
from errors import InvalidInput
from tests.benchmarks.records import record


def run(scores: dict[str, dict[str, list[float]]], **changes: object) -> list[Record]:
    """Records of method -> task -> scores by prompt."""
    return [
        record(method, index, score, task=task, **changes)
        for method, tasks in scores.items()
        for task, values in tasks.items()
        for index, score in enumerate(values)
    ]


RUN = run(
    {
        "full": {"one": [1.0] * 8, "two": [1.0, 1.0, 0.5, 1.0, 1.0, 0.5, 1.0, 1.0]},
        "none": {"one": [0.0] * 8, "two": [0.0] * 8},
        "naive": {"one": [0.5] * 8, "two": [0.25] * 8},
        "prophetkv ratio=0.2": {"one": [1.0, 0.5] * 4, "two": [1.0] * 8},
    }
)


def by(found: list[Gap]) -> dict[tuple[str, str], Gap]:
    return {(gap.method, gap.task): gap for gap in found}


def test_gaps_to_full_prefill() -> None:
    found = by(gaps(RUN))
    assert len(found) == 9  # three methods on two tasks and their mean
    naive = found["naive", "one"]
    assert (naive.value, naive.other_value, naive.difference.mean, naive.recovered) == (0.5, 1.0, -0.5, 0.5)
    assert (naive.difference.low, naive.difference.high, naive.difference.pairs) == (-0.5, -0.5, 8)
    assert naive.difference.is_clear
    assert not naive.is_better
    mean = found["naive", MEAN]
    assert (mean.value, mean.other_value) == pytest.approx((0.375, 0.9375))
    assert mean.difference.mean == pytest.approx(-0.5625)
    assert mean.difference.pairs == 16
    assert mean.recovered == pytest.approx(0.4)
    assert found["none", "one"].recovered == 0.0
    better = found["prophetkv ratio=0.2", "two"]
    assert better.recovered == pytest.approx(1 / 0.875)
    assert not better.difference.is_clear  # two prompts of eight


def test_only_prompts_that_both_have_are_compared() -> None:
    records = [
        *run({"full": {"one": [1.0, 0.0, 1.0]}}),
        record("naive", 0, 0.5, task="one"),
        record("naive", 2, 0.5, task="one"),
        record("naive", 9, 1.0, task="one"),
    ]
    (gap,) = gaps(records)
    assert (gap.value, gap.other_value, gap.difference.pairs) == (0.5, 1.0, 2)


def test_the_same_number_with_another_text_is_another_prompt() -> None:
    ours, theirs = run({"full": {"one": [1.0]}}), run({"full": {"one": [0.0]}}, digest="other")
    with pytest.raises(InvalidInput, match="no method with the same prompts"):
        compare(ours, theirs)


def test_without_a_floor_on_every_prompt_nothing_is_recovered() -> None:
    records = [one for one in RUN if not (one.method == "none" and one.index == 3)]
    found = by(gaps(records))
    assert found["naive", "one"].recovered is None
    assert by(gaps(RUN, floor="absent"))["naive", MEAN].recovered is None


def test_suites_have_their_own_means() -> None:
    records = [
        one
        for suite in ("ruler-2048", "ruler-4096")
        for one in run({"full": {"a": [1.0]}, "naive": {"a": [0.0], "b": [1.0]}}, suite=suite)
    ]
    assert [(gap.suite, gap.task) for gap in gaps(records)] == [("ruler-2048", "a"), ("ruler-4096", "a")]


def test_divergence_and_likelihood_are_compared_where_they_were_measured() -> None:
    records = [
        *(record("full", index, nll=1.0, kl=0.0) for index in range(6)),
        *(record("naive", index, nll=2.0 + index / 10, kl=0.5) for index in range(6)),
        record("full", 6),
        record("naive", 6),
    ]
    (gap,) = gaps(records, measure="nll")
    assert (gap.value, gap.other_value) == pytest.approx((2.25, 1.0))
    assert gap.difference.pairs == 6
    assert gap.recovered is None
    assert not gap.is_better
    assert [(found.method, found.other) for found in orderings(records, measure="nll")] == [("full", "naive")]
    assert gaps(records, measure="kl")[0].difference.mean == 0.5
    assert gaps([record("full"), record("naive")], measure="kl") == []


def test_only_orderings_that_the_intervals_support_are_claimed() -> None:
    found = {(gap.method, gap.other) for gap in orderings(RUN)}
    assert found == {
        ("full", "none"),
        ("full", "naive"),
        ("naive", "none"),
        ("prophetkv ratio=0.2", "none"),
        ("prophetkv ratio=0.2", "naive"),
    }
    assert {gap.task for gap in orderings(RUN)} == {MEAN}
    few = run({"full": {"one": [1.0] * 5}, "none": {"one": [0.0] * 5}})
    assert orderings(few) == []


def test_findings_are_by_every_measure() -> None:
    """Where scores tie, what full prefill and the right answer are likelier with may still tell methods apart."""
    records = [
        *(record("full", index, kl=0.0, nll=1.0) for index in range(8)),
        *(record("naive", index, kl=0.5, nll=2.0) for index in range(8)),
        *(record("prophetkv", index, kl=0.25, nll=1.0) for index in range(8)),
    ]
    assert findings(records) == [
        "- no two methods can be told apart by their scores",
        "- suite, mean over tasks: prophetkv is closer to full prefill than naive by 0.25 nats a token "
        "(KL, less is better) [0.25, 0.25], 8 prompts",
        "- suite, mean over tasks: full finds right answers likelier than naive by 1 nats a token "
        "(NLL, less is better) [1, 1], 8 prompts",
        "- suite, mean over tasks: prophetkv finds right answers likelier than naive by 1 nats a token "
        "(NLL, less is better) [1, 1], 8 prompts",
    ]
    assert "- suite, mean over tasks: full is better than naive by 56.2 points [" in findings(RUN)[1]
    assert findings(run({"full": {"one": [1.0]}})) == ["- no two methods can be told apart by their scores"]


def test_the_page_has_the_share_that_is_recovered() -> None:
    page = summary({}, RUN)
    assert "| method | one | two | mean | PGR |\n" in page
    for row in ("full | 100.00 | 87.50 | 93.75 | 1.00", "naive | 50.00 | 25.00 | 37.50 | 0.40", "0.00 | 0.00 | 0.00"):
        assert f"{row} |\n" in page
    assert "| full | 100.00 | 100.00 | - |\n" in summary({}, run({"full": {"one": [1.0]}}))


def test_failures_are_no_pairs() -> None:
    records = [
        *(record("full", index, 1.0) for index in range(12)),
        *(record("none", index, 0.0, error="" if index < 5 else "NumericalFault: NaN") for index in range(12)),
        *(record("naive", index, 0.5) for index in range(12)),
    ]
    assert [(gap.method, gap.other) for gap in orderings(records)] == [("full", "naive")]
    found = by(gaps(records))
    assert found["none", "task"].difference.pairs == 5
    assert found["naive", "task"].recovered is None  # no floor on every prompt


def test_tasks_that_full_prefill_cannot_do_are_flagged() -> None:
    records = run(
        {
            "full": {
                "five of six": [1.0] * 5 + [0.0],
                "good": [1.0] * 8,
                "no better": [0.5] * 8,
                "noisy": [1.0, 0.0] * 4,
                "hardly": [0.04] * 8,
            },
            "none": {
                "five of six": [0.0] * 6,
                "good": [0.0] * 8,
                "no better": [0.5] * 8,
                "noisy": [0.0, 1.0] * 4,
                "hardly": [0.0] * 8,
            },
        }
    )
    records += run({"full": {"few": [1.0] * 4, "worse": [0.0] * 8}, "none": {"few": [0.0] * 4, "worse": [1.0] * 8}})
    records += [record("full", task="alone"), record("none", task="alone", error="NumericalFault: NaN")]
    idle = ("no better", "noisy", "hardly", "few", "worse", "alone")
    assert uninformative(records) == [("suite", task) for task in idle]
    assert uninformative(run({"full": {"good": [1.0]}})) == []  # without a floor nothing is known


def test_runs_are_compared_method_by_method() -> None:
    a = run({"full": {"one": [1.0] * 8}, "prophetkv ratio=0.1": {"one": [0.5] * 8}}, model="small")
    b = run({"full": {"one": [0.75] * 8}, "prophetkv ratio=0.2": {"one": [1.0] * 8}}, model="large")
    found = compare(a, b)
    assert [(gap.method, gap.other, gap.difference.mean) for gap in found] == [
        ("full", "full", 0.25),
        ("prophetkv ratio=0.1", "prophetkv ratio=0.2", -0.5),
    ]
    assert found[0].is_better


def test_a_strategy_with_several_options_is_not_guessed_at() -> None:
    a = run({"full": {"one": [1.0]}, "prophetkv ratio=0.1": {"one": [0.5]}, "prophetkv ratio=0.3": {"one": [0.5]}})
    b = run({"full": {"one": [1.0]}, "prophetkv ratio=0.2": {"one": [1.0]}})
    assert [gap.method for gap in compare(a, b)] == ["full"]


def test_two_methods_can_be_named() -> None:
    a = run(
        {"full": {"one": [1.0] * 8}, "prophetkv ratio=0.1": {"one": [0.5] * 8}, "epic ratio=0.1": {"one": [0.25] * 8}}
    )
    (gap,) = compare(a, a, pair=("prophetkv ratio=0.1", "epic ratio=0.1"))
    assert (gap.method, gap.other, gap.difference.mean) == ("prophetkv ratio=0.1", "epic ratio=0.1", 0.25)
    with pytest.raises(
        InvalidInput, match=r"no records of 'epic'; there are full, prophetkv ratio=0\.1, epic ratio=0\.1"
    ):
        compare(a, a, pair=("full", "epic"))


def test_the_page_sets_the_others_against_prophetkv() -> None:
    page = summary(
        {}, run({name: {"one": [0.5] * 8} for name in ("full", "naive", "prophetkv ratio=0.2", "epic ratio=0.2")})
    )
    section = page.split("## Against prophetkv ratio=0.2: score")[1].split("##")[0]
    assert [line.split(" | ")[2] for line in section.splitlines() if " score " in line] == ["naive", "epic ratio=0.2"]


def test_a_run_is_of_one_model_and_has_a_reference() -> None:
    mixed = [record(model="small"), record(model="large")]
    for use in (gaps, orderings, uninformative, score_table):
        with pytest.raises(InvalidInput, match="model"):
            use(mixed)
    with pytest.raises(InvalidInput, match="no 'full' to compare with"):
        gaps([record("naive")])


def test_the_table_of_gaps() -> None:
    table = gap_table(gaps(run({"full": {"one": [1.0] * 6}, "none": {"one": [0.0] * 6}, "naive": {"one": [0.5] * 6}})))
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert rows[1] == {
        "suite": "suite",
        "task": "one",
        "method": "naive",
        "other": "full",
        "measure": "score",
        "prompts": 6,
        "differing": 6,
        "value": 50.0,
        "other value": 100.0,
        "difference": -50.0,
        "low": -50.0,
        "high": -50.0,
        "clear": "yes",
        "PGR": 0.5,
    }


def test_the_table_of_scores_is_the_papers() -> None:
    table = score_table(RUN)
    assert table.columns == ("method", "one", "two", "mean")
    assert table.rows == (
        ("full", 100.0, 87.5, 93.75),
        ("none", 0.0, 0.0, 0.0),
        ("naive", 50.0, 25.0, 37.5),
        ("prophetkv ratio=0.2", 75.0, 100.0, 87.5),
        ("prompts", 8, 8, 16),
    )


def test_an_unfinished_run_compares_the_same_prompts() -> None:
    records = [
        *run({"full": {"one": [1.0, 0.0], "two": [1.0]}}),
        record("naive", 0, 0.5, task="one"),
        record("epic", 5, 0.5, task="three"),
    ]
    assert score_table(records).rows == (
        ("full", 100.0, 100.0, None, None),
        ("naive", 50.0, None, None, None),
        ("epic", None, None, 50.0, None),
        ("prompts", 1, 1, 1, 3),
    )


def test_failures_count_in_no_table() -> None:
    records = [
        *run({"full": {"one": [1.0, 0.0], "two": [1.0]}, "naive": {"one": [0.5]}}),
        record("naive", 1, 0.0, task="one", error="NumericalFault: NaN"),
        record("naive", 0, 0.0, task="two", error="NumericalFault: NaN"),
        record("full", 0, 0.0, task="three", error="PromptTooLong: no", digest=""),
    ]
    assert score_table(records).rows == (
        ("full", 100.0, 100.0, None, None),
        ("naive", 50.0, None, None, None),
        ("prompts", 1, 1, 0, 2),
    )


def test_a_table_is_of_one_suite() -> None:
    for records in ([], [record(), record(suite="other")]):
        with pytest.raises(InvalidInput, match="one suite"):
            score_table(records)


def test_how_tables_are_written() -> None:
    table = Table(("name, with comma", "number"), (("a", 1 / 3), ("b", None), ("c", 2)))
    assert table.csv() == '"name, with comma",number\na,0.3333333333333333\nb,\nc,2\n'
    assert table.markdown() == ("| name, with comma | number |\n| --- | --- |\n| a | 0.33 |\n| b | - |\n| c | 2 |\n")
