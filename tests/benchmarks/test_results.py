from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.quality.results import Record, ResultFile, load, open_results
from errors import ConfigError, InvalidInput
from tests.benchmarks.records import record

SETTINGS = {"seed": 0, "model": "model", "lengths": [1024, 2048]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a run's file will be: the folder is not there yet."""
    return tmp_path / "runs" / "run.jsonl"


def add(path: Path, *records: Record, settings: dict[str, Any] | None = None) -> int:
    """Runs once; how many records there were to add."""
    added = 0
    with open_results(path, settings or SETTINGS) as results:
        for one in records:
            if one.key not in results:
                results.append(one)
                added += 1
    return added


def test_a_rerun_skips_what_is_there(path: Path) -> None:
    records = [record("full", 0), record("full", 1), record("prophetkv ratio=0.2", 0), record("prophetkv ratio=0.1", 0)]
    assert add(path, *records[:3]) == 3
    assert add(path, *records) == 1
    assert add(path, *records) == 0
    assert load(path) == (SETTINGS, records)


def test_what_tells_records_apart(path: Path) -> None:
    different = [
        record(),
        record(index=1),
        record(task="other"),
        record(suite="other"),
        record(model="other"),
        record("naive"),
        record("full ratio=1"),
    ]
    assert add(path, *different) == 7
    assert add(path, record(score=0.5, prediction="other")) == 0


def test_methods_are_named_with_their_options() -> None:
    assert record("full").method == "full"
    assert record("prophetkv smooth=7 ratio=0.2").method == "prophetkv ratio=0.2 smooth=7.0"
    assert record(strategy="prophetkv", options={"score_rows": "last", "smooth": 7}).method == (
        "prophetkv score_rows=last smooth=7"
    )


def test_a_line_torn_anywhere_is_made_again(path: Path) -> None:
    add(path, record(index=0), record(index=1))
    content = path.read_bytes()
    last = content.rfind(b"\n", 0, -1) + 1
    for end in range(last, len(content)):
        path.write_bytes(content[:end])
        assert [one.index for one in load(path)[1]] == [0]
        assert path.read_bytes() == content[:end], "loading changes nothing"
        assert add(path, record(index=0), record(index=1)) == 1
        assert path.read_bytes() == content


def test_settings_torn_anywhere_are_made_again(path: Path) -> None:
    add(path)
    content = path.read_bytes()
    for end in range(len(content)):
        path.write_bytes(content[:end])
        with pytest.raises(InvalidInput, match="holds no run"):
            load(path)
        add(path)
        assert path.read_bytes() == content


def test_a_killed_run_loses_nothing_that_it_said_was_kept(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from benchmarks.quality.results import open_results\n"
        "from tests.benchmarks.records import record\n"
        "with open_results(Path(sys.argv[1]), {'seed': 0}) as results:\n"
        "    for index in range(10**6):\n"
        "        results.append(record(index=index)); print(index, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        for line in run.stdout:
            if int(line) == 50:
                run.kill()
                break
        said = [50, *map(int, run.stdout.read().split())]
    kept = [one.index for one in load(path)[1]]
    assert kept == list(range(len(kept)))
    assert kept[-1] >= said[-1]
    assert add(path, *(record(index=index) for index in range(len(kept) + 3)), settings={"seed": 0}) == 3


def test_other_settings_are_refused_with_what_differs(path: Path) -> None:
    add(path, record())
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="seed was 0 and is now 1"):
        add(path, settings={**SETTINGS, "seed": 1})
    with pytest.raises(ConfigError, match=r"haystack was None and is now 'a\.txt'"):
        add(path, settings={**SETTINGS, "haystack": "a.txt"})
    with pytest.raises(ConfigError, match="model was 'model' and is now None"):
        add(path, settings={name: value for name, value in SETTINGS.items() if name != "model"})
    assert path.read_bytes() == before
    add(path, settings={**SETTINGS, "lengths": (1024, 2048)})  # as JSON they are the same


def test_two_writers_are_refused(path: Path) -> None:
    with open_results(path, SETTINGS), pytest.raises(ConfigError, match="another process"):
        add(path)
    assert add(path, record()) == 1


def test_the_same_record_twice_is_an_error(path: Path) -> None:
    with open_results(path, SETTINGS) as results:
        results.append(record())
        assert len(results) == 1
        with pytest.raises(ConfigError, match="already"):
            results.append(record(score=0.0))
    assert load(path)[1] == [record()]


def test_failures_are_tried_again(path: Path) -> None:
    failed = record(error="NumericalFault: NaN", score=0.0, digest="")
    assert add(path, failed, record(index=1)) == 2
    assert load(path)[1] == [failed, record(index=1)]
    assert add(path, failed, record(index=1)) == 1  # and fails again
    assert load(path)[1] == [failed, record(index=1)]
    assert add(path, record(), record(index=1)) == 1
    assert load(path)[1] == [record(), record(index=1)]
    assert add(path, record(), record(index=1)) == 0


def test_what_is_no_number_is_not_written(path: Path) -> None:
    with open_results(path, SETTINGS) as results:
        with pytest.raises(ValueError, match="JSON compliant"):
            results.append(record(kl=float("nan")))
        assert record().key not in results
    assert load(path)[1] == []


def test_where_no_file_can_be_is_refused(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"run\.jsonl cannot be written: Is a directory"):
        add(path)
    path.rmdir()
    path.touch()
    with pytest.raises(ConfigError, match=r"below\.jsonl cannot be written: .* Name another file with --out"):
        add(path / "below.jsonl")


def test_a_disk_that_takes_nothing_is_said() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(ConfigError, match="the disk took no result: No space left on device"):
        ResultFile(full, []).append(record())
    os.close(full)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is malformed"),
        ("[]", "line 2 is malformed"),
        ("", "line 2 is malformed"),
        ("{}", "line 2 is malformed: model"),
        (json.dumps({"extra": 1}), "line 2 is malformed: unknown fields"),
        ('"score": "high"', "line 2 is malformed: score"),
        ('"kl": "low"', "line 2 is malformed: kl"),
        ('"index": 1.5', "line 2 is malformed: index"),
        ('"tokens": {"prompt": "many"}', "line 2 is malformed: tokens.prompt"),
    ],
)
def test_a_malformed_line_in_the_middle_is_named(path: Path, line: str, message: str) -> None:
    add(path, record(index=0), record(index=1))
    lines = path.read_text().split("\n")
    if line.startswith('"'):
        lines[1] = json.dumps({**json.loads(lines[1]), **json.loads(f"{{{line}}}")})
    else:
        lines[1] = line
    path.write_text("\n".join(lines))
    for read in (load, add):
        with pytest.raises(InvalidInput, match=message) as refusal:
            read(path)
        assert str(path) in str(refusal.value)


