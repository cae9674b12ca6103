"""What the engine does on one GPU, within minutes and without a download: `make gpu-check`.

ceilings   matrix product, copies within the device and from pinned host memory
kernels    each against fp64, timed, beside what else could do its work
prefill    full prefill against every strategy, random weights in the shapes of Llama-3.1-8B and Qwen2.5-14B
decode     the layer loop against a CUDA graph

Ends within --seconds, and says what it left out. --smoke runs all of it at tiny shapes, on a CPU in Triton's
interpreter: TRITON_INTERPRET=1 python -m benchmarks.gpu_check --smoke.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_kernels import Size, check_kernels
from benchmarks.gpu_plots import plot
from benchmarks.gpu_prefill import Plan, Prefills
from benchmarks.gpu_timing import Clock, median_ms
from benchmarks.report import conditions
from engine.kernels.common import INTERPRETED
from engine.model import Model

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# Name: transformers' model type and the fields of its configuration.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama-3.1-8B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "rope_parameters": _LLAMA3_ROPE,
        },
    ),
    "Qwen2.5-14B": (
        "qwen2",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "max_position_embeddings": 131072,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
}
_TINY = {
    "tiny": (
        "llama",
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 100,
            "max_position_embeddings": 4096,
        },
    )
}
_SIZES = [
    Size("Llama-3.1-8B", 32, 8, 128, keys=16384, question=64, chunk=512, requests=16, page=256),
    Size("Qwen2.5-14B", 40, 8, 128, keys=16384, question=64, chunk=512, requests=16, page=256),
]
_TINY_SIZES = [Size("tiny", 6, 2, 16, keys=96, question=5, chunk=20, requests=2, page=16, tiles=())]
_TINY_PLAN = Plan(lengths=(64, 128), ratios=(0.2,), rounds=1, chunk=32, prefix=4, glue=1, suffix=5, decoded=2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes gpu_check.json and plots. Returns 1 if a kernel failed or missed its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, to see that everything runs")
    parser.add_argument("--seconds", type=float, default=450.0, help="when to end")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gpu"), help="folder for JSON and plots")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (options.smoke and INTERPRETED):
        parser.error("no CUDA device: only TRITON_INTERPRET=1 python -m benchmarks.gpu_check --smoke runs here")
    with torch.inference_mode():
        return _measure(options, device)


def _measure(options: argparse.Namespace, device: torch.device) -> int:
    clock = Clock(options.seconds)
    smoke = options.smoke
    result: dict[str, Any] = {"command": " ".join(["benchmarks.gpu_check", *sys.argv[1:]]), **_facts(device)}
    result["ceilings"] = _ceilings(device, smoke)
    result["kernels"] = []
    for number, size in enumerate(_TINY_SIZES if smoke else _SIZES):
        result["kernels"] += check_kernels(size, device, clock, until=0.2 + 0.15 * number)
    _write(options.out, result, clock)
    result["prefill"], result["decode"] = {}, {}
    for name, until in zip(_TINY if smoke else _MODELS, (0.6, 0.95), strict=False):
        try:
            _measure_model(name, device, result, clock, until)
        except torch.cuda.OutOfMemoryError:
            clock.leave_out(f"{name}: out of memory")
        _write(options.out, result, clock)
    if not plot(result, options.out):
        clock.leave_out("plots: matplotlib is not installed")
    _write(options.out, result, clock)
    print(
        f"{clock.spent() * clock.seconds:.0f} s; {options.out / 'gpu_check.json'}; left out: {clock.left_out or 'none'}"
    )
    return int(any(kernel.get("verdict") == "bad" for kernel in result["kernels"]))


def _measure_model(name: str, device: torch.device, result: dict[str, Any], clock: Clock, until: float) -> None:
    if clock.spent() > until - 0.1:
        clock.leave_out(name)
        return
    smoke = name in _TINY
    family, shape = (_TINY if smoke else _MODELS)[name]
    model = Model.random(family, shape, device, torch.float32 if smoke else torch.bfloat16)
    prefills = Prefills(model, _TINY_PLAN if smoke else Plan())
    result["decode"][name] = prefills.measure_decode()
    result["prefill"][name] = prefills.measure(name, clock, until)


def _facts(device: torch.device) -> dict[str, Any]:
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "unknown"
    facts: dict[str, Any] = {"conditions": conditions(), "triton": triton, "device": "cpu"}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["device"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
    print(json.dumps(facts, indent=2))
    return facts


def _ceilings(device: torch.device, smoke: bool) -> dict[str, Any]:
    """Rates that no kernel passes: TFLOP/s of a bf16 product, bytes read and written by a copy, bytes from the host."""
    side, nbytes = (64, 2**16) if smoke else (8192, 2**32)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found: dict[str, Any] = {
        "matmul_tflops": 2 * side**3 / median_ms(lambda call: a @ b, device) / 1e9,
        "copy_gb_per_s": 2 * nbytes / median_ms(lambda call: target.copy_(source), device) / 1e6,
    }
    if device.type == "cuda":
        host = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
        for size in (2**16, 2**18, 2**20, 2**21, 2**22, 2**26):
            count = len(host) // size

            def move(call: int, size: int = size, count: int = count) -> None:
                at = call % count * size
                target[at : at + size].copy_(host[at : at + size], non_blocking=True)

            found[f"host_to_device_gb_per_s_{size // 1024}_KiB"] = size / median_ms(move, device, replayed=False) / 1e6
    print(json.dumps(found, indent=2))
    return found


def _write(folder: Path, result: dict[str, Any], clock: Clock) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    result["left_out"] = clock.left_out
    (folder / "gpu_check.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
