"""ProphetKV (arXiv 2602.02579): the question's attention over imprecise KV tells which context tokens to recompute."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor
from torch.nn import functional

from engine.forward import Steps
from engine.prefill import Prefill
from engine.strategies.base import SelectiveStrategy, top_tokens


class ProphetKV(SelectiveStrategy):
    """Stage I scores all context tokens, the best `ratio` of them are selected, Stage II recomputes just these."""

    name: ClassVar[str] = "prophetkv"

    score_layers: Literal["all", "first_half"] | list[int] = Field(
        "all", description="layers whose attention is averaged; Stage I ends with the last of them"
    )
    score_rows: Literal["suffix", "question", "last"] = Field(
        "suffix", description="rows whose attention is summed: all after the context, the question's own, or the last"
    )
    smooth: int = Field(
        1, ge=1, le=255, description="odd width of an average over neighbouring scores within a chunk; 1 is the paper"
    )

    @field_validator("smooth")
    @classmethod
    def _odd(cls, width: int) -> int:
        if width % 2 == 0:
            raise ValueError("smooth must be odd: as many neighbours before a token as behind it")
        return width

    def check(self, layers: int) -> None:
        """See Strategy.check."""
        if isinstance(self.score_layers, list) and not (
            self.score_layers and all(0 <= layer < layers for layer in self.score_layers)
        ):
            raise ValueError(f"score_layers must name some of the layers 0 to {layers - 1}")

    def select(self, prefill: Prefill, budget: int) -> Steps:
        """See SelectiveStrategy.select."""
        layout = prefill.layout
        with prefill.timed("stage1"):
            scores = yield from prefill.probe(self._layers(prefill.model.layout.layers), self._rows(prefill))
        with prefill.timed("select"):
            return top_tokens(smoothed(scores.cpu(), layout.chunk_lengths, self.smooth), budget)

    def _layers(self, layers: int) -> list[int]:
        if isinstance(self.score_layers, list):
            return sorted(set(self.score_layers))
        return list(range(layers if self.score_layers == "all" else (layers + 1) // 2))

    def _rows(self, prefill: Prefill) -> Tensor:
        layout = prefill.layout
        if self.score_rows == "last":
            return layout.suffix[-1:]
        if self.score_rows == "question" and len(layout.question):
            return layout.question
        return layout.suffix


def smoothed(scores: Tensor, lengths: list[int], width: int) -> Tensor:
    """Each score as the mean of the `width` scores around it, as far as they are of the same chunk.

    scores: fp32 [sum of lengths].
    """
    if width == 1:
        return scores
    means = [
        functional.avg_pool1d(part[None], width, stride=1, padding=width // 2, count_include_pad=False)[0]
        for part in torch.split(scores, lengths)
        if len(part)
    ]
    return torch.cat(means)
