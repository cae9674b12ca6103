"""Tables 1, 5 and 6 (RULER), 1, 7 and 8 (LongBench), 2 and 4 (time to the first token)."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

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
from benchmarks.quality.results import Record, check_settings
from benchmarks.quality.runner import Budget
from benchmarks.quality.statistics import LEAST_SPAN
from benchmarks.quality.suites import longbench_plan
from benchmarks.quality.summary import by_suite
from benchmarks.quality.tables import Cell, Table, score_table
from benchmarks.ttft import Plan, fits_window, measure_length, memory
from cache_store.memory import MemoryStore
from cache_store.tiered import TieredStore
from engine.model import Model

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
    "Seconds from the request to its first token with chunk KV in memory, medians of interleaved rounds of all methods "
    "in one process; `sdpa` and `eager` are the plain transformers model with such attention in the same rounds. The "
    "ratio with its 95 % interval is that of paired rounds."
)
_REUSING = ("epic", "prophetkv", "cacheblend", "kvshare", "naive")
_TTFT_COLUMNS = (FULL, *_REUSING, "sdpa", "eager")
_ROUNDS = 3
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
            [LONGBENCH, LONGBENCH_EXTENDED],
        ),
    ]


@torch.inference_mode()
def ttft_table(job: Job, budget: Budget) -> list[Artefact]:
    """The shortest length first, and the next as far as the budget goes. What was measured before is kept.

    Of RULER's lengths those are left out that with the frame of this request are beyond the window. Raises ConfigError
    when what was measured before is of another model.
    """
    file = job.file("ttft.json")
    settings = {name: job.evaluator().settings()[name] for name in ("model", "fingerprint", "dtype", "device")}
    measured: list[dict[str, Any]] = []
    if file.exists():
        held = json.loads(file.read_text())
        check_settings(file, held["settings"], settings)
        measured = held["measured"]
    lacking = set(job.scale.ttft_lengths or job.scale.lengths) - {told["context_tokens"] for told in measured}
    notes = []
    for length in sorted(lacking):
        expected = _expected(measured, length)
        if expected > budget.left() or time.monotonic() >= budget.whole_end:
            notes.append(
                f"the budget left out {length} tokens; the same command goes on with them"
                + f", in about {expected / 60:.0f} minutes" * bool(expected)
            )
            continue
        if not fits_window(job.model, length):
            notes.append(f"{length} tokens with frame and question are beyond the model's window")
            continue
        plan = Plan([length], [RATIO], list(_REUSING), pairs=_ROUNDS, plain=_attentions(job.model, length))
        store = TieredStore([MemoryStore(1 << 50)])
        measured.append({**measure_length(job.model, store, plan, length), "machine": job.evaluator().machine})
        store.close()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"settings": settings, "measured": measured}, indent=2))
    rows = [_ttft_row(told) for told in sorted(measured, key=lambda told: told["context_tokens"])]
    notes += [f"measured on {machine}" for machine in dict.fromkeys(told["machine"] for told in measured)]
    return [
        Artefact(
            stem="table-ttft",
            title="Tables 2 and 4: time to the first token",
            measured=_TTFT,
            table=Table(("context", *_TTFT_COLUMNS, "full / prophetkv", "low", "high"), tuple(rows)) if rows else None,
            notes=notes,
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
        f"{names.get(task, task)} tells nothing: full is not shown to beat none by {100 * LEAST_SPAN:.0f} points"
        for _, task in uninformative(records)
    ]
    return replace(
        artefact,
        table=Table(tuple(names.get(column, column) for column in scores.columns), scores.rows),
        detail=gap_table([*found, *gaps(records, measure="kl"), *gaps(records, measure="nll")]),
        notes=[*notes, *claims, *idle],
    )


def _ruler_published(length: int) -> Published:
    """The paper's table of that length, or of the nearest."""
    tables = {4096: RULER_4K, 8192: RULER_8K, 16384: RULER_16K}
    return tables[min(tables, key=lambda known: abs(known - length))]


def _attentions(model: Model, tokens: int) -> tuple[str, ...]:
    """Those with which the plain model's prefill fits into memory."""
    fits = model.heads * tokens**2 * _EAGER_BYTES < _free_bytes(model) / 2
    return ("sdpa", "eager") if fits else ("sdpa",)


def _expected(measured: Sequence[Mapping[str, Any]], length: int) -> float:
    """Seconds that a length will take at most, by the nearest that was measured; 0 if there is none.

    Time grows with the length and with its square at most.
    """
    shorter = [told for told in measured if told["context_tokens"] <= length]
    if shorter:
        nearest = max(shorter, key=lambda told: int(told["context_tokens"]))
        return _seconds(nearest) * (length / int(nearest["context_tokens"])) ** 2
    return min((_seconds(told) * length / int(told["context_tokens"]) for told in measured), default=0.0)


def _seconds(told: Mapping[str, Any]) -> float:
    """What measuring a length took, encoding its chunks about as long as a round."""
    times = [float(method["ttft_s"]) for method in told["methods"].values()]
    times += [float(plain["slow_s"]) for plain in told["plain_against_full"].values()]
    return (_ROUNDS + 1) * sum(times)


def _ttft_row(told: Mapping[str, Any]) -> tuple[Cell, ...]:
    times = {method["strategy"]: method["ttft_s"] for method in told["methods"].values()}
    times |= {name: plain["slow_s"] for name, plain in told["plain_against_full"].items()}
    speed_up = next(m["speed_up"] for m in told["methods"].values() if m["strategy"] == "prophetkv")
    return (told["context_tokens"], *map(times.get, _TTFT_COLUMNS), speed_up["ratio"], *speed_up["interval"])


def _free_bytes(model: Model) -> int:
    if model.device.type == "cuda":
        return torch.cuda.mem_get_info(model.device)[0]
    return memory("MemAvailable", "/proc/meminfo")  # what caches hold can be had
