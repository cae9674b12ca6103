"""A whole request as one generator: prefill by its strategy, then tokens. What drives it may stop at any yield."""

from __future__ import annotations

import torch

from cache_store.base import KVSource
from engine.base import Encoded, EncodeRequest, GenerateRequest, Prefilled
from engine.controller import Controller
from engine.decode import EventSteps, decode, finite
from engine.encode import PrefixCache
from engine.forward import ForwardPass, Steps
from engine.model import Model, token_tensor
from engine.prefill import Prefill
from engine.strategies.full import Full
from errors import NumericalFault


def generate(
    model: Model,
    source: KVSource,
    prefixes: PrefixCache,
    request: GenerateRequest,
    controller: Controller | None = None,
) -> EventSteps:
    """Yields a Pause between layers and chunks, `Prefilled` before the first token, then `Token`s and `Finished`.

    Raises NumericalFault when the model gives no finite logits. When a strategy that reuses KV gives none, the request
    is answered by a full prefill and says so.
    """
    prefill = Prefill(model, source, prefixes, request, controller)
    try:
        logits = finite((yield from prefill.clocked(request.strategy.prefill(prefill))))
    except NumericalFault as fault:
        if not request.strategy.reuses:
            raise
        prefill.fall_back(str(fault))
        logits = finite((yield from prefill.clocked(Full().prefill(prefill))))
    yield _prefilled(prefill)

    def advance(token: int, index: int) -> Steps:
        position = torch.tensor([len(prefill.layout) + index])
        return ForwardPass(model, token_tensor([token]), position, prefill.slots).finish()

    yield from decode(request.sampling, model.eos_ids, logits, advance)


def encode(source: KVSource, request: EncodeRequest) -> EventSteps:
    """Yields an `Encoded` a chunk, None between layers."""
    for chunk in request.chunks:
        loaded = yield from source.load(chunk)
        yield Encoded(loaded.tier)


def _prefilled(prefill: Prefill) -> Prefilled:
    controller, full = prefill.controller, prefill.model.full_work(len(prefill.layout))
    decision = prefill.usage.decision
    controller.observe(prefill.usage.work, prefill.device_seconds(), decision is not None and decision.trial)
    return Prefilled(prefill.usage, dict(prefill.timings), controller.predict(full) * 1000)
