"""Chunks that no tier held when a full prefill answered: to be encoded when no query wants the device."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from prometheus_client import Counter

from cache_store.base import Chunk


class Backlog:
    """At most `max_bytes` of KV to come; beyond that chunks are dropped and counted. Lives on the event loop."""

    def __init__(self, max_bytes: int, token_bytes: int, dropped: Counter) -> None:
        """`token_bytes`: KV of one token."""
        self.filled = asyncio.Event()
        self._max_tokens = max_bytes // max(1, token_bytes)
        self._dropped = dropped
        self._chunks: dict[str, Chunk] = {}

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Takes those that are not here yet, as far as there is room."""
        tokens = sum(len(chunk.token_ids) for chunk in self._chunks.values())
        for chunk in chunks:
            if chunk.key in self._chunks:
                continue
            tokens += len(chunk.token_ids)
            if tokens > self._max_tokens:
                self._dropped.inc()
                tokens -= len(chunk.token_ids)
                continue
            self._chunks[chunk.key] = chunk
            self.filled.set()

    def waiting(self) -> Sequence[Chunk]:
        """All chunks, the oldest first."""
        return list(self._chunks.values())

    def discard(self, keys: Iterable[str]) -> None:
        """Forgets chunks: they are encoded, or nobody may keep them any more."""
        for key in keys:
            self._chunks.pop(key, None)
        if not self._chunks:
            self.filled.clear()