def test_a_repeated_line_is_named(path: Path) -> None:
    add(path, record())
    path.write_text(path.read_text() + path.read_text().split("\n")[1] + "\n")
    with pytest.raises(InvalidInput, match=r"line 3 is malformed: .* is there twice"):
        load(path)


@pytest.mark.parametrize("content", ["", "no run", "no run\n", "no run\ntorn", "{}\n", '{"settings": 3}\n', "[]\n"])
def test_what_is_no_run_is_refused(path: Path, content: str) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(InvalidInput):
        load(path)
    if content:
        with pytest.raises(InvalidInput):
            add(path)
        assert path.read_text() == content
    with pytest.raises(InvalidInput, match="no results at"):
        load(path.with_name("none.jsonl"))


@settings(deadline=None, max_examples=40)
@given(
    prediction=st.text(st.characters(exclude_categories=["Cs"])),
    score=st.floats(0, 1),
    kl=st.none() | st.floats(0, 100),
    options=st.dictionaries(
        st.sampled_from("abc"), st.none() | st.booleans() | st.integers(-5, 5) | st.floats(0, 1) | st.text(max_size=3)
    ),
)
def test_a_record_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, prediction: str, score: float, kl: float | None, options: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("results") / "run.jsonl"
    written = record(
        prediction=prediction,
        score=score,
        kl=kl,
        options=options,
        more={"match": 0.5},
        tokens={"prompt": 9},
        timings={"stage1_ms": 1.5},
        group="8k+",
        nll=2.0,
    )
    add(path, written)
    (read,) = load(path)[1]
    assert read == written
    assert read.method == written.method
