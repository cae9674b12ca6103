"""The GPU kernels at the size of a 16K prompt: each against fp64, timed, and against what else could do its work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu_timing import Clock, median_ms
from cache_store.codec import CODECS, Codec, Shape
from engine.attention import QueryRows, attend
from engine.kernels.attend import attend_rows
from engine.kernels.column_sums import column_sums
from engine.kernels.common import Tile
from engine.kernels.decode import decode
from engine.kernels.flex import attend_rows_flex, block_mask
from engine.kernels.place import place

_DTYPE = torch.bfloat16
_BOUND = 1e-2  # of results in that dtype, relative to the norm
_LAYERS = 4  # calls rotate over so many sets of K and V: more than the L2 cache holds
_SAMPLED = 64  # rows that fp64 checks
_TILES = (Tile(128, 64, 8, 2), Tile(128, 128, 8, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), Tile(64, 128, 4, 2))

Attention = Callable[[int], tuple[Tensor, Tensor]]  # of a layer by its number: output and log-sum-exp


@dataclass(frozen=True, slots=True)
class Size:
    """Of one layer and one prompt, and of a batch of decode steps."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    keys: int
    question: int  # rows that score
    chunk: int
    requests: int
    page: int
    tiles: tuple[Tile, ...] = _TILES  # alternatives to what attend_rows chooses


class Case(NamedTuple):
    """One kernel at work on a layer by its number; its error against fp64, if there is a way to tell; its work."""

    name: str
    run: Callable[[int], Any]
    error: Callable[[], float] | None
    bound: float = _BOUND
    flops: float = 0.0
    nbytes: float = 0.0


def check_kernels(size: Size, device: torch.device, clock: Clock, until: float) -> list[dict[str, Any]]:
    """Runs every case, one that fails included, until the share `until` of the time is spent."""
    results = []
    for case in _Bench(size, device).cases():
        if clock.spent() > until:
            clock.leave_out(f"{case.name}, {size.name}")
            continue
        result = {"size": size.name, "kernel": case.name, **_measured(case, device)}
        print(
            ", ".join(
                f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in result.items()
            )
        )
        results.append(result)
    return results


def _measured(case: Case, device: torch.device) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        if case.error is not None:
            found["error"] = case.error()
            found["verdict"] = "good" if found["error"] < case.bound else "bad"
        found["ms"] = median_ms(lambda call: case.run(call % _LAYERS), device)
    except Exception as failure:  # what a device refuses must not hide what the other kernels do there
        return found | {"verdict": "bad", "failure": f"{type(failure).__name__}: {failure}"[:500]}
    if case.flops:
        found["tflops"] = case.flops / found["ms"] / 1e9
    if case.nbytes:
        found["gb_per_s"] = case.nbytes / found["ms"] / 1e6
    return found


