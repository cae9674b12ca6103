"""On paper: numbers worked out apart, and what a user is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from errors import ConfigError
from service.plan import GPUS, MEDIA, SHAPES, Paper, medium_rate, shape_of
from tests.service.test_cli import prophetkv

LLAMA = SHAPES["llama-3.1-8b"]


def test_shapes_have_the_published_sizes() -> None:
    assert LLAMA.token_bytes == 128 << 10
    assert SHAPES["qwen2.5-14b"].token_bytes == 192 << 10
    assert LLAMA.parameters == pytest.approx(6.98e9, rel=1e-3)
    assert SHAPES["qwen3-14b"].parameters == pytest.approx(13.21e9, rel=1e-3)
    assert SHAPES["llama-3.1-70b"].parameters == pytest.approx(68.45e9, rel=1e-3)


def test_a_worked_example() -> None:
    """Llama-3.1-8B, 16K tokens, H100: full 472 ms; placing 1.4, Stage I 6.7, Stage II 109; at 50 GB/s loading 43 ms,
    longer than placing and Stage I together."""
    row = Paper(LLAMA, GPUS["h100"], 50e9, 0.2, "raw").row(16384)
    assert row.full * 1000 == pytest.approx(472, rel=0.02)
    assert row.loaded * 1000 == pytest.approx(109 + 43, rel=0.02)
    assert row.break_even is not None
    assert row.break_even == pytest.approx(16384 * LLAMA.token_bytes / (row.full - (row.loaded - 0.04295)), rel=1e-3)
    assert row.chosen == "prophetkv"


def test_a_chunk_breaks_even_where_the_design_says() -> None:
    for name, rate in (("llama-3.1-8b", 6.10), ("qwen2.5-14b", 4.84), ("qwen3-14b", 4.03), ("llama-3.1-70b", 1.56)):
        assert Paper(SHAPES[name], GPUS["h100"], 1e9, 0.2, "raw").chunk_break_even / 1e9 == pytest.approx(
            rate, rel=0.01
        )


def test_a_slow_medium_pays_nowhere_a_faster_one_from_some_length_on() -> None:
    slow = Paper(LLAMA, GPUS["h100"], MEDIA["redis-py"] * 1e9, 0.2, "raw")
    assert slow.row(4096).chosen == "full"
    paper = Paper(LLAMA, GPUS["h100"], 8e9, 0.2, "raw")
    shortest = paper.pays_from()
    assert shortest is not None
    assert paper.row(shortest).chosen == "prophetkv"
    assert shortest == 512 or paper.row(shortest - 512).chosen == "full"
    packed = Paper(LLAMA, GPUS["h100"], 4e9, 0.2, "int8")
    assert packed.row(8192).loaded < Paper(LLAMA, GPUS["h100"], 4e9, 0.2, "raw").row(8192).loaded
    assert Paper(LLAMA, GPUS["h100"], 1e3, 1.0, "raw").pays_from() is None


def test_shapes_come_from_configurations(tmp_path: Path) -> None:
    told = {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 9,
    }
    (tmp_path / "config.json").write_text(json.dumps(told))
    shape = shape_of(str(tmp_path), tmp_path)
    assert (shape.kv_heads, shape.head_dim, shape.token_bytes) == (4, 16, 2 * 2 * 2 * 4 * 16)
    assert shape == shape_of(str(tmp_path / "config.json"), tmp_path) == shape_of(tmp_path.name, tmp_path.parent)
    (tmp_path / "config.json").write_text(json.dumps(told | {"num_experts": 8}))
    for content in (None, "[]", "{}", "no"):
        if content is not None:
            (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError):
            shape_of(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"one of llama-3\.1-8b"):
        shape_of("gpt-9", tmp_path)


@pytest.mark.parametrize("medium", ["tape", "0", "-1", "nan", "inf"])
def test_bad_media_are_named(medium: str) -> None:
    with pytest.raises(ConfigError, match="host-pcie5"):
        medium_rate(medium)


def test_the_command(tmp_path: Path) -> None:
    told = ("plan", "--model", "llama-3.1-8b", "--gpu", "h100")
    status, text = prophetkv(*told, "--medium", "host-pcie5", "--length", "16384")
    assert status == 0, text
    assert "472 ms" in text
    assert "above 6.10 GB/s; host-pcie5 gives 50.00 GB/s" in text
    assert "Does reuse pay here? yes, from about" in text
    _, text = prophetkv(*told, "--medium", "0.2")
    assert "Does reuse pay here? yes, from about 1" in text
    _, text = prophetkv(*told, "--medium", "0.2", "--ratio", "1")
    assert "Does reuse pay here? no." in text
    status, text = prophetkv("plan", "--model", "llama-3.1-8b", "--gpu", "voodoo", "--medium", "1")
    assert (status, "no GPU 'voodoo': there are b200" in text) == (1, True)
