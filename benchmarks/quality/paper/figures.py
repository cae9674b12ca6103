"""Figures 2, 3, 4, 6, 8, 9 and 10. What each measures is said at its artefact."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

from benchmarks.quality.methods import FULL, Method, parse_methods
from benchmarks.quality.paper.artefacts import Artefact
from benchmarks.quality.paper.attention import (
    CRITERIA,
    FACTORS,
    QUERY,
    Overlaps,
    Recoveries,
    Residuals,
    oracle_methods,
)
from benchmarks.quality.paper.example import RATIO as EXAMPLE_RATIO
from benchmarks.quality.paper.example import counts, example
from benchmarks.quality.paper.job import (
    CHUNK_TOKENS,
    RATIO,
    RULER_NAMES,
    Job,
    Values,
    common,
    difference,
    mean,
    shared,
)
from benchmarks.quality.paper.plots import Line, Panel, plot_bars, plot_panels, plot_tokens
from benchmarks.quality.paper.published import STATEMENTS
from benchmarks.quality.results import Record
from benchmarks.quality.runner import Budget
from benchmarks.quality.statistics import LEAST_PAIRS, Interval
from benchmarks.quality.suites import musique_plan
from benchmarks.quality.tables import Cell, Table

RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)  # of Figure 8, between naive (0) and full (1)
SMALL_RATIOS = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2)  # of Figures 6 and 9
CHUNK_SIZES = (128, 256, 512, 1024)
CURVES = ("random", "epic", "cacheblend", "kvshare", "prophetkv")

_POINTS = "points of 100"

# The factors of Eq. 6, and the criteria that they are.
_FACTOR_LABELS = {
    "ideal": "ideal (Eq. 5)",
    "delta_phi": "Δφ",
    "phi": "φ' (ProphetKV)",
    "delta_v": "ΔV",
    "v": "V'",
    "cacheblend": "ΔV, squared (CacheBlend)",
    "kvshare": "attention times ΔV (KVShare)",
}


def figure_2(job: Job, budget: Budget) -> list[Artefact]:
    """One small prompt: the budget does not matter."""
    table, tokens, selected, answers = example(job.evaluator(chunk_tokens=None))
    panels = {f"{name}: {answers[name][:80]}": chosen for name, chosen in selected.items()}
    return [
        Artefact(
            stem="figure-2",
            title="Figure 2: what is recomputed for a question over two chunks, with a third that misleads",
            measured=f"Tokens that each method selects at ratio {EXAMPLE_RATIO}, in red; the sentences that matter in "
            "black. The text is the project's own. The detail has every token.",
            table=counts(table),
            detail=table,
            draw=partial(plot_tokens, tokens=tokens, panels=panels),
            notes=[f"{name} answers: {answer}" for name, answer in answers.items()],
            published=[STATEMENTS[2]],
        )
    ]


def figures_3_and_4(job: Job, budget: Budget) -> list[Artefact]:
    """Both from one pass over the prompts of the shortest length."""
    asked = parse_methods(["random", "epic", "cacheblend", "kvshare", "prophetkv"], [RATIO], job.model.layout.layers)
    selecting = [method for method in asked if "ratio" in method.options]
    evaluator = job.evaluator(Overlaps)
    plan = job.ruler(evaluator, [min(job.scale.lengths)])
    records, notes = job.run("overlap", evaluator, plan, [QUERY, *selecting], budget)
    by_method = shared(records, _strategy)
    gaps = _gaps({name: [(RATIO, values)] for name, values in by_method.items()}, "prophetkv")
    of_query = [record for record in records if record.method == QUERY.name]
    by_task: dict[str, Values] = {}
    for record in of_query:
        by_task.setdefault(RULER_NAMES.get(record.task, record.task), {})[record.digest] = record.task, record.score
    decoding = "the 20 % of context tokens with the most attention from the rows of full prefill's answer"
    return [
        _bars(
            *("figure-3", 3, "Figure 3: overlap of selections with what decoding attends to", "method"),
            f"Of {decoding}, the share that a method selects at ratio {RATIO}; `query` is the same share of tokens by "
            "attention from question and chat tail under full prefill. Means over tasks with 95 % intervals.",
            by_method,
            [*notes, *_told_apart(gaps, "prophetkv")],
        ),
        _bars(
            *("figure-4", 4, "Figure 4: overlap of what the question and what decoding attends to", "task"),
            f"Of {decoding}, the share among the 20 % with the most attention from question and chat tail, both under "
            f"full prefill of {job.name}. The paper's bars are models, these are tasks.",
            by_task,
            notes,
        ),
    ]


def figure_6(job: Job, budget: Budget) -> list[Artefact]:
    """Residual loss per factor."""
    evaluator = job.evaluator(Residuals)
    plan = job.ruler(evaluator, [min(job.scale.lengths)])
    wanted = oracle_methods(FACTORS, SMALL_RATIOS)
    records, notes = job.run("residual", evaluator, plan, wanted, budget)
    found = shared(records, _factor_and_ratio)
    return [
        _curves(
            *("figure-6", 6, "Figure 6: residual loss by the factor that selects"),
            "The sum of |φV - φ'V'| over the tokens not selected, as a share of the sum over all (Eq. 4): less is best."
            " Factors are averaged over layers before the selection.",
            {"residual loss": _lines(found, FACTORS)},
            notes,
            against=_FACTOR_LABELS["phi"],
        )
    ]


def figure_8(job: Job, budget: Budget) -> list[Artefact]:
    """Multivalue, and MuSiQue if its path is given or else variable tracking; or the first two of the job's tasks."""
    evaluator = job.evaluator()
    asked = [*parse_methods([*CURVES, "naive"], RATIOS, job.model.layout.layers)]
    length = min(job.scale.lengths)
    tasks = job.curve_tasks[:1] if job.data.musique is not None else job.curve_tasks
    half = budget.part(0.5) if job.data.musique is not None else budget
    records, notes = job.run("ruler", evaluator, job.ruler(evaluator, [length], tasks), asked, half)
    if job.data.musique is not None:
        plan = musique_plan(job.data.musique, samples=job.scale.samples, seed=job.scale.seed)
        more, told = job.run("musique", job.evaluator(chunk_tokens=None), plan, asked, budget)
        records, notes = records + more, notes + told
    panels = {
        RULER_NAMES.get(task, task): _accuracy_lines([record for record in records if record.task == task])
        for task in dict.fromkeys(record.task for record in records)
    }
    return [
        _curves(
            *("figure-8", 8, "Figure 8: accuracy over the ratio"),
            f"Points of 100 at RULER's length {length}; at ratio 0 stands naive reuse, at 1 full prefill, for every "
            "method, as they are the same there.",
            panels,
            notes,
            against="prophetkv",
            y_label=_POINTS,
        )
    ]


