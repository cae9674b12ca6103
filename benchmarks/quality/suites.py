"""The suites as one: which prompts a run has, in what order, how each is scored, and what its gold answer is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.quality import longbench, musique, ruler
from benchmarks.quality.haystack import read_sentences
from benchmarks.quality.sample import Sample, choose
from errors import InvalidInput, PromptTooLong
from retriever.documents import TextEncoder

# The halves of a truncated text, tokenised again, may have a few tokens more.
_MARGIN = 16


@dataclass(frozen=True, slots=True)
class PromptId:
    """Names a prompt of a run."""

    suite: str
    task: str
    index: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Prompts in the order in which they are run: the first of every task, then the second, so a cut run is balanced.

    settings: all that decides what the prompts are; not_run: tasks that cannot be made, with the reason.
    """

    prompts: tuple[PromptId, ...]
    make: Callable[[PromptId], Sample]
    settings: Mapping[str, Any]
    not_run: Mapping[str, str]


def ruler_plan(
    encode: TextEncoder,
    room: int,
    *,
    lengths: Sequence[int],
    samples: int,
    tasks: Sequence[str] = (),
    seed: int = 0,
    haystack: Path | None = None,
    squad: Path | None = None,
    hotpotqa: Path | None = None,
) -> Plan:
    """RULER's tasks, all that can be made by default. `room`: the longest length that the model's window allows.

    Raises InvalidInput for a length beyond it or one that a task does not fit into, an unknown task, or a path that
    does not hold what it should.
    """
    indices = sorted(choose(samples, samples, seed))
    for length in lengths:
        if length > room:
            raise InvalidInput(
                f"a length of {length} is beyond the model's window, which leaves {room}", field="lengths"
            )
    made = {
        f"ruler-{length}": ruler.Ruler(encode, length, seed=seed, haystack=haystack, squad=squad, hotpotqa=hotpotqa)
        for length in dict.fromkeys(lengths)
    }
    if not made:
        raise InvalidInput("no length is given", field="lengths")
    first = next(iter(made.values()))
    wanted = _known(tasks, ruler.TASKS) or first.tasks
    for task in tasks:
        if task in first.not_run:
            raise InvalidInput(f"{task} {first.not_run[task]}", field="tasks")
    counts = {task: first.count(task, samples) for task in wanted}
    order = [
        PromptId(suite, task, index) for index in indices for suite in made for task in wanted if index < counts[task]
    ]

    def make(prompt: PromptId) -> Sample:
        return made[prompt.suite].sample(prompt.task, prompt.index)

    try:  # now, to say at once what does not fit
        first_of_each = {prompt: make(prompt) for prompt in order if prompt.index == 0}
    except PromptTooLong as error:
        raise InvalidInput(str(error), field="lengths") from error
    return Plan(
        tuple(order),
        lambda prompt: first_of_each.get(prompt) or make(prompt),
        {
            "suite": "ruler",
            "seed": seed,
            "haystack": _digest("\n".join(read_sentences(haystack)).encode()),
            "squad": squad and _digest(squad.read_bytes()),
            "hotpotqa": hotpotqa and _digest(hotpotqa.read_bytes()),
        },
        {} if tasks else first.not_run,
    )


def longbench_plan(
    encode: TextEncoder,
    room: int,
    folder: Path,
    *,
    samples: int,
    tasks: Sequence[str] = (),
    seed: int = 0,
    limit: int | None = None,
) -> Plan:
    """LongBench's sets that lie in `folder`; prompts longer than `limit` tokens with their answer lose their middle.

    limit: `room`, which the model's window allows, by default. Raises InvalidInput for one beyond it, a folder without
    any set, an unknown or missing set, or a malformed line.
    """
    if limit is None:
        limit = room
    if limit > room:
        raise InvalidInput(f"a limit of {limit} is beyond the model's window, which leaves {room}", field="limit")
    files = longbench.find(folder)
    wanted = _known(tasks, tuple(files)) or tuple(files)
    loaded = {task: longbench.load(files[task]) for task in wanted}
    chosen = {task: choose(samples, len(loaded[task]), seed) for task in wanted}

    def make(prompt: PromptId) -> Sample:
        sample = loaded[prompt.task][prompt.index]
        return longbench.truncate_middle(sample, encode, limit - sample.max_tokens - _MARGIN)

    return Plan(
        _in_turn("longbench", chosen),
        make,
        {
            "suite": "longbench",
            "seed": seed,
            "room": limit,
            "data": {task: _digest(path.read_bytes()) for task, path in files.items()},
        },
        {task: "no file" for task in longbench.DATA_SETS if task not in files},
    )


def musique_plan(path: Path, *, samples: int, seed: int = 0) -> Plan:
    """MuSiQue's questions. Raises InvalidInput when the file is missing or malformed."""
    loaded = musique.load(path)
    chosen = {"musique": choose(samples, len(loaded), seed)}
    settings = {"suite": "musique", "seed": seed, "data": _digest(path.read_bytes())}
    return Plan(_in_turn("musique", chosen), lambda prompt: loaded[prompt.index], settings, {})


def score(sample: Sample, prediction: str) -> tuple[float, dict[str, float]]:
    """The suite's score, 0 to 1, and further ones by name."""
    if sample.suite == "longbench":
        return longbench.score(sample, prediction), {}
    if sample.suite == "musique":
        return musique.score(sample, prediction), {"match": musique.match(sample, prediction)}
    return ruler.score(sample, prediction), {}


def settled(sample: Sample, text: str) -> bool:
    """No continuation of the answer can change its score, so nothing is gained by generating more.

    True of RULER when all that is looked for stands in the text, and of LongBench where only the first line counts.
    """
    if sample.suite == "longbench":
        return longbench.settled(sample, text)
    return sample.suite != "musique" and ruler.score(sample, text) == 1.0


def gold(sample: Sample) -> str:
    """The text whose likelihood is measured: a right answer as it would follow the prompt."""
    if sample.suite not in ("longbench", "musique"):
        return ruler.gold(sample)
    # Without a chat template's turn between them the answer follows the colon in the same line.
    return f" {sample.answers[0]}" if not sample.chat and sample.question.endswith(":") else sample.answers[0]


def separator(sample: Sample) -> str:
    """What stands between two texts of the context. Two halves of a truncated one have nothing between them."""
    return musique.SEPARATOR if sample.suite == "musique" else ""


def _in_turn(suite: str, chosen: Mapping[str, Sequence[int]]) -> tuple[PromptId, ...]:
    most = max(map(len, chosen.values()))
    return tuple(
        PromptId(suite, task, indices[turn])
        for turn in range(most)
        for task, indices in chosen.items()
        if turn < len(indices)
    )


def _known(tasks: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    for task in tasks:
        if task not in known:
            raise InvalidInput(f"unknown task {task!r}; there are {', '.join(known)}", field="tasks")
    return tuple(dict.fromkeys(tasks))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
