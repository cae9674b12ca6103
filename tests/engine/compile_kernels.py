"""Compiles every Triton kernel for a Hopper GPU, as its wrapper launches it, on a machine that has none.

Run as a process of its own: triton decides at import whether it interprets or compiles. Prints for each kernel what
the compiler made of it.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from cache_store.codec import CODECS, Codec, Packed, Shape
from engine.kernels.attend import attend_rows
from engine.kernels.column_sums import column_sums
from engine.kernels.decode import decode
from engine.kernels.place import place

_TARGET = GPUTarget("cuda", 90, 32)


class _NoGPU:
    """As much of a driver as compiling takes."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _TARGET


def main() -> None:
    driver.set_active(_NoGPU())
    run, made = JITFunction.run, []

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled = run(kernel, *args, grid=grid, warmup=True, **options)
        machine_code = len(compiled.asm["cubin"])
        made.append({"kernel": kernel.__name__, "shared": compiled.metadata.shared, "machine_code": machine_code})

    JITFunction.run = compile_only
    # Qwen2.5-14B
    slots = torch.zeros(2, 8, 4096, 128, dtype=torch.bfloat16)
    query = torch.zeros(1, 40, 512, 128, dtype=torch.bfloat16)
    rows, inv_freq = torch.arange(512), torch.ones(64)
    out, lse = attend_rows(query, slots[:1], slots[1:], rows, 0.1)
    column_sums(query, slots[:1], lse, rows, 0.1, torch.zeros(8, 512))
    for codec in CODECS.values():
        place(_packed(codec, slots[:, :, :512]), rows, inv_freq, slots[0], slots[1])
    pages = slots[0].view(-1, 256, 8, 128)
    decode(out[0, :, :1].transpose(0, 1), pages, pages, torch.zeros(1, 4).int(), torch.ones(1).int(), 0.1)
    # Windows and soft caps as in Gemma 2, few rows, a narrow head; partial rotary.
    slots = torch.zeros(2, 4, 4096, 80, dtype=torch.float16)
    query, rows = torch.zeros(1, 8, 5, 80, dtype=torch.float16), torch.arange(5)
    _, lse = attend_rows(query, slots[:1], slots[1:], rows, 0.1, window=512, softcap=50.0)
    column_sums(query, slots[:1], lse, rows, 0.1, torch.zeros(4, 5), window=512, softcap=50.0)
    for codec in CODECS.values():
        place(_packed(codec, slots[:, :, :500]), torch.arange(500), inv_freq[:32], slots[0], slots[1])
    print(json.dumps(made))


def _packed(codec: Codec, layer: Tensor) -> Packed:
    return codec.unpack(codec.encode(layer), Shape(*layer.shape[1:]), layer.dtype)


if __name__ == "__main__":
    main()
