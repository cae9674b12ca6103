"""Figure 2: a question that takes two chunks to answer, a third that misleads, and what each method recomputes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.quality.evaluator import Evaluator
from benchmarks.quality.methods import Method
from benchmarks.quality.paper.plots import ShownToken
from benchmarks.quality.sample import Sample
from benchmarks.quality.tables import Cell, Table
from engine.forward import run_steps
from engine.model import text_decoder

RATIO = 0.2
_METHODS = ("epic", "cacheblend", "kvshare", "prophetkv")

_FIRST = "On Wednesdays Ingrid works in the workshop of Halloran, the organ builder, and stays there until Thursday."
_SECOND = "The workshop of Halloran stands in the town of Norbeck, in the street behind the old tannery."
_CONTEXT = (
    "Ingrid is a joiner who travels from one employer to the next and sleeps where she works. She likes cold mornings, "
    f"strong tea and long letters. {_FIRST} Her tools fit into one leather bag, which she never lends.\n\n",
    "Many people believe that Ingrid lives in Larkhaven. The fair of Larkhaven is famous for its carved toys, and on a "
    "Wednesday in May last year she sold some of hers there. The town of Larkhaven has thanked Ingrid in its paper, "
    "with a picture of her on the market square.\n\n",
    "Organ builders need dry rooms and patient neighbours. Most of them settle near a river, for the timber came by "
    f"boat in former times. {_SECOND} It has two floors, a tall door and a stove that is lit from October on.\n\n",
)

SAMPLE = Sample(
    suite="example",
    task="two_chunks",
    index=0,
    header="Answer the question from the text below.\n\n",
    context=_CONTEXT,
    question="In which town is Ingrid on Wednesdays? Answer with the name of the town only.",
    answer_prefix="",
    answers=("Norbeck",),
    max_tokens=16,
)


@torch.inference_mode()
def example(
    evaluator: Evaluator,
) -> tuple[Table, list[ShownToken], dict[str, Sequence[bool]], dict[str, str]]:
    """A row a token with its chunk, text, relevance, and 1 for each method that selects it; the tokens; by method which

    of them it selects, and its answer. `evaluator` must keep texts whole.
    """
    run = evaluator.start(SAMPLE)
    answers = {"full": run.full().answer}
    selected: dict[str, Sequence[bool]] = {}
    for name in _METHODS:
        method = Method(name, {"ratio": RATIO})
        answers[name] = run.measure(method).answer
        prefill = run.start(method.build(evaluator.model.layout.layers))
        run_steps(prefill.request.strategy.prefill(prefill))
        chosen = set(prefill.selected.tolist())
        selected[name] = [index in chosen for index in range(prefill.usage.context_tokens)]
    tokens = [token for text in _CONTEXT for token in _tokens(evaluator, text)]
    chunks = [number for number, text in enumerate(_CONTEXT, start=1) for _ in _tokens(evaluator, text)]
    marks = zip(*selected.values(), strict=True)
    rows: list[tuple[Cell, ...]] = [
        (number, token.text, int(token.relevant), *map(int, chosen))
        for number, token, chosen in zip(chunks, tokens, marks, strict=True)
    ]
    texts = {name: _text(evaluator, answer) for name, answer in answers.items()}
    return Table(("chunk", "token", "relevant", *_METHODS), tuple(rows)), tokens, selected, texts


def counts(table: Table) -> Table:
    """How many tokens each method selects, and how many of them are of the two sentences that matter."""
    marks = {name: table.columns.index(name) for name in ("relevant", *_METHODS)}
    relevant = sum(bool(row[marks["relevant"]]) for row in table.rows)
    rows = [
        (name, len(chosen), sum(bool(row[marks["relevant"]]) for row in chosen), relevant)
        for name in _METHODS
        for chosen in [[row for row in table.rows if row[marks[name]]]]
    ]
    return Table(("method", "selected", "of these relevant", "relevant in all"), tuple(rows))


def _tokens(evaluator: Evaluator, text: str) -> list[ShownToken]:
    spans = [(start, start + len(part)) for part in (_FIRST, _SECOND) if (start := text.find(part)) >= 0]
    return [
        ShownToken(text[start:end], any(first < end and start < last for first, last in spans))
        for start, end in evaluator.builder.encode(text)[1]
    ]


def _text(evaluator: Evaluator, answer: Sequence[int]) -> str:
    return " ".join("".join(map(text_decoder(evaluator.model.tokenizer), answer)).split())
