"""Placing chunks by the compiled kernel: built as the package builds it, and equal to torch bit for bit."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

import pytest
import torch

from cache_store.base import ChunkKV
from cache_store.codec import CODECS, Shape
from engine import placing
from tests.conftest import ROOT
from tests.tiny import FAMILIES, Bench, tiny_model

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension module, compiled anew from this source."""
    folder = tmp_path_factory.mktemp("build")
    command = ["-W", "ignore", "-c", "from setuptools import setup; setup()", "build_ext"]
    command += ["--build-lib", str(folder), "--build-temp", str(folder / "temp")]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)
    path = next(folder.rglob("_place*.so"))
    spec = importlib.util.spec_from_file_location("engine.kernels._place", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def compiled(built: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "_place", built, raising=False)
    monkeypatch.setattr(placing, "COMPILED", True)


def kv_of(codec: str, dtype: torch.dtype, tokens: int, head_dim: int) -> ChunkKV:
    layer = torch.randn(2, *Shape(3, tokens, head_dim), generator=torch.Generator().manual_seed(tokens))
    layer[0, :, :, 1] += 50
    return ChunkKV.pack([layer.to(dtype), layer.to(dtype)], codec)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "head_dim", "half"), [(1, 16, 8), (33, 64, 32), (64, 80, 40), (70, 96, 24), (40, 128, 64), (5, 34, 17)]
)
def test_the_kernel_and_torch_give_the_same_bits(
    codec: str, dtype: torch.dtype, slots: torch.dtype, tokens: int, head_dim: int, half: int
) -> None:
    kv = kv_of(codec, dtype, tokens, head_dim)
    angles = torch.arange(5, 5 + tokens)[:, None] * torch.logspace(0, -4, half)
    cos, sin = angles.cos(), angles.sin()
    expected, found = (torch.full((2, 3, tokens + 20, head_dim), 7.0, dtype=slots) for _ in range(2))
    place = slice(11, 11 + tokens)
    placing.place_plain(kv, 1, cos, sin, *expected[:, :, place])
    placing.place_compiled(kv, 1, cos, sin, *found[:, :, place])
    assert torch.equal(found, expected)  # the neighbours' slots too


@pytest.mark.usefixtures("compiled")
def test_numbers_that_are_not_finite_stay_so() -> None:
    layer = torch.randn(2, 1, 4, 16)
    layer[0, 0, 1, 2], layer[0, 0, 2, 9], layer[1, 0, 3, 3] = float("nan"), float("inf"), float("-inf")
    for dtype in DTYPES:
        kv = ChunkKV.pack([layer.to(dtype)])
        out = torch.zeros(2, 2, 1, 4, 16, dtype=torch.bfloat16)
        cos, sin = torch.full((4, 8), 0.6), torch.full((4, 8), 0.8)
        placing.place_plain(kv, 0, cos, sin, *out[0])
        placing.place_compiled(kv, 0, cos, sin, *out[1])
        assert torch.equal(out[0].isnan(), out[1].isnan())
        assert torch.equal(out[0].nan_to_num(), out[1].nan_to_num())


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("family", ["qwen2", "phi3", "gemma3", "llama-yarn"])
def test_a_prefill_is_the_same_with_the_kernel(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tiny_model(FAMILIES[family]))
    by_kernel = bench.logits("prophetkv")
    monkeypatch.setattr(placing, "COMPILED", False)
    assert torch.equal(bench.logits("prophetkv"), by_kernel)


def test_the_kernel_refuses_what_it_cannot_place(built: ModuleType) -> None:
    for kind, slot_kind, head_dim, half in ((9, 0, 16, 8), (0, 3, 16, 8), (0, 0, 2048, 8), (0, 0, 16, 9)):
        with pytest.raises(ValueError, match="kind"):
            built.place(kind, slot_kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, head_dim, half)
