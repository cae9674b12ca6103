"""One prompt of any suite, with what a right answer holds; and how its context becomes the chunks that are reused."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from errors import InvalidInput
from retriever.chunking import chunk_document
from retriever.documents import ParsedDocument, TextEncoder

# The paper's segment, in tokens (ProphetKV, section 5.1).
SEGMENT_TOKENS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt in the order in which the model reads it, its answers, and the length an answer may have.

    suite: with the length where it has several, as in ruler-4096; header: instructions before the context, the same for
    all samples of a task and seed, so that they can be part of the constant prefix P; context: the texts that are cut
    into chunks, each beginning a new one; question: all that follows the context; answer_prefix: the words that open
    the answer, to stand behind the chat template's tail; max_tokens: the published limit of generated tokens; chat:
    False where the publication leaves the chat template out; classes: what a classification chooses from; group: a part
    of the task that reports also show by itself.
    """

    suite: str
    task: str
    index: int
    header: str
    context: tuple[str, ...]
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    max_tokens: int
    chat: bool = True
    classes: tuple[str, ...] = ()
    group: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over every field: two samples with the same digest are the same prompt, scored the same way."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def segments(texts: Iterable[str], encode: TextEncoder, size: int | None = SEGMENT_TOKENS) -> list[tuple[int, ...]]:
    """Token ids of the chunks that hold `texts`, in order and without loss, each of at most `size` tokens.

    A chunk ends where a paragraph, line or sentence does if it can: the service's own rule. `size` None keeps every
    text whole, for passages that come cut (MuSiQue).
    """
    chunks: list[tuple[int, ...]] = []
    for text in texts:
        if size is None:
            chunks.append(tuple(encode(text)[0]))
        else:
            chunks += [chunk.token_ids for chunk in chunk_document(ParsedDocument(text), encode, size)]
    return [chunk for chunk in chunks if chunk]


def choose(count: int, available: int, seed: int) -> list[int]:
    """`count` of the indices below `available`, in an order that `seed` decides: fewer are always the first of more.

    Raises InvalidInput when nothing is asked for. More than there are is all of them.
    """
    if count < 1:
        raise InvalidInput(f"{count} samples asked for; at least one is needed", field="samples")
    order = list(range(available))
    random.Random(f"choose:{seed}").shuffle(order)
    return order[:count]
