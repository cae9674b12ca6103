"""A whole request as one generator: prefill by its strategy, then tokens. What drives it may stop at any yield."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from cache_store.base import KVSource
from engine.base import Encoded, EncodeRequest, Event, Finished, GenerateRequest, Prefilled, Sampling, Token
from engine.encode import PrefixCache
from engine.forward import ForwardPass
from engine.model import Model, token_tensor
from engine.prefill import Prefill
from engine.strategies.full import Full
from errors import NumericalFault

EventSteps = Generator[Event | None, None, None]


class Throughput:
    """Running estimate of the device's prefill speed, in floating point operations per millisecond."""

    def __init__(self) -> None:
        self._rate = 0.0

    def observe(self, flops: int, milliseconds: float) -> None:
        """Takes a measurement into the average; short passes say nothing and are left out."""
        if milliseconds < 1.0:
            return
        rate = flops / milliseconds
        self._rate = rate if self._rate == 0.0 else 0.8 * self._rate + 0.2 * rate

    def predict_ms(self, flops: int) -> float:
        """0.0 while nothing was observed."""
        return flops / self._rate if self._rate else 0.0


def generate(
    model: Model, source: KVSource, prefixes: PrefixCache, throughput: Throughput, request: GenerateRequest
) -> EventSteps:
    """Yields None between layers and chunks, `Prefilled` before the first token, then `Token`s and `Finished`.

    Raises NumericalFault when the model gives no finite logits. When a strategy that reuses KV gives none, the request
    is answered by a full prefill and says so.
    """
    prefill = Prefill(model, source, prefixes, request)
    try:
        logits = _finite((yield from request.strategy.prefill(prefill)))
    except NumericalFault as fault:
        if not request.strategy.reuses:
            raise
        prefill.fall_back(str(fault))
        logits = _finite((yield from Full().prefill(prefill)))
    yield _prefilled(model, throughput, prefill)
    sampler = Sampler(request.sampling)
    position = len(prefill.layout)
    for index in range(request.sampling.max_tokens):
        token = sampler(logits)
        if token in model.eos_ids:
            yield Finished("stop")
            return
        yield Token(token)
        if index + 1 < request.sampling.max_tokens:
            run = ForwardPass(model, token_tensor([token]), torch.tensor([position + index]), prefill.slots)
            logits = _finite((yield from run.finish()))
    yield Finished("length")


def _finite(logits: Tensor) -> Tensor:
    # One sum instead of a mask of the vocabulary's size: NaN and infinity survive it.
    if not bool(torch.isfinite(logits.sum())):
        raise NumericalFault("the model gives NaN or infinite logits")
    return logits


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


class Sampler:
    """Draws token ids from logits:

    greedy at temperature 0, else from the smallest set that holds `top_p` of the mass.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: Tensor) -> int:
        """`logits`: fp32 [vocab]."""
        if self._sampling.temperature == 0.0:
            return int(logits.argmax())
        # In fp64 and from the maximum: no temperature above 0 overflows.
        logits = logits.cpu().double()
        chances = torch.softmax((logits - logits.max()) / self._sampling.temperature, dim=-1)
        chances, order = chances.sort(descending=True)
        # A token stays when the mass before it is below top_p: the first always does.
        chances[chances.cumsum(0) - chances >= self._sampling.top_p] = 0.0
        return int(order[torch.multinomial(chances, 1, generator=self._generator)])