def figure_9(job: Job, budget: Budget) -> list[Artefact]:
    """Every criterion with exact knowledge, and the same recomputation."""
    evaluator = job.evaluator(Recoveries)
    plan = job.ruler(evaluator, [min(job.scale.lengths)])
    wanted = oracle_methods(CRITERIA, SMALL_RATIOS)
    records, notes = job.run("recovery", evaluator, plan, wanted, budget)
    attended = shared(records, _factor_and_ratio)
    ideal = shared(records, _factor_and_ratio, lambda record: record.more["ideal"])
    return [
        _curves(
            *("figure-9", 9, "Figure 9: overlap over the ratio, with exact knowledge for every criterion"),
            "Left: of the 20 % of tokens that the question attends to most under full prefill, the share among the 20 %"
            " after the selected tokens were recomputed. Right: of the ideal's selection, the share that the criterion "
            "selects as well. Each criterion is known exactly, at all layers; recomputation is Stage II for all.",
            {
                "attended tokens recovered": _lines(attended, CRITERIA),
                "overlap with the ideal": _lines(ideal, CRITERIA),
            },
            notes,
            against=_FACTOR_LABELS["phi"],
        )
    ]


def figure_10(job: Job, budget: Budget) -> list[Artefact]:
    """The same prompts in chunks of four sizes."""
    asked = parse_methods([*CURVES, "naive"], [RATIO], job.model.layout.layers)
    length, task = min(job.scale.lengths), job.curve_tasks[0]
    found: dict[tuple[str, int], Values] = {}
    notes: list[str] = []
    for done, size in enumerate(CHUNK_SIZES):
        evaluator = job.evaluator(chunk_tokens=size)
        plan = job.ruler(evaluator, [length], [task])
        name = "ruler" if size == CHUNK_TOKENS else f"ruler-chunks-{size}"
        records, told = job.run(name, evaluator, plan, asked, budget.part(1 / (len(CHUNK_SIZES) - done)))
        found |= {(method, size): values for method, values in shared(records, _strategy).items()}
        notes += [f"chunks of {size}: {note}" for note in told]
    lines: dict[str, _Points] = {}
    for (method, size), values in common(found).items():
        lines.setdefault(method, []).append((size, values))
    return [
        _curves(
            *("figure-10", 10, "Figure 10: accuracy over the chunk size"),
            f"Points of 100 on {RULER_NAMES.get(task, task)} at RULER's length {length} and ratio {RATIO}.",
            {RULER_NAMES.get(task, task): lines},
            notes,
            against="prophetkv",
            x_label="tokens a chunk",
            y_label=_POINTS,
            log=True,
        )
    ]


_FLOORS = ("none", "random")
_Points = list[tuple[float, Values]]  # of a curve: what was measured at each x, all of them on the same prompts


def _strategy(record: Record) -> str:
    return record.strategy


def _factor_and_ratio(record: Record) -> tuple[str, float]:
    return str(record.options["factor"]), float(record.options["ratio"] or 0.0)


def _lines(found: Mapping[tuple[str, float], Values], factors: Sequence[str]) -> dict[str, _Points]:
    return {
        _FACTOR_LABELS[factor]: [(ratio, values) for (name, ratio), values in found.items() if name == factor]
        for factor in factors
        if found
    }


