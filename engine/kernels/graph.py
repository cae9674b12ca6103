"""The decode step of one request as a CUDA graph: one launch a token instead of some five hundred."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.forward import Step
from engine.model import Model
from engine.slots import Slots


class DecodeGraph:
    """Decodes from one request's slots. Token and position are device buffers, so the work is the same at each step."""

    def __init__(self, model: Model, slots: Slots) -> None:
        self._model = model
        self._token = torch.zeros(1, dtype=torch.int64, device=model.device)
        self._rows = model.rows(torch.tensor([slots.capacity - 1]))  # as many keys as there can be
        self._rows.contiguous = False  # where the row stands is known on the device only
        self._step = Step(self._rows, slots)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits: Tensor

    def __call__(self, token: int, position: int) -> Tensor:
        """Runs `token` at `position`: the next row's logits, fp32 [vocab], valid until the next call."""
        self._token.fill_(token)
        self._rows.positions.fill_(position)
        if self._graph is not None:
            self._graph.replay()
        elif self._model.device.type == "cuda":
            self._capture()
        else:
            self._logits = self._run()  # a reference for tests
        return self._logits

    def _capture(self) -> None:
        """Runs the step once, to compile and load what a recording may not; then records it and runs the record."""
        self._run()
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the service may use the device meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._logits = self._run()
        graph.replay()
        self._graph = graph

    def _run(self) -> Tensor:
        hidden, angles = self._model.embed(self._token, self._rows)
        for layer in range(self._model.layout.layers):
            hidden = self._model.run_layer(layer, hidden, angles, self._step)
        return self._model.logits(hidden[0, -1])