class _Bench:
    """Slots of a few layers, rows over them, and the cases made of these."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self._size = size
        self._device = device
        self._scaling = size.head_dim**-0.5
        self._generator = torch.Generator().manual_seed(0)
        self._slots = self._normal(_LAYERS, 2, size.kv_heads, size.keys, size.head_dim)
        self._layers = [(layer[0][None], layer[1][None]) for layer in self._slots]

    def cases(self) -> Iterator[Case]:
        """FlexAttention last: it compiles for half a minute."""
        size = self._size
        asked = torch.arange(size.keys - size.question, size.keys)
        chosen = torch.randperm(size.keys - size.question, generator=self._generator)[: size.keys // 5]
        selected = torch.cat((chosen.sort().values, asked)).to(self._device)
        asked = asked.to(self._device)
        query, asking = self._queries(len(selected)), self._queries(size.question)
        yield self._rows_case("attend_rows, Stage II", query, selected)
        for tile in size.tiles:
            yield self._rows_case(f"attend_rows, Stage II, {tuple(tile)}", query, selected, tile)
        yield self._full_case()
        yield self._rows_case("attend_rows, Stage I", asking, asked)
        yield self._rows_case("attend_rows, one row", asking[:, :, -1:], asked[-1:])
        yield self._sums_case(asking, asked)
        for codec in CODECS.values():
            yield self._place_case(codec)
        yield self._decode_case()
        yield self._masked_case(query, selected)
        yield self._flex_case(query, selected)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=_DTYPE, device=self._device)

    def _queries(self, rows: int) -> Tensor:
        return self._normal(1, rows, self._size.heads, self._size.head_dim).transpose(1, 2)

    def _attention_case(self, name: str, query: Tensor, positions: Tensor, run: Attention) -> Case:
        size = self._size
        flops = 4.0 * size.heads * size.head_dim * float((positions + 1).sum())
        # Only some of the rows, the first and last among them: the larger error of output and log-sum-exp.
        sample = torch.linspace(0, len(positions) - 1, min(_SAMPLED, len(positions)), device=self._device).long()

        def error() -> float:
            out, lse = run(0)
            expected, expected_lse, _ = self._dense(query[:, :, sample], *self._layers[0], positions[sample])
            return max(_error(out[:, :, sample], expected), _error(lse[:, :, sample], expected_lse))

        return Case(name, run, error, flops=flops, nbytes=float(self._slots[0].nbytes))

    def _rows_case(self, name: str, query: Tensor, positions: Tensor, tile: Tile | None = None) -> Case:
        def run(layer: int) -> tuple[Tensor, Tensor]:
            return attend_rows(query, *self._layers[layer], positions, self._scaling, tile=tile)

        return self._attention_case(name, query, positions, run)

    def _full_case(self) -> Case:
        rows = QueryRows(torch.arange(self._size.keys), self._device, _DTYPE)
        query = self._queries(len(rows))

        def run(layer: int) -> tuple[Tensor, Tensor]:
            return attend(query, *self._layers[layer], rows, self._scaling)

        return self._attention_case("full causal prefill", query, rows.positions, run)

    def _sums_case(self, query: Tensor, positions: Tensor) -> Case:
        size, keys = self._size, int(positions[0])
        sums = torch.zeros(size.kv_heads, keys, device=self._device)
        _, lse, weights = self._dense(query, *self._layers[0], positions)
        expected, lse = weights[0, ..., :keys].reshape(size.kv_heads, -1, keys).sum(1), lse.float()

        def run(layer: int) -> None:
            column_sums(query, self._layers[layer][0], lse, positions, self._scaling, sums)

        def error() -> float:
            sums.zero_()
            run(0)
            return _error(sums, expected)

        flops = 2.0 * size.heads * size.head_dim * len(positions) * keys
        return Case("column_sums", run, error, 1e-3, flops, float(self._slots[0, 0].nbytes))

    def _place_case(self, codec: Codec) -> Case:
        size = self._size
        shape = Shape(size.kv_heads, size.chunk, size.head_dim)
        blocks = [codec.encode(self._normal(2, *shape)) for _ in range(_LAYERS)]
        stored = [codec.unpack(block, shape, _DTYPE) for block in blocks]
        target = torch.empty_like(self._slots)
        positions = torch.arange(size.keys - size.chunk, size.keys, device=self._device)
        inv_freq = 500000.0 ** -(torch.arange(size.head_dim // 2, device=self._device) / (size.head_dim // 2))

        def run(layer: int) -> None:
            place(stored[layer], positions, inv_freq, *target[layer])

        def error() -> float:
            run(0)
            key, value = codec.decode(blocks[0], shape, _DTYPE).double()
            angle = (positions[:, None].float() * inv_freq).double()
            low, high = key.chunk(2, dim=-1)
            cos, sin = angle.cos(), angle.sin()
            turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
            return _error(target[0][:, :, positions], torch.stack((turned, value)))

        written = 2 * shape.numel * _DTYPE.itemsize
        return Case(f"place, {codec.name}", run, error, nbytes=float(blocks[0].nbytes + written))

    def _decode_case(self) -> Case:
        size = self._size
        most = size.keys // size.page
        keys, values = self._normal(2, size.requests * most, size.page, size.kv_heads, size.head_dim)
        table = torch.randperm(size.requests * most, generator=self._generator).view(size.requests, most).int()
        table = table.to(self._device)
        lengths = torch.randint(size.keys // 2, size.keys + 1, (size.requests,), generator=self._generator).int()
        query = self._normal(size.requests, size.heads, size.head_dim)
        on_device = lengths.to(self._device)

        def run(layer: int) -> Tensor:
            return decode(query, keys, values, table, on_device, self._scaling)

        def error() -> float:
            length = int(lengths[0])
            key, value = (pages[table[0]].flatten(0, 1)[:length].transpose(0, 1)[None] for pages in (keys, values))
            last = torch.tensor([length - 1], device=self._device)
            expected, _, _ = self._dense(query[:1, :, None], key, value, last)
            return _error(run(0)[:1], expected[:, :, 0])

        read = 2.0 * float(lengths.sum()) * size.kv_heads * size.head_dim * _DTYPE.itemsize
        return Case("paged decode", run, error, nbytes=read)

    def _masked_case(self, query: Tensor, positions: Tensor) -> Case:
        group = self._size.heads // self._size.kv_heads
        mask = torch.arange(self._size.keys, device=self._device) <= positions[:, None]

        def run(layer: int) -> Tensor:
            # The fused kernels take either a mask or GQA.
            key, value = (part.repeat_interleave(group, 1) for part in self._layers[layer])
            return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self._scaling)

        flops = 4.0 * self._size.heads * self._size.head_dim * float((positions + 1).sum())
        return Case("SDPA with a mask, Stage II", run, None, flops=flops)

    def _flex_case(self, query: Tensor, positions: Tensor) -> Case:
        blocks = block_mask(positions, self._size.keys)

        def run(layer: int) -> tuple[Tensor, Tensor]:
            return attend_rows_flex(query, *self._layers[layer], blocks, self._scaling)

        return self._attention_case("FlexAttention, Stage II", query, positions, run)

    def _dense(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output, log-sum-exp and weights in fp64."""
        group = query.shape[1] // key.shape[1]
        key, value = (part.double().repeat_interleave(group, 1) for part in (key, value))
        logits = query.double() @ key.transpose(-1, -2) * self._scaling
        hidden = torch.arange(key.shape[2], device=key.device) > positions[:, None]
        logits = logits.masked_fill(hidden, float("-inf"))
        weights = logits.softmax(-1)
        return weights @ value, logits.logsumexp(-1), weights


def _error(found: Tensor, expected: Tensor) -> float:
    """Relative to the norm; NaN is an error without bound."""
    difference = (found.double() - expected).norm() / expected.norm()
    return float(difference.nan_to_num(nan=float("inf")))
