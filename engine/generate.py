"""A whole request as one generator: prefill by its strategy, then tokens. What drives it may stop at any yield."""

from __future__ import annotations

import torch

from cache_store.base import KVSource
from engine.base import Encoded, EncodeRequest, GenerateRequest, Prefilled
from engine.decode import EventSteps, Throughput, decode, finite
from engine.encode import PrefixCache
from engine.forward import ForwardPass, Steps
from engine.model import Model, token_tensor
from engine.prefill import Prefill
from engine.strategies.full import Full
from errors import NumericalFault


def generate(
    model: Model, source: KVSource, prefixes: PrefixCache, throughput: Throughput, request: GenerateRequest
) -> EventSteps:
    """Yields None between layers and chunks, `Prefilled` before the first token, then `Token`s and `Finished`.

    Raises NumericalFault when the model gives no finite logits. When a strategy that reuses KV gives none, the request
    is answered by a full prefill and says so.
    """
    prefill = Prefill(model, source, prefixes, request)
    try:
        logits = finite((yield from request.strategy.prefill(prefill)))
    except NumericalFault as fault:
        if not request.strategy.reuses:
            raise
        prefill.fall_back(str(fault))
        logits = finite((yield from Full().prefill(prefill)))
    yield _prefilled(model, throughput, prefill)

    def advance(token: int, index: int) -> Steps:
        position = torch.tensor([len(prefill.layout) + index])
        return ForwardPass(model, token_tensor([token]), position, prefill.slots).finish()

    yield from decode(request.sampling, model.eos_ids, logits, advance)


def encode(source: KVSource, request: EncodeRequest) -> EventSteps:
    """Yields an `Encoded` a chunk, None between layers."""
    for chunk in request.chunks:
        loaded = yield from source.load(chunk)
        yield Encoded(loaded.tier)


def _prefilled(model: Model, throughput: Throughput, prefill: Prefill) -> Prefilled:
    spent = prefill.timings.get("stage1", 0.0) + prefill.timings.get("stage2", 0.0)
    throughput.observe(model.flops(prefill.usage.work), spent)
    predicted = throughput.predict_ms(model.flops(model.full_work(len(prefill.layout))))
    return Prefilled(prefill.usage, dict(prefill.timings), predicted)
