"""From logits to tokens: sampling and the decode loop."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch
from torch import Tensor

from cache_store.base import Pause
from engine.base import Event, Finished, Sampling, Token
from engine.forward import Steps
from errors import NumericalFault

EventSteps = Generator[Event | Pause, None, None]


def decode(
    sampling: Sampling, eos_ids: frozenset[int], logits: Tensor, advance: Callable[[int, int], Steps]
) -> EventSteps:
    """Yields `Token`s and `Finished`. `advance(token, index)` computes the logits behind the answer's token `index`."""
    sampler = Sampler(sampling)
    for index in range(sampling.max_tokens):
        token = sampler(logits)
        if token in eos_ids:
            yield Finished("stop")
            return
        yield Token(token)
        if index + 1 < sampling.max_tokens:
            logits = finite((yield from advance(token, index)))
    yield Finished("length")


def finite(logits: Tensor) -> Tensor:
    """The same logits. Raises NumericalFault when some are NaN or infinite."""
    # One sum instead of a mask of the vocabulary's size: NaN and infinity survive it.
    if not bool(torch.isfinite(logits.sum())):
        raise NumericalFault("the model gives NaN or infinite logits")
    return logits


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
