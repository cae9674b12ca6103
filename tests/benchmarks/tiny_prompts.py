"""Short prompts for a tiny model, in the form that the runner takes them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.quality.evaluator import Evaluator
from benchmarks.quality.methods import Method, parse_methods
from benchmarks.quality.results import Record, open_results
from benchmarks.quality.runner import Budget, Outcome, Workers, run
from benchmarks.quality.sample import Sample
from benchmarks.quality.suites import Plan, PromptId

CHUNK_TOKENS = 24
TEXT = "The boat lies in the harbour. The tide turns at noon. Mind the ladder, it is wet. The winch is on the left. "
SETTINGS = {"suite": "tiny", "seed": 0}


@contextmanager
def one_thread() -> Iterator[None]:
    """On tiny tensors more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sample(index: int = 0, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "suite": "ruler-200",
        "task": "vt",
        "index": index,
        "header": "Read the text.\n\n",
        "context": (f"Number {index}. {TEXT * 2}",),
        "question": "\n\nWhen does the tide turn?",
        "answer_prefix": " It turns at",
        "answers": ("noon", "twelve", "midday"),
        "max_tokens": 5,
        **changes,
    }
    return Sample(**values)


def plan(count: int) -> Plan:
    """Prompts of two tasks in turn."""
    prompts = tuple(PromptId("ruler-200", task, index) for index in range(count) for task in ("vt", "cwe"))
    return Plan(prompts, lambda prompt: sample(prompt.index, task=prompt.task), SETTINGS, {})


def methods(*specs: str) -> list[Method]:
    return parse_methods(specs or ("naive", "epic", "cacheblend", "kvshare", "prophetkv"), [0.2], layers=2)


def run_into(
    path: Path,
    evaluator: Evaluator,
    count: int = 2,
    wanted: list[Method] | None = None,
    minutes: float | None = None,
    workers: Workers | None = None,
) -> Outcome:
    quiet = Console(quiet=True)
    with open_results(path, {**evaluator.settings(), **SETTINGS}) as results:
        return run(
            plan(count), evaluator, wanted or methods(), results, Budget(minutes), console=quiet, workers=workers
        )


def without_times(records: list[Record]) -> list[dict[str, Any]]:
    """What must be the same whenever it is computed, in an order of its own."""
    told = [
        {
            name: getattr(record, name)
            for name in ("key", "digest", "score", "more", "prediction", "kl", "nll", "tokens", "error")
        }
        for record in records
    ]
    return sorted(told, key=lambda record: str(record["key"]))
