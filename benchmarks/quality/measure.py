"""What methods do with one prompt: its chunks are encoded once, assembled once, and prefilled in full once.

Every method works on a copy of the assembled slots. What a method answers is what it would generate token by token,
but the tokens on which it agrees with full prefill go through the model at once, and so do guesses at what follows,
which differs by rounding alone.
Times are wall milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle, islice

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.quality.methods import FULL, NONE, Method
from benchmarks.quality.prompts import Prompt
from cache_store.base import Chunk, ChunkKV, HeldChunks, KVSource, LoadedChunk, Pause
from engine.decode import finite
from engine.encode import PrefixCache, encode_chunk
from engine.forward import ForwardPass, run_steps
from engine.model import Model, text_decoder, token_tensor
from engine.prefill import Prefill
from engine.slots import Slots
from engine.strategies import STRATEGIES, Strategy

# The phases of a prefill that a user waits for.
PHASES = ("load", "assemble", "stage1", "select", "stage2")
_RECALLED = 2  # tokens that must have stood together before, for a guess at what follows
_GUESSED = 6  # tokens that are guessed at a time
_ROWS = 64  # distributions over the vocabulary that are compared at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A method's answer, without the end token; see Record for kl, nll, tokens and timings.

    Of the timings, load and assemble are those of the prompt's one assembly, and ttft is the sum of the phases: what a
    request would wait for with its chunks in memory. prefill, decode, forced and encode (with the assembly) are what
    the harness spent.
    """

    answer: tuple[int, ...]
    kl: float | None
    nll: float | None
    tokens: dict[str, int]
    timings: dict[str, float]


@dataclass(frozen=True, slots=True)
class Reference:
    """Full prefill of a prompt, its answer with the end token if it came to one, and the logits that chose each token.

    logits: fp32 [answer, vocab], teacher-forced like those that they are compared with.
    """

    prefill: Prefill
    answer: tuple[int, ...]
    logits: Tensor


