"""A model for which reuse is not proven: transformers runs it as it is, and every answer is a full prefill."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from engine.base import GenerateRequest, Prefilled, Usage
from engine.costs import LinearCost
from engine.decode import EventSteps, decode, finite
from engine.forward import Steps
from errors import UnsupportedModel


class PlainModel:
    """A causal language model of any family that keeps a KV cache. `refused` says why its KV is not reused.

    A pass is one step: an abort takes effect between passes, not between layers.
    """

    def __init__(self, module: Any, tokenizer: Any, fingerprint: str, eos_ids: frozenset[int], refused: str) -> None:
        """Raises UnsupportedModel for a model that gives back no KV cache to go on from."""
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.eos_ids = eos_ids
        self.refused = refused
        self.device: torch.device = module.device
        self.dtype: torch.dtype = module.dtype
        self.window: int = getattr(module.config, "max_position_embeddings", None) or 1 << 20
        self.vocab_size: int = module.config.vocab_size
        self.layers: int = getattr(module.config, "num_hidden_layers", None) or 0
        self._module = module
        self._token_cost = LinearCost((2e-11 * sum(parameter.numel() for parameter in module.parameters()),))
        with torch.inference_mode():
            if getattr(self._forward([0], None)[1], "get_seq_length", None) is None:
                raise UnsupportedModel(f"{refused}; nor can it be served plainly, for it gives no KV cache")

    def generate(self, request: GenerateRequest) -> EventSteps:
        """As engine.generate.generate: `Prefilled`, then `Token`s and `Finished`."""
        ids, context = list(request.prefix), 0
        for part in request.parts:
            ids += [*part.glue, *part.chunk.token_ids]
            context += len(part.chunk.token_ids)
        ids += request.suffix
        yield None
        start = time.perf_counter()
        logits, cache = self._forward(ids, None)
        spent = (time.perf_counter() - start) * 1000
        self._token_cost.observe((len(ids),), spent / 1000)
        usage = Usage(len(ids), context, context, strategy="full", ratio=1.0)
        yield Prefilled(usage, {"stage2": spent}, self._token_cost.predict((len(ids),)) * 1000)

        def advance(token: int, _: int) -> Steps:
            yield None
            return self._forward([token], cache)[0]

        yield from decode(request.sampling, self.eos_ids, finite(logits), advance)

    def _forward(self, ids: list[int], cache: Any) -> tuple[Tensor, Any]:
        """The last row's logits, fp32 [vocab], and the cache to go on with."""
        batch = torch.tensor([ids], device=self.device)
        out = self._module(batch, use_cache=True, **({"cache": cache} if cache is not None else {}))
        return out.logits[0, -1].float(), getattr(out, "cache", None)
