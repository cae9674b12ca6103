"""A whole request as one generator: prefill by its strategy, then tokens. What drives it may stop at any yield."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from cache_store.base import KVSource
from engine.base import Encoded, EncodeRequest, Event, Finished, GenerateRequest, Prefilled, Sampling, Token
from engine.encode import PrefixCache
from engine.model import Model, Step, token_tensor
from engine.prefill import Prefill
from engine.strategies import STRATEGIES

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
    """Yields None between layers and chunks, `Prefilled` before the first token, then `Token`s and `Finished`."""
    prefill = Prefill(model, source, prefixes, request)
    logits = yield from STRATEGIES[request.strategy.name](prefill)
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
            step = Step(model.rows(torch.tensor([position + index])), prefill.slots)
            logits = yield from model.forward(token_tensor([token]), step)
    yield Finished("length")


def encode(source: KVSource, request: EncodeRequest) -> EventSteps:
    """Yields an `Encoded` a chunk, None between layers."""
    for chunk in request.chunks:
        loaded = yield from source.load(chunk)
        yield Encoded(loaded.tier)


def _prefilled(model: Model, throughput: Throughput, prefill: Prefill) -> Prefilled:
    usage, prompt = prefill.usage, len(prefill.layout)
    spent = prefill.timings.get("stage1", 0.0) + prefill.timings.get("stage2", 0.0)
    throughput.observe(model.flops(usage.rows, usage.attention_pairs), spent)
    predicted = throughput.predict_ms(model.flops(prompt, prompt * (prompt + 1) // 2))
    return Prefilled(usage, dict(prefill.timings), predicted)


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
        chances = torch.softmax(logits.cpu() / self._sampling.temperature, dim=-1)
        chances, order = chances.sort(descending=True)
        # A token stays when the mass before it is below top_p: the first always does.
        chances[chances.cumsum(0) - chances >= self._sampling.top_p] = 0.0
        return int(order[torch.multinomial(chances, 1, generator=self._generator)])