class PromptRun:
    """One prompt on one model. `full` goes first: the others are compared with it."""

    def __init__(self, model: Model, prefixes: PrefixCache, prompt: Prompt, codec: str = "raw") -> None:
        """`codec`: how chunk KV is written."""
        self.model = model
        self.prompt = prompt
        self.reference: Reference | None = None
        self._prefixes = prefixes
        self._codec = codec
        self._chunks: dict[str, ChunkKV] = {}
        self._assemblies: dict[str, _Assembled] = {}  # by codec
        self._unreported: dict[str, float] = {}  # what was spent for all methods: told with the next one

    def load(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """KVSource.load: a plain store in memory that all methods share."""
        if chunk.key in self._chunks:
            return LoadedChunk(self._chunks[chunk.key], "memory")
        kv = yield from encode_chunk(self.model, self._prefixes, self.prompt.prefix, chunk)
        self._chunks[chunk.key] = kv
        return LoadedChunk(kv, "computed")

    def prefetch(self, chunks: Sequence[Chunk]) -> object:
        """KVSource.prefetch: everything is in memory."""
        return None

    def compute(self, chunk: Chunk) -> Generator[Pause, None, LoadedChunk]:
        """KVSource.compute."""
        return (yield from self.load(chunk))

    def locate_many(self, chunks: Sequence[Chunk]) -> tuple[list[str | None], tuple[str, ...]]:
        """KVSource.locate_many."""
        return ["memory" if chunk.key in self._chunks else None for chunk in chunks], ()

    def start(self, strategy: Strategy, codec: str | None = None) -> Prefill:
        """A prefill of the prompt that copies the assembled slots instead of assembling anew. `codec`: see Method."""
        assembled = self._assembled(codec or self._codec) if strategy.reuses else None
        return _SharedPrefill(self, self._prefixes, self.prompt, strategy, assembled)

    def full(self) -> Measured:
        """Full prefill, with its greedy answer."""
        timings: dict[str, float] = {}
        prefill = self.start(STRATEGIES[FULL]())
        with _timed(self.model, timings, "prefill"):
            logits = finite(run_steps(prefill.request.strategy.prefill(prefill)))
        position = len(prefill.layout)
        with _timed(self.model, timings, "decode"):
            answer = self._greedy(prefill, logits, ())
        with _timed(self.model, timings, "forced"):
            forced = forced_logits(self.model, prefill.slots, position, logits, answer)
        self.reference = Reference(prefill, answer, forced)
        return self._measured(prefill, logits, answer, forced, timings)

    def measure(self, method: Method) -> Measured:
        """Any method. Without a reference, because full prefill failed, there is no divergence from it."""
        if method.strategy == FULL:
            return self.full()
        timings: dict[str, float] = {}
        strategy = method.build(self.model.layout.layers)
        if method.strategy == NONE:
            prompt = self.prompt.without_context()
            prefill: Prefill = _SharedPrefill(self, self._prefixes, prompt, strategy, None)
        else:
            prefill = self.start(strategy, method.codec)
        with _timed(self.model, timings, "prefill"):
            logits = finite(run_steps(strategy.prefill(prefill)))
        forced = None
        if self.reference is not None:
            with _timed(self.model, timings, "forced"):
                forced = forced_logits(self.model, prefill.slots, len(prefill.layout), logits, self.reference.answer)
        with _timed(self.model, timings, "decode"):
            answer = self._answer(prefill, logits, forced)
        return self._measured(prefill, logits, answer, forced, timings)

    def _answer(self, prefill: Prefill, logits: Tensor, forced: Tensor | None) -> tuple[int, ...]:
        """The greedy answer. As far as it agrees with full prefill's, the forced pass has computed it already."""
        if forced is None or self.reference is None:
            return self._greedy(prefill, logits, ())
        expected = self.reference.answer
        agreed = _shared_length(forced.argmax(-1).tolist(), expected)
        return expected if agreed == len(expected) else self._greedy(prefill, forced[agreed], expected[:agreed])

    def _greedy(self, prefill: Prefill, logits: Tensor, begun: Sequence[int]) -> tuple[int, ...]:
        """The answer that begins with `begun`, whose K and V are in the slots, and goes on with the likeliest tokens.

        logits: fp32 [vocab], which choose the next. It ends with a token that ends text, at the published limit, or
        when its score is settled. Answers copy much from the context and repeat themselves, so what followed the last
        tokens before goes through the model with them, and counts as far as it is what the model says.
        """
        decode = text_decoder(self.model.tokenizer)
        answer, text = list(begun), "".join(map(decode, begun))
        ids, rows = prefill.layout.ids.tolist() + answer, logits[None]
        guessed: list[int] = []
        while True:
            for row, guess in zip(rows, [*guessed, None], strict=True):
                token = int(finite(row).argmax())
                answer.append(token)
                if token in self.model.eos_ids or len(answer) == self.prompt.max_tokens:
                    return tuple(answer)
                text += decode(token)
                if self.prompt.settled(text):
                    return tuple(answer)
                ids.append(token)
                if token != guess:
                    break
            guessed = what_followed(ids)[: self.prompt.max_tokens - len(answer) - 1]
            at = torch.arange(len(ids) - 1, len(ids) + len(guessed))
            run = ForwardPass(self.model, token_tensor([ids[-1], *guessed]), at, prefill.slots)
            rows = run_steps(run.finish_all())

    def _measured(
        self,
        prefill: Prefill,
        logits: Tensor,
        answer: tuple[int, ...],
        forced: Tensor | None,
        timings: dict[str, float],
    ) -> Measured:
        with _timed(self.model, timings, "forced"):
            kl = None if forced is None or self.reference is None else divergence(self.reference.logits, forced)
            nll = None
            if gold := self.prompt.gold:
                position = len(prefill.layout)
                nll = surprise(forced_logits(self.model, prefill.slots, position, logits, gold), gold)
        phases = {phase: prefill.timings[phase] for phase in PHASES if phase in prefill.timings}
        timings |= {**phases, "ttft": sum(phases.values()), **self._unreported}
        self._unreported = {}
        usage = prefill.usage
        return Measured(
            answer=answer[:-1] if answer[-1] in self.model.eos_ids else answer,
            kl=kl,
            nll=nll,
            tokens={
                "prompt": usage.prompt_tokens,
                "context": usage.context_tokens,
                "chunks": len(prefill.layout.chunk_lengths),
                "recomputed": usage.recomputed_tokens,
                "generated": len(answer),
            },
            timings=timings,
        )

    def _assembled(self, codec: str) -> _Assembled:
        if codec not in self._assemblies:
            with _timed(self.model, self._unreported, "encode"):
                for part in self.prompt.parts:
                    run_steps(self.load(part.chunk))
                source: KVSource = self
                if codec != "raw":
                    source = HeldChunks({key: kv.recoded(codec) for key, kv in self._chunks.items()})
                prefill = Prefill(self.model, source, self._prefixes, self.prompt.request(STRATEGIES["naive"]()))
                run_steps(prefill.assemble())
            slots = prefill.slots.data[:, :, :, : prefill.layout.suffix_start]
            self._assemblies[codec] = _Assembled(slots, prefill.timings)
        return self._assemblies[codec]


@dataclass(frozen=True, slots=True)
class _Assembled:
    """The slots before the suffix, [layers, 2, kv_heads, positions, head_dim], and how long they took."""

    data: Tensor
    timings: dict[str, float]


class _SharedPrefill(Prefill):
    """A prefill whose context may have been assembled before."""

    def __init__(
        self,
        run: PromptRun,
        prefixes: PrefixCache,
        prompt: Prompt,
        strategy: Strategy,
        assembled: _Assembled | None,
    ) -> None:
        super().__init__(run.model, run, prefixes, prompt.request(strategy))
        self._assembled = assembled

    def assemble(self, lazily: bool = False) -> Generator[Pause, None, None]:
        """See Prefill.assemble. The times are those of the assembly that is copied."""
        if self._assembled is None:
            yield from super().assemble(lazily)
            return
        self.slots.data[:, :, :, : self.layout.suffix_start] = self._assembled.data
        self.timings |= self._assembled.timings
        yield None


def forced_logits(model: Model, slots: Slots, position: int, logits: Tensor, tokens: Sequence[int]) -> Tensor:
    """fp32 [tokens, vocab]: what would choose each of the tokens if all before it were chosen.

    logits: fp32 [vocab], of the row before `position`. Writes to the slots from `position` on.
    """
    if len(tokens) == 1:
        return logits[None]
    at = torch.arange(position, position + len(tokens) - 1)
    rest = run_steps(ForwardPass(model, token_tensor(tokens[:-1]), at, slots).finish_all())
    return torch.cat((logits[None], finite(rest)))


def what_followed(ids: Sequence[int]) -> list[int]:
    """The tokens that followed where the last ones stood together before, as if it went on; none if they never did."""
    wanted = list(ids[-_RECALLED:])
    for end in range(len(ids) - 1, _RECALLED - 1, -1):
        if ids[end - 1] == wanted[-1] and list(ids[end - _RECALLED : end]) == wanted:
            return list(islice(cycle(ids[end:]), _GUESSED))
    return []


def divergence(reference: Tensor, logits: Tensor) -> float:
    """Mean over tokens of KL(reference || other) in nats, both fp32 logits [tokens, vocab]."""
    total = 0.0
    for ours, theirs in zip(torch.split(reference, _ROWS), torch.split(logits, _ROWS), strict=True):
        wanted, found = functional.log_softmax(ours, -1), functional.log_softmax(theirs, -1)
        total += float((wanted.exp() * (wanted - found)).sum())
    return max(0.0, total / len(reference))


def surprise(logits: Tensor, tokens: Sequence[int]) -> float:
    """Mean negative log-likelihood of the tokens in nats; logits: fp32 [tokens, vocab]."""
    return float(functional.cross_entropy(logits, token_tensor(tokens).to(logits.device)))


def _shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    return next((index for index, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


@contextmanager
def _timed(model: Model, timings: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    timings[phase] = timings.get(phase, 0.0) + (time.perf_counter() - start) * 1000
