"""The file that a run's results are kept in: JSON lines, the run's settings first, then a line per prompt and strategy.

Lines are only ever appended, each in one write that is on the disk before the next prompt begins. What was cut off in
the middle of a line is computed again; a run that is started again with the same settings goes on where it ended, and
tries again what failed: a later line stands in for one with an error.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from errors import ConfigError, InvalidInput

Option = float | int | str | bool | None
# What tells one record of a run from another.
Key = tuple[str, str, str, int, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one strategy did with one prompt.

    options: what the strategy was run with, such as its ratio; digest: the sample's, the same for every strategy and
    run; group: as in the sample; score: 0 to 1; more: other scores by name; kl: teacher-forced divergence from full
    prefill in nats a token; nll: negative log-likelihood of the gold answer in nats a token; tokens: counts by name;
    timings: milliseconds by phase; machine: what they were measured on; error: why there is no answer. Such a record
    scores 0 but is no part of any mean, and its digest is empty where the prompt could not be made.
    """

    model: str
    suite: str
    task: str
    index: int
    strategy: str
    options: Mapping[str, Option] = field(default_factory=dict)
    digest: str
    group: str = ""
    score: float
    more: Mapping[str, float] = field(default_factory=dict)
    prediction: str
    kl: float | None = None
    nll: float | None = None
    tokens: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    machine: str = ""
    error: str = ""

    @property
    def method(self) -> str:
        """The strategy with its options, as tables name it: `prophetkv ratio=0.2 smooth=7`."""
        return method_name(self.strategy, self.options)

    @property
    def key(self) -> Key:
        """Names the record in its run."""
        return (self.model, self.suite, self.task, self.index, self.method)


_FIELDS = {field.name for field in fields(Record)}
_RECORD = TypeAdapter(Record)


def method_name(strategy: str, options: Mapping[str, Option]) -> str:
    """Name of a strategy with its options, in the options' alphabetical order."""
    return " ".join((strategy, *(f"{name}={value}" for name, value in sorted(options.items()))))


class ResultFile:
    """A run's file, opened to add to it. `key in file`: that record is there already, and of no failure."""

    def __init__(self, descriptor: int, records: list[Record]) -> None:
        self._descriptor = descriptor
        done = [record for record in records if not record.error]
        self._keys = {record.key for record in done}
        self._digests = {_prompt(record): record.digest for record in done}

    def __contains__(self, key: Key) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)

    def append(self, record: Record) -> None:
        """Adds a record; it is on the disk when this returns.

        Raises ConfigError when it is there already, when another method's record is of another prompt, or when the
        disk does not take it.
        """
        if record.key in self._keys:
            raise ConfigError(f"the results already hold {record.key}")
        if record.error:
            _append(self._descriptor, _line(asdict(record)))
            return
        if self._digests.setdefault(_prompt(record), record.digest) != record.digest:
            raise ConfigError(f"the results are of other prompts: {record.suite} {record.task} {record.index} differs")
        _append(self._descriptor, _line(asdict(record)))
        self._keys.add(record.key)


@contextmanager
def open_results(path: Path, settings: Mapping[str, Any]) -> Iterator[ResultFile]:
    """Opens a run's file for writing, made if it is not there; `settings` is all that decides the results (JSON).

    A line that was cut off at the end is removed. Raises ConfigError when the file cannot be written, the run was made
    with other settings or another process writes to it, InvalidInput for a file that is no run's or has a malformed
    line.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}. Name another file with --out") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another process is writing to {path}") from error
        content = path.read_bytes()
        whole = _whole_lines(content)
        first = _line({"settings": settings})
        records: list[Record] = []
        if whole:
            stored, records = _parse(path, whole)
            check_settings(path, stored, json.loads(first)["settings"])
        elif not first.startswith(content):
            raise InvalidInput(f"{path} holds no run")
        os.truncate(descriptor, len(whole))  # only now: what is no run's file stays as it is
        if not whole:
            _append(descriptor, first)
        yield ResultFile(descriptor, records)
    finally:
        os.close(descriptor)


def load(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """A run's settings and records, of what was tried again the last. Changes nothing; a line cut off is left out.

    Raises InvalidInput when there is no run at `path` or a line is malformed, which it names.
    """
    if not path.is_file():
        raise InvalidInput(f"no results at {path}")
    return _parse(path, _whole_lines(path.read_bytes()))


def _prompt(record: Record) -> tuple[str, str, int]:
    return (record.suite, record.task, record.index)


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _append(descriptor: int, line: bytes) -> None:
    try:
        taken = os.write(descriptor, line)
        os.fsync(descriptor)
    except OSError as error:
        raise ConfigError(f"the disk took no result: {error.strerror}; mend it and start the run again") from error
    if taken != len(line):
        raise ConfigError("the disk took only a part of a result; make room and start the run again")


def _parse(path: Path, content: bytes) -> tuple[dict[str, Any], list[Record]]:
    settings: dict[str, Any] | None = None
    records: dict[Key, Record] = {}
    # Not splitlines: predictions may hold other line separators.
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            value = json.loads(line)
            if settings is None:
                settings = dict(value["settings"])
                continue
            if unknown := set(value) - _FIELDS:
                raise ValueError(f"unknown fields {sorted(unknown)}")
            record = _RECORD.validate_python(value)
            if record.key in records and not records[record.key].error:
                raise ValueError(f"{record.key} is there twice")
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise InvalidInput(f"{path}: line {number} is malformed: {where}: {first['msg']}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"{path}: line {number} is malformed: {error}") from error
        records[record.key] = record
    if settings is None:
        raise InvalidInput(f"{path} holds no run")
    return settings, list(records.values())


def check_settings(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises ConfigError when the run at `path` was made with other settings than are wanted."""
    differing = [
        f"{name} was {stored.get(name)!r} and is now {wanted.get(name)!r}"
        for name in sorted({*stored, *wanted})
        if stored.get(name) != wanted.get(name)
    ]
    if differing:
        raise ConfigError(
            f"{path} is a run with other settings: {'; '.join(differing)}. Use another file or its settings"
        )
