"""Records with what a test does not care about filled in."""

from __future__ import annotations

from typing import Any

from benchmarks.quality.results import Record


def record(method: str = "full", index: int = 0, score: float = 1.0, **changes: Any) -> Record:
    """`method`: the strategy with its options, as in `prophetkv ratio=0.2`."""
    strategy, *options = method.split()
    values: dict[str, Any] = {
        "model": "model",
        "suite": "suite",
        "task": "task",
        "index": index,
        "strategy": strategy,
        "options": {name: float(value) for name, value in (option.split("=") for option in options)},
        "score": score,
        "prediction": "text",
        **changes,
    }
    digest = f"{values['suite']}:{values['task']}:{values['index']}"
    return Record(**{"digest": digest, **values})
