"""Rows on their way through a model's layers: what every strategy is made of.

The layers are those of transformers; the loop over them is ours, so rows may shrink between layers, a layer's K and V
can be had without its attention and MLP, and the caller gets control between layers. Two seams carry it: a `Step`
passes as the layer's cache (it scatters K and V into the request's slots), and one registered attention function
computes from there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from cache_store.base import Pause
from engine.attention import QueryRows, add_column_sums, attend
from engine.base import Work
from engine.slots import Slots

if TYPE_CHECKING:
    from engine.model import Model

T = TypeVar("T")
Ready = Callable[[int], Generator[Pause, None, None]]
Steps = Generator[Pause, None, Tensor]
Angles = dict[str, tuple[Tensor, Tensor]]


def run_steps(steps: Generator[object, None, T]) -> T:
    """Drives a generator to its end, here and now."""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]


class _Enough(Exception):
    """Leaves a layer early, when what the pass wants of it is there."""


@dataclass(slots=True)
class Scores:
    """An accumulator of attention weights: what each key receives from the scoring rows, by KV head."""

    sums: Tensor  # fp32 [kv_heads, keys]; keys behind its end are not counted
    rows: QueryRows
    chosen: slice  # where `rows` are among the rows of the pass


@dataclass(slots=True)
class Step:
    """One layer's turn. transformers calls `update` as it would a cache's."""

    rows: QueryRows
    slots: Slots
    scores: Scores | None = None
    kv_only: bool = False
    attention_only: bool = False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Scatters the rows' K (after RoPE) and V into the slots; returns the layer's slots to attend over."""
        self.slots.write(layer_idx, self.rows, key, value)
        if self.kv_only:
            raise _Enough
        return self.slots.read(layer_idx)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    step: Step,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: query [1, heads, rows, head_dim] over all slots.

    Returns [1, rows, heads, head_dim].
    """
    out, lse = attend(query, key, value, step.rows, scaling, sliding_window, softcap)
    if step.scores is not None:
        scores, chosen = step.scores, step.scores.chosen
        add_column_sums(
            query[:, :, chosen], key, lse[:, :, chosen], scores.rows, scaling, scores.sums, sliding_window, softcap
        )
    if step.attention_only:
        raise _Enough
    return out.transpose(1, 2), None


class ForwardPass:
    """Some rows of a prompt, between two layers. `layer` is the next one; `work` counts what was done."""

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        positions: Tensor,
        slots: Slots,
        work: Work | None = None,
        ready: Ready | None = None,
    ) -> None:
        """ids, positions: int64 [rows] on the CPU; positions strictly increase.

        `ready` waits until a layer's slots hold what the rows are to see; those of layer 0 do already.
        """
        self.model = model
        self.slots = slots
        self.rows = model.rows(positions)
        self.layer = 0
        self.work = work if work is not None else Work()
        self._ready = ready
        self._hidden, self._angles = model.embed(ids, self.rows)

    def run(self, stop: int, scores: Scores | None = None) -> Generator[Pause, None, None]:
        """Takes all rows through the layers before `stop`; yields after each."""
        while self.layer < stop:
            self._hidden = self._call(Step(self.rows, self.slots, scores))
            self.layer += 1
            yield None
            if self._ready is not None and self.layer < self.model.layout.layers:
                yield from self._ready(self.layer)

    def write_kv(self) -> None:
        """Leaves the rows' K and V of this layer in the slots; the rows stay before the layer."""
        self.work.add_kv(len(self.rows))
        self._leave_early(Step(self.rows, self.slots, kv_only=True))

    def score(self, scores: Scores) -> None:
        """The same, and adds the layer's attention weights to `scores`."""
        self.work.add_kv(len(self.rows), self.rows.pairs)
        self._leave_early(Step(self.rows, self.slots, scores, attention_only=True))

    def keep(self, index: Tensor) -> None:
        """Goes on with some of the rows only. index: int64 on the CPU, ascending."""
        self.rows = self.model.rows(self.rows.host_positions[index])
        index = index.to(self._hidden.device)
        self._hidden = self._hidden[:, index]
        self._angles = {kind: (cos[:, index], sin[:, index]) for kind, (cos, sin) in self._angles.items()}

    def finish(self) -> Steps:
        """Takes the rows through the remaining layers and returns the last row's logits, fp32 [vocab].

        In the last layer every row leaves its K and V, but only the last row goes on.
        """
        last = self.model.layout.layers - 1
        yield from self.run(last)
        if len(self.rows) > 1:
            self.write_kv()
            self.keep(torch.tensor([len(self.rows) - 1]))
        yield from self.run(last + 1)
        return self.model.logits(self._hidden[0, -1])

    def finish_all(self) -> Steps:
        """Takes all rows through the remaining layers and returns the logits of each, fp32 [rows, vocab]."""
        yield from self.run(self.model.layout.layers)
        return self.model.logits(self._hidden[0])

    def _call(self, step: Step) -> Tensor:
        if not (step.kv_only or step.attention_only):
            self.work.add(len(self.rows), self.rows.pairs, self.rows.causal)
        if step.scores is not None:
            self.work.scored += step.scores.rows.pairs
        return self.model.run_layer(self.layer, self._hidden, self._angles, step)

    def _leave_early(self, step: Step) -> None:
        try:
            self._call(step)
        except _Enough:
            return
        raise AssertionError("the layer did not ask its cache or the attention function")
