"""The start-up measurement: what rows, attention pairs and bytes cost on this device and in these tiers."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch

from cache_store.base import Chunk, ChunkKV, HeldChunks, KVLayout, KVStore
from cache_store.keys import digest_fields
from engine.base import GenerateRequest, Part, Sampling, Work
from engine.controller import Controller
from engine.encode import PrefixCache, encode_chunk
from engine.forward import run_steps
from engine.model import Model
from engine.prefill import Prefill
from engine.strategies.full import Full
from engine.strategies.prophetkv import ProphetKV
from errors import StoreError, StoreUnavailable

log = logging.getLogger(__name__)

_TOKENS = (64, 256, 1024)  # of context, in two chunks
_SUFFIX = 16
_ENOUGH_SECONDS = 0.05  # once a full prefill takes longer, larger ones are left out
_ENTRY_TOKENS = (16, 256)


@torch.inference_mode()
def calibrate(model: Model, prefixes: PrefixCache, prefix: tuple[int, ...], controller: Controller) -> None:
    """Measures the device with a few short prefills behind `prefix`."""
    samples: list[tuple[Work, float]] = []
    for tokens in _TOKENS:
        if len(prefix) + tokens + _SUFFIX > model.window:
            break
        # Twice, for the first time warms the device up, and the less disturbed of the two counts.
        once, again = (list(_measure(model, prefixes, prefix, tokens)) for _ in range(2))
        samples += [(work, min(seconds, other)) for (work, seconds), (_, other) in zip(once, again, strict=True)]
        if samples[-1][1] > _ENOUGH_SECONDS:
            break
    controller.compute.learn((controller.amounts(work), seconds) for work, seconds in samples)


def _measure(model: Model, prefixes: PrefixCache, prefix: tuple[int, ...], tokens: int) -> Iterator[tuple[Work, float]]:
    """What was done and in how many seconds: two chunks encoded, then ProphetKV and last a full prefill over them."""
    generator = torch.Generator().manual_seed(tokens)
    drawn = tuple(torch.randint(0, model.vocab_size, (tokens + _SUFFIX,), generator=generator).tolist())
    half = tokens // 2
    parts = tuple(Part((), Chunk(f"{at:064x}", drawn[at : at + half])) for at in (0, half))
    run_steps(prefixes.copy_into(prefix, model.new_slots(len(prefix))))
    source = HeldChunks({})
    for part in parts:
        work, start = Work(), time.perf_counter()
        source.chunks[part.chunk.key] = run_steps(encode_chunk(model, prefixes, prefix, part.chunk, work=work))
        yield work, time.perf_counter() - start
    for strategy in (ProphetKV(), Full()):
        request = GenerateRequest("calibration", prefix, parts, drawn[tokens:], strategy, Sampling(max_tokens=1))
        prefill = Prefill(model, source, prefixes, request)
        run_steps(strategy.prefill(prefill))
        yield prefill.usage.work, prefill.device_seconds()


def calibrate_tiers(tiers: Sequence[KVStore], layout: KVLayout, controller: Controller) -> None:
    """Writes and reads a small entry in every tier, and a larger one where that was quick; leaves nothing behind.

    A full tier evicts for them what it would evict for the next chunk. One that fails now keeps its first guess, until
    it gives something.
    """
    for tier in tiers:
        samples: list[tuple[tuple[float, float], float]] = []
        try:
            for tokens in _ENTRY_TOKENS:
                shape = (2, layout.kv_heads, tokens, layout.head_dim)
                kv = ChunkKV.pack([torch.zeros(shape, dtype=layout.dtype) for _ in range(layout.layers)], layout.codec)
                chunk = Chunk(digest_fields("calibration", str(tokens)), (0,) * tokens)
                tier.put(chunk, kv)
                try:
                    if tier.holds([chunk]) == [False]:
                        break  # there is no room for it
                    for _ in range(2):  # the second finds code and connection warm
                        start = time.perf_counter()
                        if tier.get(chunk) is None:
                            raise StoreUnavailable(f"{tier.name} tier: does not give back what it took")
                        seconds = time.perf_counter() - start
                        if seconds > _ENOUGH_SECONDS:
                            break
                    samples.append(((1, kv.nbytes), seconds))
                finally:
                    tier.delete([chunk.key])
                if seconds > _ENOUGH_SECONDS:
                    break
        except StoreError as error:
            log.warning("kv tier could not be measured: %s", error)
        controller.reads[tier.name].learn(samples)
    controller.observe_reads()
