"""All parts within a budget, and the page that holds them together."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.quality import longbench, musique
from benchmarks.quality.paper import figures, tables
from benchmarks.quality.paper.artefacts import Artefact, write
from benchmarks.quality.paper.job import CHUNK_TOKENS, RATIO, Job
from benchmarks.quality.results import load
from benchmarks.quality.runner import Budget
from benchmarks.quality.summary import time_split
from benchmarks.report import conditions
from benchmarks.ttft import fits_window
from errors import ConfigError, InvalidInput


@dataclass(frozen=True, slots=True)
class Part:
    """What makes some artefacts; their stems and titles stand for them when it is not run.

    share: its weight; none when the path that it `needs`, a field of Data, is not given.
    """

    make: Callable[[Job, Budget], list[Artefact]]
    share: float
    artefacts: tuple[tuple[str, str], ...]
    needs: str | None = None

    def weight(self, job: Job) -> float:
        """Of this part in the job's time."""
        return self.share if self.needs is None or getattr(job.data, self.needs) is not None else 0.0


PARTS = (
    Part(figures.figure_2, 2, (("figure-2", "Figure 2"),)),
    Part(tables.ruler_tables, 30, (("table-ruler", "Tables 1, 5 and 6: RULER"),)),
    Part(tables.ttft_table, 6, (("table-ttft", "Tables 2 and 4: time to the first token"),)),
    Part(figures.figures_3_and_4, 8, (("figure-3", "Figure 3"), ("figure-4", "Figure 4"))),
    Part(figures.figure_6, 6, (("figure-6", "Figure 6"),)),
    Part(figures.figure_9, 10, (("figure-9", "Figure 9"),)),
    Part(figures.figure_8, 16, (("figure-8", "Figure 8"),)),
    Part(figures.figure_10, 12, (("figure-10", "Figure 10"),)),
    Part(tables.longbench_tables, 10, (("table-longbench", "Tables 1, 7 and 8: LongBench"),), needs="longbench"),
)


def check(job: Job) -> None:
    """Raises InvalidInput now for what would only fail when its turn comes: lengths, tasks, what lies at the paths."""
    job.ruler(job.evaluator(), job.scale.lengths)
    for length in job.scale.ttft_lengths:
        if not fits_window(job.model, length):
            raise InvalidInput(
                f"ttft_lengths: a context of {length} tokens with its frame and question is beyond the model's window "
                f"of {job.model.window}",
                field="ttft_lengths",
            )
    if job.data.longbench is not None:
        for path in longbench.find(job.data.longbench).values():
            longbench.load(path)
    if job.data.musique is not None:
        musique.load(job.data.musique)


def reproduce(job: Job, budget: Budget, command: str) -> bool:
    """Makes all tables and figures and index.md in the job's folder; what fails does not stop the others.

    A part gets its share of what is left, so what one leaves over is for the others; the whole budget spent, it shows
    what earlier runs measured. Returns whether nothing failed. Raises ConfigError when the folder cannot be made or
    holds records of other settings; then the page that was there before stays.
    """
    try:
        job.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{job.out} cannot be a folder: {error.strerror}. Name another with --out") from error
    job.evaluator().warm_up()
    made: list[Artefact] = []
    for number, part in enumerate(PARTS):
        left = sum(later.weight(job) for later in PARTS[number:])
        made += _attempt(job, part, budget, part.weight(job) / left if left else 0.0)
    made += _attempt(job, Part(_time, 1, (("time", "Where the time went"),)), Budget(None), 1)
    pages = [write(job.out, artefact) for artefact in made]
    (job.out / "index.md").write_text("\n".join([_head(job, budget, command), *pages]))
    return not any(artefact.failed for artefact in made)


def _attempt(job: Job, part: Part, budget: Budget, share: float) -> list[Artefact]:
    job.console.print(", ".join(title for _, title in part.artefacts), highlight=False)
    try:
        return part.make(job, budget.part(share))
    except ConfigError:
        raise
    except Exception as error:  # said on the page and by the exit status
        job.console.print_exception()
        reason = f"failed: {type(error).__name__}: {error}"
    return [
        Artefact(stem=stem, title=title, measured="", notes=[reason], failed=True) for stem, title in part.artefacts
    ]


def _time(job: Job, budget: Budget) -> list[Artefact]:
    """What the folder's records took; nothing when there are none."""
    records = [record for path in sorted(job.file("").glob("*.jsonl")) for record in load(path)[1]]
    if not records:
        return []
    measured = (
        "Seconds of computation behind all records of this folder, those of earlier runs too; Tables 2 and 4 aside."
    )
    table = time_split(records, lambda record: record.strategy)
    return [Artefact(stem="time", title="Where the time went", measured=measured, table=table)]


def _head(job: Job, budget: Budget, command: str) -> str:
    told = conditions()
    model = job.model
    lines = [
        f"# The paper's evaluation on {job.name}",
        "",
        f"- command: `{command}`",
        f"- model: {job.name}, {str(model.dtype).removeprefix('torch.')}, KV codec {job.codec}, on "
        f"{job.evaluator().machine}",
        f"- machine: {told['cpu']}, {told['cores']} cores, {told['capability']}, load {told['load']:.1f}",
        f"- date: {told['date']}; seed {job.scale.seed}; RULER's lengths {', '.join(map(str, job.scale.lengths))}; "
        f"chunks of {CHUNK_TOKENS} tokens; ratio {RATIO} where no other is named",
        f"- versions: prophetkv {told['prophetkv']}, torch {told['torch']}, transformers {told['transformers']}",
        f"- time: {(time.monotonic() - budget.started) / 60:.1f} minutes, and what earlier runs of the folder took",
        "",
        "The paper (arXiv 2602.02579) used other models and other hardware: its numbers stand beside for the shape.",
        "",
    ]
    return "\n".join(lines)
