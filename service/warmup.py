"""Warm-up: counts which chunks stand in prompts, and brings the most used into memory when the server starts again."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

from cache_store.base import Chunk
from cache_store.keys import chunk_key, tokens_digest
from cache_store.tiered import TieredStore
from errors import CatalogueUnavailable
from retriever.uses import Uses

log = logging.getLogger(__name__)

_SAVE_SECONDS = 60.0  # a kill forgets at most what was used in this time


class WarmUp:
    """Lives on the event loop. Loads through the tiers, so what is read lands in memory; computes nothing."""

    def __init__(
        self, uses: Uses, store: TieredStore, space: str, token_bytes: int, budget: int, quiet: asyncio.Lock
    ) -> None:
        """`space`: the KV key space. `token_bytes`: KV of a token. `budget`: bytes to load at most.

        `quiet`: held by whoever removes KV; a chunk is not read, and so written to memory, meanwhile.
        """
        self._uses = uses
        self._store = store
        self._space = space
        self._token_bytes = token_bytes
        self._budget = budget
        self._quiet = quiet
        self._counts: Counter[str] = Counter()
        self._tasks: list[asyncio.Task[None]] = []

    def count(self, chunks: Sequence[Chunk]) -> None:
        """These chunks stand in a prompt."""
        self._counts.update(tokens_digest(chunk.token_ids) for chunk in chunks)

    def start(self) -> None:
        """Begins to load, and to save counts now and then."""
        self._tasks = [asyncio.create_task(self._load()), asyncio.create_task(self._save_regularly())]

    async def stop(self) -> None:
        """Ends loading and saves the counts."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._save()

    async def _load(self) -> None:
        for chunk in await asyncio.to_thread(self._chosen):
            async with self._quiet:
                await asyncio.to_thread(self._store.lookup, chunk)
        log.info("warm-up: the most used chunks are in memory, as far as they were stored")

    def _chosen(self) -> list[Chunk]:
        """The most used chunks, as many as the budget takes."""
        chosen, left = [], self._budget
        try:
            for digest, ids in self._uses.most_used():
                left -= len(ids) * self._token_bytes
                if left < 0:
                    break
                chosen.append(Chunk(chunk_key(self._space, digest), ids))
        except CatalogueUnavailable as error:
            log.warning("warm-up: %s", error)
        return chosen

    async def _save_regularly(self) -> None:
        while True:
            await asyncio.sleep(_SAVE_SECONDS)
            await self._save()

    async def _save(self) -> None:
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        try:
            await asyncio.to_thread(self._uses.add, counts)
        except CatalogueUnavailable as error:
            log.warning("counts of used chunks are kept for the next time: %s", error)
            self._counts.update(counts)
