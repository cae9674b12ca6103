"""A query from question to cited answer: retrieve, lay out the prompt, run the engine, turn tokens into events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

from cache_store.base import Chunk
from cache_store.keys import chunk_key, tokens_digest
from engine.base import EngineClient, Finished, GenerateRequest, Part, Prefilled, Sampling, Token
from engine.strategies import SERVED, Strategy, make_strategy
from errors import Cancelled, InvalidInput, NotReady, PromptTooLong, ReuseRefused
from retriever.chunking import chunk_document
from retriever.documents import ParsedDocument
from retriever.retriever import Hit, Retriever
from service.answer import AnswerText
from service.backlog import Backlog
from service.metrics import Metrics
from service.prompt import PromptTemplate
from service.schemas import QueryBody
from service.settings import Settings

# Hardly any text has longer tokens; what exceeds this is refused by its length alone.
_MAX_CHARACTERS_PER_TOKEN = 32


@dataclass(frozen=True, slots=True)
class Source:
    """A piece of context on offer, and how the answer shows it."""

    chunk: Chunk
    shown: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """`name`: sources, token, citation or done; `data` is JSON."""

    name: str
    data: dict[str, Any]


class Pipeline:
    """Answers questions. One instance a service; all methods run on its event loop."""

    def __init__(
        self,
        settings: Settings,
        retriever: Retriever,
        engine: EngineClient,
        prompt: PromptTemplate,
        space: str,
        window: int,
        layers: int,
        refused: str | None,
        backlog: Backlog,
        used: Callable[[Sequence[Chunk]], None],
        metrics: Metrics,
    ) -> None:
        """`space`: the KV key space. `window` and `layers`: positions and layers the model has.

        `refused`: why nothing but a full prefill is served, None when reuse is proven for the model. `backlog` gets the
        chunks that a full prefill found missing, `used` the retrieved chunks that stand in a prompt.
        """
        self._settings = settings
        self._retriever = retriever
        self._engine = engine
        self._prompt = prompt
        self._space = space
        self._window = min(window, settings.max_context_tokens)
        self._layers = layers
        self._refused = refused
        self._backlog = backlog
        self._used = used
        self._metrics = metrics
        self.active: dict[str, asyncio.Event] = {}  # request id -> set when the request has ended
        self.draining = False
        self._aborting = False

    async def answer(self, body: QueryBody, indexing: int = 0) -> AsyncGenerator[AnswerEvent]:
        """Events of one answer: sources, tokens and citations, done. Errors are raised, before or between events.

        `indexing`: documents of the collection that are not searchable yet, which the answer says.
        """
        started = time.perf_counter()
        if self.draining:
            raise NotReady("the server is shutting down", retry_after=5.0)
        request_id = uuid.uuid4().hex
        ended = self.active[request_id] = asyncio.Event()
        outcome = "error"
        try:
            async with aclosing(self._answer(request_id, body, indexing, started)) as events:
                async for event in events:
                    if event.name == "done":
                        outcome = event.data["finish_reason"]
                    yield event
        except Cancelled:
            outcome = "cancelled"
            raise NotReady("the server is shutting down", retry_after=5.0) from None
        except (GeneratorExit, asyncio.CancelledError):
            outcome = "cancelled"
            raise
        finally:
            self._engine.abort(request_id)  # also what was begun for it before it was submitted
            self._metrics.requests.labels(self._label(body), outcome).inc()
            del self.active[request_id]
            ended.set()

    async def wait_for_active(self) -> None:
        """Waits until every request that is active now has ended."""
        for ended in list(self.active.values()):
            await ended.wait()

    def abort_active(self) -> None:
        """Ends every open answer with an error event, those too that are not with the engine yet."""
        self._aborting = True
        for request_id in list(self.active):
            self._engine.abort(request_id)

    async def _answer(
        self, request_id: str, body: QueryBody, indexing: int, started: float
    ) -> AsyncGenerator[AnswerEvent]:
        strategy = self._strategy(body)
        max_tokens = body.max_tokens or self._settings.max_tokens
        self._check_size("the question", len(body.question))
        self._check_size("the contexts", sum(map(len, body.contexts or ())))
        found = await self._found(body)
        self._engine.prefetch(
            request_id, [found[number - 1].chunk for number in self._order(body, len(found))], strategy
        )
        suffix, question = await asyncio.to_thread(self._prompt.suffix, body.question)
        room = self._window - len(self._prompt.prefix) - len(suffix) - max_tokens
        if room < 0:
            raise PromptTooLong(
                f"question ({len(suffix)} tokens with its frame), system prompt ({len(self._prompt.prefix)}) and "
                f"max_tokens ({max_tokens}) need {self._window - room} tokens; the window is {self._window}"
            )
        sources = self._fitting(body, found, room)
        dropped = len(found) - len(sources)
        self._metrics.dropped_chunks.inc(dropped)
        if body.contexts is None:
            self._used([source.chunk for source in sources])
        retrieve_ms = _since(started)
        request = GenerateRequest(
            request_id,
            self._prompt.prefix,
            # The best source is number 1 and stands last, nearest to the question.
            tuple(self._part(number, sources[number - 1]) for number in self._order(body, len(sources))),
            suffix,
            strategy,
            Sampling(max_tokens, body.temperature, body.top_p, body.seed),
            question,
        )
        if self._aborting:
            raise Cancelled("the server stops")
        async with aclosing(self._engine.submit(request)) as events:
            shown = [{"index": number, **source.shown} for number, source in enumerate(sources, start=1)]
            yield AnswerEvent("sources", {"sources": shown, "dropped": dropped})
            text = AnswerText(self._prompt.decoder(), body.stop, len(sources))
            prefilled, count, first_token_ms, reason = None, 0, 0.0, ""
            async for event in events:
                fresh = ""
                if isinstance(event, Prefilled):
                    prefilled = event
                    self._metrics.observe_decision(event)
                    if event.usage.decision is not None and event.usage.strategy == "full":
                        self._backlog.add(event.usage.decision.missing)
                elif isinstance(event, Token):
                    count += 1
                    fresh = text.add(event.id)
                elif isinstance(event, Finished):
                    fresh, reason = text.finish(), event.reason
                if fresh:
                    first_token_ms = first_token_ms or _since(started)
                    yield AnswerEvent("token", {"text": fresh})
                    for cited in text.new_citations():
                        yield AnswerEvent("citation", {**asdict(cited), "source": shown[cited.number - 1]})
                if text.stopped:
                    reason = "stop"
                    break
        assert prefilled is not None
        yield AnswerEvent(
            "done", self._done(prefilled, count, reason, dropped, indexing, retrieve_ms, first_token_ms, started)
        )

    def _strategy(self, body: QueryBody) -> Strategy:
        """Raises UnknownStrategy, InvalidInput or ReuseRefused."""
        asked = body.strategy or {}
        if self._refused is not None and asked.get("name", "full") not in ("full", "auto"):
            raise ReuseRefused(f"{self._refused}; ask with the strategy 'full' or 'auto', or none")
        options = {"ratio": self._settings.ratio, "name": self._settings.strategy, **asked}
        strategy = make_strategy(options.pop("name"), options, self._layers)
        return strategy if self._refused is None else make_strategy("full", {}, self._layers)

    def _label(self, body: QueryBody) -> str:
        """The strategy's name as a metric label, whose values must be few."""
        name = (body.strategy or {}).get("name", self._settings.strategy)
        return name if name in SERVED else "unknown"

    def _check_size(self, what: str, characters: int) -> None:
        """Raises PromptTooLong for what cannot fit, before it costs the time and memory of tokenising."""
        limit = self._window * _MAX_CHARACTERS_PER_TOKEN
        if characters > limit:
            raise PromptTooLong(
                f"{what}: {characters} characters; the window of {self._window} tokens takes at most {limit}"
            )

    async def _found(self, body: QueryBody) -> list[Source]:
        """The contexts given, or what retrieval finds, number 1 first."""
        if body.contexts is not None:
            return await asyncio.to_thread(self._split, body.contexts)
        hits = await asyncio.to_thread(
            self._retriever.search, body.collection, body.question, body.top_k or self._settings.top_k
        )
        return [self._source(hit.chunk.token_ids, _shown(hit)) for hit in hits]

    def _fitting(self, body: QueryBody, found: list[Source], room: int) -> list[Source]:
        """Those that `room` tokens take, from number 1 on. Contexts must fit all: else PromptTooLong."""
        ends = list(accumulate(self._length(number, source) for number, source in enumerate(found, start=1)))
        if body.contexts is not None and found and ends[-1] > room:
            raise PromptTooLong(
                f"the contexts need {ends[-1]} tokens; beside question and answer the window of {self._window} "
                f"has room for {room}"
            )
        return [source for source, end in zip(found, ends, strict=True) if end <= room]

    def _split(self, contexts: Sequence[str]) -> list[Source]:
        sources = []
        for index, text in enumerate(contexts):
            chunks = chunk_document(ParsedDocument(text), self._prompt.encode, self._settings.chunk_tokens)
            if not chunks:
                raise InvalidInput(f"the model's tokenizer makes no token of contexts[{index}]", "contexts")
            for chunk in chunks:
                shown = {"context": index, "start": chunk.start, "end": chunk.end, "text": chunk.text}
                sources.append(self._source(chunk.token_ids, shown))
        return sources

    @staticmethod
    def _order(body: QueryBody, count: int) -> Sequence[int]:
        """Source numbers in prompt order: contexts as given, hits with the best last."""
        return range(1, count + 1) if body.contexts is not None else range(count, 0, -1)

    def _length(self, number: int, source: Source) -> int:
        return len(self._prompt.source_glue(number)) + len(source.chunk.token_ids)

    def _part(self, number: int, source: Source) -> Part:
        return Part(self._prompt.source_glue(number), source.chunk)

    def _source(self, token_ids: tuple[int, ...], shown: dict[str, Any]) -> Source:
        return Source(Chunk(chunk_key(self._space, tokens_digest(token_ids)), token_ids), shown)

    def _done(
        self,
        prefilled: Prefilled,
        completion_tokens: int,
        reason: str,
        dropped: int,
        indexing: int,
        retrieve_ms: float,
        first_token_ms: float,
        started: float,
    ) -> dict[str, Any]:
        usage = prefilled.usage
        degraded = list(usage.faults)
        if usage.fallback_reason:
            degraded.append(f"fallback: {usage.fallback_reason}")
        if indexing:
            degraded.append(f"indexing: {indexing} documents are not searchable yet")
        names = ("queue", "load", "assemble", "stage1", "select", "stage2")
        phases = {"retrieve": retrieve_ms} | {name: prefilled.timings.get(name, 0.0) for name in names}
        total_ms = _since(started)
        decision = usage.decision
        predicted = {name: round(value, 1) for name, value in decision.predicted_ms.items()} if decision else {}
        self._metrics.observe_answer(prefilled, phases, completion_tokens, degraded, first_token_ms, total_ms)
        return {
            "finish_reason": reason,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "context_tokens": usage.context_tokens,
                "recomputed_tokens": usage.recomputed_tokens,
                "completion_tokens": completion_tokens,
                "chunk_hits": usage.hits,
                "bytes_loaded": usage.bytes_loaded,
                "strategy": usage.strategy,
                "ratio": usage.ratio,
                "fallback_reason": usage.fallback_reason or self._refused,
                "decision": decision
                and {
                    "strategy": decision.strategy,
                    "trial": decision.trial,
                    "predicted_ms": predicted,
                    "chunks": {
                        "load": decision.loaded,
                        "compute": decision.computed,
                        "missing": len(decision.missing),
                    },
                },
                "dropped_chunks": dropped,
                "degraded": degraded,
                "predicted_full_prefill_ms": round(prefilled.predicted_full_prefill_ms, 1),
            },
            "timings": {f"{name}_ms": round(value, 1) for name, value in phases.items()}
            | {"prefill_ms": round(prefilled.prefill_ms, 1)}
            | {"predicted_ms": predicted[decision.strategy] if decision else None}
            | {"first_token_ms": round(first_token_ms, 1), "total_ms": round(total_ms, 1)},
        }


def _shown(hit: Hit) -> dict[str, Any]:
    chunk = hit.chunk
    shown = {
        "document": chunk.document,
        "title": chunk.title,
        "page": chunk.page,
        "last_page": chunk.last_page,
        "heading": chunk.heading,
        "start": chunk.start,
        "end": chunk.end,
        "score": round(hit.score, 4),
        "metadata": chunk.metadata,
        "text": chunk.text,
    }
    return {name: value for name, value in shown.items() if value is not None}


def _since(started: float) -> float:
    """Milliseconds since `started`."""
    return (time.perf_counter() - started) * 1000
