"""The emulated media: what is measured and how it is told, on a tiny model. Speed is for the benchmark itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.balance import Plan, markdown, measure, report
from benchmarks.throttle import Throttled, TokenBucket
from cache_store.memory import MemoryStore
from service.settings import load_settings
from tests.benchmarks.tiny_prompts import one_thread
from tests.cache_store.conftest import chunk_of, kv_of, same


def test_a_bucket_lets_bytes_through_at_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [0.0], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("benchmarks.throttle.time.monotonic", lambda: now[0])
    monkeypatch.setattr("benchmarks.throttle.time.sleep", sleep)
    bucket = TokenBucket(1000.0)
    for _ in range(3):
        bucket.take(500)
    assert sum(slept) == pytest.approx(1.49)  # a burst of 10 bytes
    now[0] += 100.0
    bucket.take(10)
    assert len(slept) == 3
    TokenBucket(float("inf")).take(1 << 60)
    assert len(slept) == 3


def test_a_throttled_tier_shows_what_it_is_told_to_and_counts_the_wait() -> None:
    tier = Throttled(MemoryStore(1 << 20), 1e9)
    for number in range(2):
        tier.put(chunk_of(number), kv_of(number))
    tier.frozen = True
    tier.put(chunk_of(2), kv_of(2))
    tier.held = {chunk_of(1).key, chunk_of(2).key}
    assert tier.holds([chunk_of(0), chunk_of(1)]) == [False, True]
    assert tier.get(chunk_of(0)) is tier.get(chunk_of(2)) is None
    assert same(tier.get(chunk_of(1)), kv_of(1))
    assert (tier.stats.hits, tier.stats.misses, tier.stats.read_bytes) == (1, 2, kv_of(1).nbytes)
    assert tier.stats.read_seconds > 0


def test_cells_table_and_plot(tiny_folder: Path, tmp_path: Path) -> None:
    settings = load_settings(model=str(tiny_folder), data_dir=tmp_path, device="cpu", dtype="float32")
    plan = Plan(tokens=512, rates=(0.1, float("inf")), pairs=2)
    with one_thread():
        result = measure(settings, plan, "the command")
    places = [(cell["rate_mb_s"], cell["stored"]) for cell in result["cells"]]
    shares = ("all", "half", "none")
    assert places == [(rate, stored) for rate in (0.1, None) for stored in shares]
    slow, *_, none = result["cells"]
    assert set(slow["ttft_s"]) == {"auto", "full", "compute"}  # loading alone would take 2.6 seconds
    assert slow["loading_alone_s"] == pytest.approx(512 * 512 / 1e5, rel=0.01)
    assert set(none["ttft_s"]) == {"auto", "full", "compute"}
    for cell in result["cells"]:
        assert cell["rounds"]["auto"] == sum(cell["chosen"].values()) == 2
        assert cell["best"] in cell["auto_over"]
    report(result, tmp_path / "told.json")
    assert json.loads((tmp_path / "told.json").read_text())["cells"] == result["cells"]
    assert (tmp_path / "told.png").stat().st_size > 0
    rows = [line for line in markdown(result).splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + len(places)
    assert all(row.count("|") == 13 for row in rows)
    assert "Emulated" in markdown(result)
