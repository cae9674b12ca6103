"""Background work on documents:

indexing, computing chunk KV ahead, removing KV nobody needs. Driven by the job table.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterable
from contextlib import aclosing
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from cache_store.base import KEEP, Chunk, Retention
from cache_store.keys import chunk_key
from cache_store.tiered import TieredStore
from engine.base import EncodeRequest, EngineClient
from errors import Cancelled, CatalogueUnavailable
from retriever.catalogue import Catalogue, Holder
from retriever.jobs import JobInfo, Jobs, Work
from retriever.retriever import Retriever
from service.backlog import Backlog
from service.metrics import Metrics
from service.retention import RetentionRules

log = logging.getLogger(__name__)

T = TypeVar("T")

# What is handed to the engine at a time: bounds the writer's backlog and what a cancellation waits for.
_ENCODE_CHUNKS = 8
_ENCODE_BYTES = 64 << 20
_RETRY_SECONDS = 5.0
_POLL_SECONDS = 0.1


class Ingestor:
    """Three workers: index, precompute, purge. What they do is in the database, so a restart goes on with it.

    When the database does not answer they wait for it and go on. A fourth encodes what queries found missing.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        jobs: Jobs,
        retriever: Retriever,
        engine: EngineClient,
        store: TieredStore,
        space: str,
        token_bytes: int,
        precompute: bool,
        settled: Callable[[], Awaitable[None]],
        backlog: Backlog,
        metrics: Metrics,
        retention: RetentionRules,
    ) -> None:
        """`space`: the KV key space in use. `token_bytes`: KV of a token.

        `settled` waits until the queries that are active now have ended.
        """
        self._catalogue = catalogue
        self._jobs = jobs
        self._retriever = retriever
        self._engine = engine
        self._store = store
        self._space = space
        self._token_bytes = token_bytes
        self._precompute = precompute
        self._settled = settled
        self._backlog = backlog
        self._metrics = metrics
        self._retention = retention
        self._spaces: list[str] = []
        self._wake = {stage: asyncio.Event() for stage in ("index", "precompute", "purge")}
        self._retaining = threading.Lock()
        self.encoding = asyncio.Lock()  # held while KV is written in the background, or removed
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Takes up what a former process left and starts the workers."""
        await asyncio.to_thread(self._jobs.recover)
        self._spaces = await asyncio.to_thread(self._jobs.register_key_space, self._space)
        # The tiers have just been opened: they keep everything.
        await asyncio.to_thread(self._retain, self._catalogue.holders, but=KEEP)
        if self._precompute:
            await asyncio.to_thread(self._jobs.encode_again, self._space)
        self._tasks = [
            asyncio.create_task(self._work("index", self._index)),
            asyncio.create_task(self._work("precompute", self._encode)),
            asyncio.create_task(self._purge()),
            asyncio.create_task(self._encode_missing()),
        ]

    async def stop(self) -> None:
        """Ends the workers between two batches; unfinished jobs go on at the next start."""
        self._stopping.set()
        for event in (*self._wake.values(), self._backlog.filled):
            event.set()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def wake(self) -> None:
        """There may be new work."""
        for event in self._wake.values():
            event.set()

    async def wait(self, job: str, seconds: float, give_up: Callable[[], Awaitable[bool]]) -> JobInfo:
        """The job when it has ended, or as it is after `seconds` or when `give_up` says so. Raises NotFound."""
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            info = await asyncio.to_thread(self._jobs.job, job)
            ended = info.state not in ("pending", "running")
            if ended or asyncio.get_running_loop().time() >= deadline or await give_up():
                return info
            await asyncio.sleep(_POLL_SECONDS)

    async def retain(self, collection: str, document: str) -> None:
        """Tells the tiers how long the document's chunks are to be kept, after its metadata changed."""
        await asyncio.to_thread(self._retain, partial(self._catalogue.holders, (collection, document)))

    async def purge_now(self) -> None:
        """After a deletion: removes the KV of chunks that no document holds, as far as the tiers answer now."""
        await asyncio.to_thread(self._retain, self._catalogue.remaining_holders)
        await self._delete_kv(await asyncio.to_thread(self._jobs.purges))
        self._wake["purge"].set()

    async def _work(self, stage: str, handle: Callable[[Work], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            self._wake[stage].clear()
            work = await self._insist(self._jobs.claim, stage)
            if work is None:
                await self._wake[stage].wait()
                continue
            try:
                await handle(work)
            except Cancelled:
                log.info("job %s stopped", work.job)
                await self._insist(self._jobs.release, work.job)
            except CatalogueUnavailable:
                log.exception("job %s waits for the catalogue", work.job)
                await self._pause()
                await self._insist(self._jobs.release, work.job)
            except Exception as error:
                log.exception("job %s failed", work.job)
                await self._insist(self._jobs.fail, work.job, f"{type(error).__name__}: {error}")
                self._metrics.jobs.labels("failed").inc()

    async def _insist(self, call: Callable[..., T], *args: Any) -> T | None:
        """Calls until the catalogue answers; None when the service stops before it does."""
        while True:
            try:
                return await asyncio.to_thread(call, *args)
            except CatalogueUnavailable as error:
                log.warning("will try again: %s", error)
                if self._stopping.is_set():
                    return None
                await self._pause()

    async def _pause(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), _RETRY_SECONDS)

    async def _index(self, work: Work) -> None:
        def progress(done: int, total: int) -> bool:
            return not self._stopping.is_set() and self._jobs.progress(work.job, done, total)

        if not await asyncio.to_thread(self._retriever.index, work, progress):
            return  # replaced or deleted meanwhile; whoever did it has cancelled the job
        self._wake["purge"].set()
        await asyncio.to_thread(self._retain, partial(self._catalogue.holders, revision=work.revision))
        if self._precompute:
            await asyncio.to_thread(self._jobs.next_stage, work.job, "precompute")
            self._wake["precompute"].set()
        else:
            await self._finish(work, None)

    async def _encode(self, work: Work) -> None:
        held = await asyncio.to_thread(self._catalogue.revision_chunks, work.revision)
        chunks = [Chunk(chunk_key(self._space, digest), ids) for digest, ids in held]
        done = 0
        while done < len(chunks):
            async with self.encoding:
                batch = tuple(self._batch(chunks[done:]))
                async with aclosing(self._engine.submit(EncodeRequest(uuid.uuid4().hex, batch))) as events:
                    async for _ in events:
                        done += 1
                        known = await asyncio.to_thread(self._jobs.progress, work.job, done, len(chunks))
                        if self._stopping.is_set() or not known:
                            break
                if self._stopping.is_set() or not known:
                    while self._engine.stats().background:  # an abort takes effect at the engine's next step
                        await asyncio.sleep(_POLL_SECONDS)
                    raise Cancelled("the job was cancelled")
                await asyncio.to_thread(self._store.flush)
        await self._finish(work, self._space)

    async def _encode_missing(self) -> None:
        while True:
            await self._backlog.filled.wait()
            if self._stopping.is_set():
                return
            async with self.encoding:
                batch = tuple(self._batch(list(self._backlog.waiting())))
                try:
                    async with aclosing(self._engine.submit(EncodeRequest(uuid.uuid4().hex, batch))) as events:
                        async for _ in events:
                            if self._stopping.is_set():
                                return
                    await asyncio.to_thread(self._store.flush)
                except Exception:  # whatever it is, the chunks that come later are to be encoded
                    log.exception("%d chunks that a query found missing could not be encoded", len(batch))
                self._backlog.discard(chunk.key for chunk in batch)

    def _batch(self, chunks: list[Chunk]) -> list[Chunk]:
        """The first few chunks, at least one."""
        ends = accumulate(len(chunk.token_ids) * self._token_bytes for chunk in chunks[:_ENCODE_CHUNKS])
        return chunks[: max(1, sum(end <= _ENCODE_BYTES for end in ends))]

    async def _finish(self, work: Work, encoded_for: str | None) -> None:
        await asyncio.to_thread(self._jobs.finish, work.job, encoded_for)
        self._metrics.jobs.labels("succeeded").inc()

    async def _purge(self) -> None:
        while not self._stopping.is_set():
            self._wake["purge"].clear()
            await self._insist(self._retain, self._catalogue.remaining_holders)
            digests = await self._insist(self._jobs.purges)
            if not digests:
                await self._wake["purge"].wait()
                continue
            # A query or encoding that started before the deletion may still write what it computed: remove once more
            # when those have ended.
            await self._settled()
            async with self.encoding:
                still = set(await self._insist(self._jobs.purges) or ())  # one may have been put again meanwhile
                digests = [digest for digest in digests if digest in still]
                done = await self._delete_kv(digests)
            if done:
                await self._insist(self._jobs.purged, digests)
            else:
                await self._pause()

    def _retain(self, holders: Callable[[], Iterable[Holder]], but: Retention | None = None) -> None:
        """Tells the tiers how long chunks are to be kept. `but`: a retention that they need not be told.

        One at a time from reading to telling: who has read last is told last.
        """
        with self._retaining:
            by_retention: dict[Retention, list[str]] = {}
            for digest, retention in self._retention.of_chunks(holders()).items():
                by_retention.setdefault(retention, []).append(chunk_key(self._space, digest))
            for retention, keys in by_retention.items():
                if retention != but:
                    self._store.retain(keys, retention)

    async def _delete_kv(self, digests: list[str]) -> bool:
        """Removes the chunks' KV of every key space from every tier; False when a tier failed."""
        keys = [chunk_key(space, digest) for space in self._spaces for digest in digests]
        self._backlog.discard(keys)
        try:
            await asyncio.to_thread(self._store.delete, keys)
        except Exception:  # whatever it is, what is to be removed is not forgotten
            self._metrics.purge_failures.inc()
            log.exception("chunk KV could not be removed from every tier, will be tried again")
            return False
        return True
