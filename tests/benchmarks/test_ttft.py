from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ttft import PHASES, SUFFIX_TOKENS, Plan, markdown, measure, report, request_maker
from engine.model import Model
from engine.strategies import SERVED
from errors import InvalidInput
from service.settings import Settings, load_settings
from tests.benchmarks.tiny_prompts import one_thread

LENGTHS = [600, 1200]  # two and three chunks
STRATEGIES = [name for name in SERVED if name not in ("full", "auto")]


@pytest.fixture(scope="module")
def settings(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    folder = tmp_path_factory.mktemp("bench")
    return load_settings(model=str(tiny_folder), data_dir=folder, device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Model:
    return Model.load(tiny_folder, "cpu", "float32")


@pytest.fixture(scope="module")
def result(settings: Settings) -> dict[str, Any]:
    plan = Plan(LENGTHS, [0.1, 0.2], STRATEGIES, tier="disk", pairs=2, plain=("sdpa", "eager"))
    with one_thread():
        states = list(measure(settings, plan, "the command"))
    assert len(states) == len(LENGTHS)
    return states[-1]


def test_every_strategy_at_every_ratio_beside_full_and_the_plain_model(result: dict[str, Any]) -> None:
    fixed = {"full", "prefix", "naive"}
    expected = fixed | {f"{name} {ratio}" for name in STRATEGIES if name not in fixed for ratio in (0.1, 0.2)}
    for length in result["lengths"]:
        assert set(length["methods"]) == expected
        assert set(length["plain_against_full"]) == {"sdpa", "eager"}
        assert length["methods"]["full"]["speed_up"]["ratio"] == 1
        assert all(method["speed_up"]["pairs"] == 2 for method in length["methods"].values())


def test_counters_and_the_bounds_made_of_them(result: dict[str, Any], model: Model) -> None:
    layers, kv_token_bytes = 2, 2 * 2 * 2 * 16 * 4
    for length, tokens in zip(result["lengths"], LENGTHS, strict=True):
        request = request_maker(model, tokens)(SERVED["full"]())
        full, reuse = (length["methods"][name]["counters"] for name in ("full", "prophetkv 0.2"))
        assert sum(len(part.chunk.token_ids) for part in request.parts) == tokens
        assert SUFFIX_TOKENS <= len(request.suffix) < SUFFIX_TOKENS + 9
        prompt = request.prompt_tokens
        fresh = prompt - tokens - len(request.prefix)
        anew = len(request.suffix) + fresh + tokens // 5
        assert (full["rows"], full["kv_rows"], full["bytes_copied"]) == (prompt + 1, prompt, 0)
        assert reuse["recomputed_tokens"] == tokens // 5
        assert (reuse["rows"], reuse["kv_rows"]) == (anew + 1, anew)
        assert reuse["bytes_copied"] == length["kv_bytes"] == tokens * kv_token_bytes
        bound = layers * prompt / (2 * anew)
        assert length["methods"]["prophetkv 0.2"]["bounds"]["rows"] == pytest.approx(bound, abs=0.02)


def test_where_the_time_went_and_the_peak_of_memory(result: dict[str, Any]) -> None:
    for length in result["lengths"]:
        for name, method in length["methods"].items():
            assert set(method["phases_ms"]) == set(PHASES)
            assert sum(method["phases_ms"].values()) == pytest.approx(method["ttft_s"] * 1000, rel=0.5)
            assert (method["phases_ms"]["stage1"] > 0) == name.startswith(("prophetkv", "cacheblend", "kvshare"))
        # The first run of a method grows the heap by at least its slots.
        assert length["methods"]["prophetkv 0.2"]["peak_bytes"] >= length["kv_bytes"]


def test_json_table_and_plots(result: dict[str, Any], tmp_path: Path) -> None:
    report(result, tmp_path / "told.json")
    assert {file.name for file in tmp_path.iterdir()} == {
        "told.json",
        "told.md",
        "told-phases.png",
        "told-speed-up.png",
    }
    rows = [line for line in markdown(result).splitlines() if line.startswith("| ")][1:]
    assert len(rows) == sum(len(length["methods"]) + 2 for length in result["lengths"])
    assert all(row.count("|") == rows[0].count("|") for row in rows)


@pytest.mark.parametrize("name", ["full", "oracle", "profetkv"])
def test_what_cannot_be_measured_against_full_is_named(settings: Settings, name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        next(measure(settings, Plan([600], [0.2], [name]), "the command"))
