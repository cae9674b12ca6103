"""Self-tests on the configured model and machine, and plain words on whether reuse pays here.

The identities are those that the tests prove on tiny models, now on the loaded weights: ratio 0 is naive reuse,
ratio 1 is the full prefill even over slots that hold garbage, keys of one place turned to another are the keys of that
place in every kind of layer, an entry survives its codec.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cache_store import entry
from cache_store.base import Chunk, ChunkKV, KVStore
from cache_store.disk import DiskStore
from cache_store.memory import MemoryStore
from cache_store.redis import RedisStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.base import GenerateRequest, Part, Sampling
from engine.encode import PrefixCache, encode_chunk
from engine.forward import ForwardPass, run_steps
from engine.model import Model, token_tensor
from engine.placing import COMPILED
from engine.prefill import Prefill
from engine.strategies import STRATEGIES
from errors import StoreError
from service.certificate import certify
from service.settings import Settings

_CHUNKS, _TOKENS = 4, 128
_TOLERANCE = {
    torch.float32: 1e-3,
    torch.bfloat16: 0.15,
    torch.float16: 0.05,
}  # of the largest logit's size, bf16 and fp16
_BENCH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `passed` is None for a measurement."""

    what: str
    passed: bool | None
    detail: str


@torch.inference_mode()
def examine(model: Model, settings: Settings, codecs: Sequence[str] = ()) -> Iterator[Finding]:
    """All findings, one by one as they are made. `codecs`: what these would cost, beside the configured one."""
    yield from _identities(model)
    how = "by the compiled kernel" if COMPILED else "by torch: the package was built without a C compiler"
    yield Finding("placing chunks on a CPU", None, how)
    wanted = sorted({settings.kv_codec, *codecs} - {"raw"})
    if wanted and model.tokenizer is not None:
        yield from _codecs(model, wanted, settings.kv_codec)
    rate = _prefill_rate(model)
    yield Finding("full prefill rate", None, f"{rate:,.0f} tokens/s at {_BENCH_TOKENS} tokens")
    per_token = model.layout.layers * model.layout.layer_bytes(1)
    even = rate * per_token / 1e9
    yield Finding("KV size", None, f"{per_token / 1024:.0f} KiB a token")
    paying: list[str] = []
    losing: list[str] = []
    for name, found in _tier_rates(model, settings):
        if isinstance(found, StoreError):
            yield Finding(f"{name} tier", False, str(found))
            continue
        (paying if found > even else losing).append(name)
        yield Finding(f"{name} tier", None, f"reads {found:.2f} GB/s; break-even is {even:.3f} GB/s")
    verdict = f"yes, from {' and '.join(paying)}" if paying else "no: computing a chunk is faster than loading it"
    if paying and losing:
        verdict += f"; from {' and '.join(losing)} loading is slower than computing"
    yield Finding("does reuse pay on this machine?", None, verdict)


def _identities(model: Model) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, model.vocab_size, (count,), generator=generator).tolist())

    prefix, suffix = draw(16), draw(24)
    chunks = [Chunk(f"{index:064x}", draw(_TOKENS - 8 * index)) for index in range(_CHUNKS)]
    prefixes = PrefixCache(model)
    store = TieredStore([MemoryStore(1 << 40)])
    source = ChunkSource(store, partial(encode_chunk, model, prefixes, prefix))
    parts = tuple(Part(draw(3), chunk) for chunk in chunks)

    def prefill(name: str, ratio: float) -> Prefill:
        strategy = STRATEGIES[name](ratio=ratio)
        request = GenerateRequest("doctor", prefix, parts, suffix, strategy, Sampling(max_tokens=1))
        return Prefill(model, source, prefixes, request)

    def logits(name: str, ratio: float) -> Tensor:
        started = prefill(name, ratio)
        return run_steps(started.request.strategy.prefill(started))

    try:
        full, naive = logits("full", 1.0), logits("naive", 0.0)
        scale = float(full.abs().max()) if model.dtype != torch.float32 else 1.0
        bound = _TOLERANCE[model.dtype] * scale
        yield _close("full is the plain model", full, model.plain_logits(prefill("full", 1.0).layout.ids), bound)
        whole = logits("prophetkv", 1.0)
        yield _close("ratio 1 is the full prefill", whole, full, bound)
        yield _close("ratio 0 is naive reuse", logits("prophetkv", 0.0), naive, bound)
        apart, noise = float((naive - full).abs().max()), float((whole - full).abs().max())
        detail = f"naive and full differ by {apart:.3g}, ratio 1 and full by {noise:.2g}"
        yield Finding("the two can be told apart", apart > 3 * noise, detail)
        spoiled = prefill("prophetkv", 1.0)
        run_steps(spoiled.assemble())
        layout = spoiled.layout
        spoiled.slots.data[:, :, :, layout.prefix : len(layout)] = torch.nan  # whatever stays of it reaches the logits
        context = torch.arange(len(layout.context))
        yield _close("no slot stays stale", run_steps(spoiled.recompute(context)), full, bound)
        yield from _rotations(model, chunks[0])
        yield _codec(model, chunks[0], run_steps(source.load(chunks[0])).kv)
    finally:
        store.close()