def _accuracy_lines(records: Sequence[Record]) -> dict[str, _Points]:
    found = shared(records, lambda record: record.method)
    if not found:
        return {}
    methods = {
        name: [(0.0, "naive"), *((ratio, Method(name, {"ratio": ratio}).name) for ratio in RATIOS), (1.0, FULL)]
        for name in CURVES
    }
    methods["none"] = [(0.0, "none"), (1.0, "none")]
    # A method that failed on every prompt is not there.
    return {
        name: [(ratio, found[method]) for ratio, method in points if method in found]
        for name, points in methods.items()
    }


def _curves(
    stem: str,
    number: int,
    title: str,
    measured: str,
    panels: Mapping[str, Mapping[str, _Points]],
    notes: Sequence[str],
    *,
    against: str,
    x_label: str = "ratio",
    y_label: str = "share",
    log: bool = False,
) -> Artefact:
    """A row a curve, by the panel it is drawn in, with its prompts and values over x; in detail the intervals.

    `against`: the curve that the others are paired with. Scores become points of 100 where `y_label` says so.
    """
    scale = 100 if y_label == _POINTS else 1
    everywhere = sorted({x for lines in panels.values() for points in lines.values() for x, _ in points})
    rows: list[tuple[Cell, ...]] = []
    detail: list[tuple[Cell, ...]] = []
    drawn, claims = [], []
    for panel, lines in panels.items():
        curves, gaps = [], _gaps(lines, against)
        for label, points in lines.items():
            found = [(x, mean(values)) for x, values in points]
            at = {x: scale * interval.mean for x, interval in found}
            prompts = max((interval.pairs for _, interval in found), default=0)
            rows.append((panel, label, prompts, *map(at.get, everywhere)))
            for x, interval in found:
                gap = gaps.get(label, {}).get(x)
                clear = None if gap is None else "yes" if gap.is_clear else "no"
                detail.append(
                    (panel, label, x, interval.pairs, *_numbers(interval, scale), *_numbers(gap, scale), clear)
                )
            ends = [(x, scale * one.mean, scale * one.low, scale * one.high) for x, one in found]
            curves.append(Line(label, ends, label.split()[0] in _FLOORS))
        drawn.append(Panel(panel, curves, y_label))
        claims += [f"{panel}: {claim}" for claim in _told_apart(gaps, against)]
    columns = ("panel", f"method, by {x_label}", "prompts", *(f"{x:g}" for x in everywhere))
    ends_of = ("mean", "low", "high", f"minus {against}", "low of that", "high of that", "clear")
    return Artefact(
        stem=stem,
        title=title,
        measured=f"{measured} Means over tasks, of the prompts that all points of a panel have; the detail has 95 % "
        f"intervals, of the paired difference to {against} too.",
        table=Table(columns, tuple(rows)) if rows else None,
        detail=Table((*columns[:2], x_label, "prompts", *ends_of), tuple(detail)),
        draw=partial(plot_panels, panels=drawn, x_label=x_label, log=log),
        notes=[*notes, *claims],
        published=[STATEMENTS[number]],
    )


def _numbers(interval: Interval | None, scale: int) -> tuple[float | None, ...]:
    """Mean and ends."""
    if interval is None:
        return None, None, None
    return scale * interval.mean, scale * interval.low, scale * interval.high


def _gaps(lines: Mapping[str, _Points], against: str) -> dict[str, dict[float, Interval]]:
    """By curve and x the paired difference to the curve named `against`, if there is one."""
    reference = dict(lines.get(against, []))
    return {
        label: {x: difference(values, reference[x]) for x, values in points if x in reference}
        for label, points in lines.items()
        if reference and label != against
    }


def _told_apart(gaps: Mapping[str, Mapping[float, Interval]], against: str) -> list[str]:
    """Where other curves are above or below the one named `against`, by paired intervals that exclude 0."""
    claims = []
    for label, found in gaps.items():
        sides: dict[str, list[str]] = {"above": [], "below": []}
        for x, gap in found.items():
            if gap.is_clear:
                sides["above" if gap.mean > 0 else "below"].append(f"{x:g}")
        told = " and ".join(f"{side} it at {', '.join(at)}" for side, at in sides.items() if at)
        unknown = all(gap.pairs < LEAST_PAIRS or math.isnan(gap.low) for gap in found.values())
        otherwise = "on too few prompts to be told apart" if unknown else "nowhere told apart"
        claims.append(f"paired with {against}, {label} is {told or otherwise}")
    return claims


def _bars(
    stem: str,
    number: int,
    title: str,
    name: str,
    measured: str,
    bars: Mapping[str, Values],
    notes: Sequence[str],
) -> Artefact:
    """A row a bar: name, value, interval, prompts."""
    found = {label: mean(values) for label, values in bars.items()}
    rows = [(label, bar.mean, bar.low, bar.high, bar.pairs) for label, bar in found.items()]
    ends = {label: (bar.mean, bar.low, bar.high) for label, bar in found.items()}
    return Artefact(
        stem=stem,
        title=title,
        measured=measured,
        table=Table((name, "overlap", "low", "high", "prompts"), tuple(rows)) if rows else None,
        draw=partial(plot_bars, bars=ends, title=title, y_label="overlap"),
        notes=notes,
        published=[STATEMENTS[number]],
    )
