"""A sample as the engine takes it: constant prefix, chunks, suffix, all tokenised on their own; and the gold answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.quality import suites
from benchmarks.quality.sample import Sample, segments
from cache_store.base import Chunk
from cache_store.keys import tokens_digest
from engine.base import GenerateRequest, Part, Sampling
from engine.model import Model, text_encoder
from engine.strategies import Strategy
from errors import PromptTooLong
from service.prompt import chat_frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids in prompt order. question: where its own words stand in the suffix; gold: the answer hoped for.

    settled: whether an answer may end with this text, as its score cannot change any more.
    """

    prefix: tuple[int, ...]
    parts: tuple[Part, ...]
    suffix: tuple[int, ...]
    question: tuple[int, int]
    max_tokens: int
    gold: tuple[int, ...]
    settled: Callable[[str], bool]

    def request(self, strategy: Strategy) -> GenerateRequest:
        """What the engine is asked; its slots have room for the longest answer and for the gold one."""
        sampling = Sampling(max_tokens=max(self.max_tokens, len(self.gold)))
        return GenerateRequest("eval", self.prefix, self.parts, self.suffix, strategy, sampling, self.question)

    def without_context(self) -> Prompt:
        """The same question with nothing to answer it from."""
        return replace(self, parts=())


class PromptBuilder:
    """Makes prompts for one model. Where a sample wants no chat template, only its opening token is put before it."""

    def __init__(self, model: Model) -> None:
        """Raises UnsupportedModel when the tokenizer has no usable chat template."""
        self._window = model.window
        self.encode = text_encoder(model.tokenizer)
        self._chat = chat_frame(model.tokenizer, None)
        bos = model.tokenizer.bos_token_id
        opening = bos is not None and model.tokenizer("").input_ids[:1] == [bos]
        self._plain: tuple[tuple[int, ...], tuple[int, ...]] = ((bos,) if opening else (), ())

    @property
    def overhead(self) -> int:
        """Tokens that the chat template adds."""
        return sum(map(len, self._chat))

    def __call__(self, sample: Sample, chunk_tokens: int | None) -> Prompt:
        """The prompt with chunks of at most `chunk_tokens` tokens; None: each context text is one chunk.

        Raises PromptTooLong when prompt and longest answer exceed the model's window.
        """
        head, tail = self._chat if sample.chat else self._plain
        question = self._ids(sample.question)
        prompt = Prompt(
            prefix=(*head, *self._ids(sample.header)),
            parts=self._parts(sample, chunk_tokens),
            suffix=(*question, *tail, *self._ids(sample.answer_prefix)),
            question=(0, len(question)),
            max_tokens=sample.max_tokens,
            gold=self._ids(suites.gold(sample))[: sample.max_tokens],
            settled=partial(suites.settled, sample),
        )
        tokens = sum(len(part.glue) + len(part.chunk.token_ids) for part in prompt.parts)
        tokens += len(prompt.prefix) + len(prompt.suffix) + sample.max_tokens
        if tokens > self._window:
            raise PromptTooLong(
                f"{sample.suite} {sample.task} {sample.index} with its longest answer has {tokens} tokens; "
                f"the model's window is {self._window}"
            )
        return prompt

    def _parts(self, sample: Sample, chunk_tokens: int | None) -> tuple[Part, ...]:
        separator = self._ids(suites.separator(sample))
        parts: list[Part] = []
        for text in sample.context:
            glue = separator if parts else ()
            for ids in segments([text], self.encode, chunk_tokens):
                parts.append(Part(glue, Chunk(tokens_digest(ids), ids)))
                glue = ()
        return tuple(parts)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode(text)[0]) if text else ()