def _close(what: str, found: Tensor, expected: Tensor, bound: float) -> Finding:
    error = float((found - expected).abs().max())
    return Finding(what, error <= bound, f"largest logit error {error:.2g}, bound {bound:.2g}")


def _rotations(model: Model, chunk: Chunk) -> Iterator[Finding]:
    """Keys have no position once turned back: for one layer of each kind, since kinds may have angles of their own."""
    bound = 1e-3 if model.dtype == torch.float32 else 0.05
    first = {model.kind(layer): layer for layer in reversed(range(model.layout.layers))}
    for kind, layer in sorted(first.items(), key=lambda item: item[1]):
        near, far = (_turned_back(model, chunk, layer, start) for start in (4, 404))
        error = float((near - far).abs().max() / near.abs().max())
        what = f"rotation of {kind}" if len(first) > 1 else "rotation"
        detail = f"keys moved by 400 positions differ by {error:.2g}, bound {bound:.2g}"
        yield Finding(what, error <= bound, detail)


def _turned_back(model: Model, chunk: Chunk, layer: int, start: int) -> Tensor:
    """A layer's keys of the chunk at `start`, turned back to angle 0, fp32.

    The layer is given the embeddings, as if it were the first: no other token has changed them.
    """
    positions = torch.arange(start, start + len(chunk.token_ids))
    slots = model.new_slots(start + len(chunk.token_ids))
    rows = ForwardPass(model, token_tensor(chunk.token_ids), positions, slots)
    rows.layer = layer
    rows.write_kv()
    return model.rotation(-positions)(slots.data[layer, 0, :, start:], layer)


def _codec(model: Model, chunk: Chunk, kv: ChunkKV) -> Finding:
    stored = torch.frombuffer(bytearray(b"".join(entry.encode(chunk, kv))), dtype=torch.uint8)
    again = entry.decode(stored, chunk, kv.layout)
    same = torch.equal(kv.body, again.body)
    return Finding("codec round trip", same, "every byte is the same" if same else "bytes differ")


def _codecs(model: Model, codecs: Sequence[str], configured: str) -> Iterator[Finding]:
    """What lossy codecs cost; only the configured one can fail."""
    for found in certify(model, codecs):
        verdict = f"{found}: {'may' if found.passed else 'must not'} be used with this model"
        yield Finding(f"codec {found.codec}", found.passed if found.codec == configured else None, verdict)


def _prefill_rate(model: Model) -> float:
    """Tokens per second of a full prefill."""
    ids = tuple(torch.randint(0, model.vocab_size, (_BENCH_TOKENS,)).tolist())
    request = GenerateRequest("doctor", (), (), ids, STRATEGIES["full"](), Sampling(max_tokens=1))
    prefixes = PrefixCache(model)
    store = TieredStore([MemoryStore(0)])
    source = ChunkSource(store, partial(encode_chunk, model, prefixes, ()))
    best = 0.0
    for _ in range(2):
        start = time.perf_counter()
        run_steps(request.strategy.prefill(Prefill(model, source, prefixes, request)))
        best = max(best, _BENCH_TOKENS / (time.perf_counter() - start))
    store.close()
    return best


def _tier_rates(model: Model, settings: Settings) -> Iterator[tuple[str, float | StoreError]]:
    """GB/s at which each configured tier gives a chunk back, verified."""
    layout = replace(model.layout, codec=settings.kv_codec)
    shape = (2, layout.kv_heads, _BENCH_TOKENS, layout.head_dim)
    kv = ChunkKV.pack([torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.layers)], layout.codec)
    chunk = Chunk("d0c" + "0" * 61, (0,) * _BENCH_TOKENS)
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=settings.data_dir) as folder:
        tiers: list[KVStore] = [MemoryStore(1 << 40), DiskStore(Path(folder), layout, 1 << 40)]
        if settings.redis_url:
            tiers.append(RedisStore(settings.redis_url, layout, settings.redis_timeout_ms / 1000))
        target = model.new_slots(_BENCH_TOKENS)
        for tier in tiers:
            try:
                tier.put(chunk, kv)
                yield tier.name, max(_read_rate(tier, chunk, target.data) for _ in range(3))
                tier.delete([chunk.key])
            except StoreError as error:
                yield tier.name, error
            tier.close()


def _read_rate(tier: KVStore, chunk: Chunk, target: Tensor) -> float:
    start = time.perf_counter()
    found = tier.get(chunk)
    if found is None:
        raise StoreError(f"{tier.name} did not give back what it took")
    for layer in range(found.layout.layers):
        found.read_into(layer, target[layer, 0], target[layer, 1])
    return found.nbytes / (time.perf_counter() - start) / 1e9
