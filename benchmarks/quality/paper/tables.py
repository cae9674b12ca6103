"""Tables 1, 5 and 6 (RULER), 1, 7 and 8 (LongBench), 2 and 4 (time to the first token)."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from benchmarks.quality.comparison import MEAN, gap_table, gaps, uninformative
from benchmarks.quality.methods import DEFAULT, FULL, Method, parse_methods
from benchmarks.quality.paper.artefacts import Artefact
from benchmarks.quality.paper.job import RATIO, RULER_NAMES, Job
from benchmarks.quality.paper.published import (
    LONGBENCH,
    LONGBENCH_EXTENDED,
    LONGBENCH_PLAIN,
    RULER_4K,
    RULER_8K,
    RULER_16K,
    TTFT,
    Published,
)
from benchmarks.quality.results import Record
from benchmarks.quality.runner import Budget
from benchmarks.quality.suites import longbench_plan
from benchmarks.quality.summary import by_suite
from benchmarks.quality.tables import Table, score_table
from engine.model import Model
from engine.strategies import STRATEGIES

LONGBENCH_NAMES = {
    "2wikimqa": "WQA",
    "triviaqa": "TQA",
    "hotpotqa": "HQA",
    "narrativeqa": "NQA",
    "musique": "MQue",
    "qmsum": "QMSum",
    "passage_retrieval_en": "PRetr_en",
    "passage_retrieval_zh": "PRetr_zh",
    "samsum": "SAM",
    "dureader": "DRead",
    "gov_report": "GRep",
    "lcc": "LCC",
    "multi_news": "MNews",
    "multifieldqa_en": "MFQA_en",
    "multifieldqa_zh": "MFQA_zh",
    "passage_count": "PassCnt",
    "qasper": "Qasper",
    "repobench-p": "RepoB",
    "vcsum": "VC",
}
_SCORES = "Points of 100 by method at ratio 0.2; `none` has no context, `random` recomputes tokens drawn by chance."
_TTFT = (
    "Seconds from the request to the logits of the first token, medians over the prompts of RULER: load from memory, "
    "assembly, Stages I and II and selection. `sdpa` and `eager` are the plain transformers model with such attention "
    "on one of the prompts in the same process, not interleaved with the methods; `prophetkv bench ttft` interleaves."
)
_TTFT_COLUMNS = ("full", "epic", "prophetkv", "cacheblend", "kvshare", "naive", "sdpa", "eager")
_ROUNDS = 3  # of the plain model, as far as the budget goes
_EAGER_BYTES = 10  # a query-key pair of a head: logits and weights in fp32 and the weights in the model's dtype


def methods(job: Job) -> list[Method]:
    """Those of the tables."""
    return parse_methods(DEFAULT, [RATIO], job.model.layout.layers)


def ruler_tables(job: Job, budget: Budget) -> list[Artefact]:
    """One a length."""
    evaluator = job.evaluator()
    records, notes = job.run("ruler", evaluator, job.ruler(evaluator, job.scale.lengths), methods(job), budget)
    found = by_suite(records)
    return [
        _scores(
            f"table-ruler-{length}",
            f"Tables 1, 5 and 6: RULER at {length} tokens",
            found.get(f"ruler-{length}", []),
            RULER_NAMES,
            notes,
            [_ruler_published(length)],
        )
        for length in job.scale.lengths
    ]


def longbench_tables(job: Job, budget: Budget) -> list[Artefact]:
    """The sets of Tables 1 and 7, and the extended ones of Tables 1 and 8, as far as they lie in the folder."""
    records: list[Record] = []
    notes = ["no folder of LongBench's files was given"]
    if job.data.longbench is not None:
        evaluator = job.evaluator()
        plan = longbench_plan(
            evaluator.builder.encode, evaluator.room, job.data.longbench, samples=job.scale.samples, seed=job.scale.seed
        )
        records, notes = job.run("longbench", evaluator, plan, methods(job), budget)
    plain = [record for record in records if not record.task.endswith("_e")]
    extended = [record for record in records if record.task.endswith("_e")]
    names = LONGBENCH_NAMES | {f"{task}_e": name for task, name in LONGBENCH_NAMES.items()}
    return [
        _scores(
            *("table-longbench", "Tables 1 and 7: LongBench", plain, names, notes),
            [LONGBENCH, LONGBENCH_PLAIN],
        ),
        _scores(
            *("table-longbench-extended", "Tables 1 and 8: LongBench, extended sets", extended, names, notes),
            [LONGBENCH_EXTENDED],
        ),
    ]


@torch.inference_mode()
def ttft_table(job: Job, budget: Budget) -> list[Artefact]:
    """From the times of the RULER records, which must be there, and of the plain model, measured now."""
    evaluator = job.evaluator()
    found = by_suite(job.records("ruler"))
    rows = []
    for length in job.scale.lengths:
        members = found.get(f"ruler-{length}")
        if members is None:
            continue
        plan = job.ruler(evaluator, [length], [members[0].task])
        prefill = evaluator.start(plan.make(plan.prompts[0])).start(STRATEGIES[FULL]())
        times = {method.strategy: _median_ttft(members, method) for method in methods(job)}
        times |= _plain_times(job.model, prefill.layout.ids, budget)
        full, prophetkv = times[FULL], times["prophetkv"]
        rows.append((length, *(times[name] for name in _TTFT_COLUMNS), full and prophetkv and full / prophetkv))
    return [
        Artefact(
            stem="table-ttft",
            title="Tables 2 and 4: time to the first token",
            measured=_TTFT,
            table=Table(("context", *_TTFT_COLUMNS, "full / prophetkv"), tuple(rows)) if rows else None,
            notes=[] if rows else ["there are no RULER records to take times from"],
            published=[TTFT],
        )
    ]


def _scores(
    stem: str,
    title: str,
    records: Sequence[Record],
    names: Mapping[str, str],
    notes: Sequence[str],
    published: Sequence[Published],
) -> Artefact:
    """Scores by method and task as in the paper, in detail the gaps to full prefill, and what tells nothing."""
    artefact = Artefact(stem=stem, title=title, measured=_SCORES, notes=notes, published=published)
    if not records:
        return artefact
    scores = score_table(records)
    found = gaps(records)
    last = [gap for gap in found if gap.task == MEAN] or found
    claims = [
        f"{gap.method}: {100 * gap.difference.mean:+.2f} points to full prefill "
        f"[{100 * gap.difference.low:.2f}, {100 * gap.difference.high:.2f}] on {gap.difference.pairs} prompts"
        for gap in last
    ]
    idle = [
        f"{names.get(task, task)} tells nothing: full is not shown to beat none" for _, task in uninformative(records)
    ]
    return replace(
        artefact,
        table=Table(tuple(names.get(column, column) for column in scores.columns), scores.rows),
        detail=gap_table(found),
        notes=[*notes, *claims, *idle],
    )


def _ruler_published(length: int) -> Published:
    """The paper's table of that length, or of the nearest."""
    tables = {4096: RULER_4K, 8192: RULER_8K, 16384: RULER_16K}
    return tables[min(tables, key=lambda known: abs(known - length))]


def _median_ttft(records: Sequence[Record], method: Method) -> float | None:
    times = [record.timings["ttft"] for record in records if record.method == method.name and not record.error]
    return median(times) / 1000 if times else None


def _plain_times(model: Model, ids: Tensor, budget: Budget) -> dict[str, float | None]:
    """Seconds of the plain model's prefill by kind of attention; None where its memory would not suffice."""
    times: dict[str, list[float]] = {"sdpa": []}
    if model.heads * len(ids) ** 2 * _EAGER_BYTES < _free_bytes(model) / 2:
        times["eager"] = []
    longest = 0.0
    while not times["sdpa"] or (len(times["sdpa"]) < _ROUNDS and budget.left() > longest):
        begun = time.perf_counter()
        for attention, measured in times.items():
            start = time.perf_counter()
            float(model.plain_logits(ids, attention)[0])  # a number on the host: the device has done
            measured.append(time.perf_counter() - start)
        longest = max(longest, time.perf_counter() - begun)
    return {name: median(times[name]) if name in times else None for name in ("sdpa", "eager")}


def _free_bytes(model: Model) -> int:
    if model.device.type == "cuda":
        return torch.cuda.mem_get_info(model.device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
