"""Looking after the tiers that outlive a process, the disk and Redis: what `prophetkv store` does."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path

import torch

from cache_store.base import Chunk, KVLayout
from cache_store.disk import DiskStore, stored_files
from cache_store.entry import examine
from cache_store.keys import chunk_key
from cache_store.redis import RedisStore
from engine.base import Encoded, EncodeRequest
from engine.plain import PlainModel
from errors import CorruptEntry, ReuseRefused
from retriever.catalogue import Catalogue
from retriever.database import Database
from retriever.jobs import Jobs
from service.runtime import Runtime
from service.settings import Settings

# Maintenance works on entries of any model; it reads none of them as a chunk.
_NO_LAYOUT = KVLayout(1, 1, 2, torch.float32)
_PATIENCE_SECONDS = 5.0  # with Redis: nobody waits for an answer here


def stats(settings: Settings) -> list[tuple[str, int, int, int]]:
    """Tier, entries, bytes, and budget in bytes (0: the server's own), of the disk and of Redis if there is one.

    The bytes of Redis are all that it uses.
    """
    files = stored_files(_folder(settings))
    rows = [("disk", len(files), sum(size for _, size in files), settings.disk_bytes)]
    with _redis(settings) as redis:
        if redis is not None:
            rows.append(("redis", len(redis.entry_keys()), redis.used_bytes(), settings.redis_bytes))
    return rows


def verify(settings: Settings, remove: bool) -> Iterator[tuple[str, str, str | None]]:
    """Reads every entry: tier, key, and what is wrong with it, None when nothing is. `remove`: what is damaged."""
    for path, _ in stored_files(_folder(settings)):
        try:
            reason = _damage(path.read_bytes(), path.stem)
            if reason is not None and remove:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            continue  # a server that runs has evicted it
        except OSError as error:
            reason = f"cannot be read: {error.strerror}"
        yield "disk", path.stem, reason
    with _redis(settings) as redis:
        if redis is None:
            return
        for key in redis.entry_keys():
            reason = _damage(redis.whole(key), key)
            if reason is not None and remove:
                redis.delete([key])
            yield "redis", key, reason


def purge(settings: Settings, collection: str | None, document: str | None) -> int:
    """Removes entries, all or those of a collection or one of its documents; returns of how many chunks.

    Raises NotFound, and StoreError when a tier does not answer.
    """
    with _redis(settings) as redis:
        keys = {path.stem for path, _ in stored_files(_folder(settings))} | set(redis.entry_keys() if redis else ())
        if collection is not None or document is not None:
            keys &= _keys_of(settings, collection or "default", document)
        DiskStore(_folder(settings), _NO_LAYOUT, 1 << 62).delete(keys)
        if redis is not None:
            redis.delete(keys)
        return len(keys)


async def warm(settings: Settings, collection: str | None) -> Counter[str]:
    """Computes the KV of all chunks that no tier holds; returns where the chunks were found.

    Raises ConfigError when a server runs on the data folder, and ReuseRefused when the model's KV is not reused.
    """
    runtime = Runtime(settings.model_copy(update={"precompute": False}))
    await runtime.start()
    tiers = Counter[str]()
    try:
        if isinstance(runtime.model, PlainModel):
            raise ReuseRefused(
                f"no KV is computed ahead, for every answer is a full prefill: {runtime.model.refused}; "
                "configure another model, or do without"
            )
        for name in [collection] if collection is not None else runtime.catalogue.collections():
            for digest, ids in runtime.catalogue.live_tokens(name).items():
                request = EncodeRequest(uuid.uuid4().hex, (Chunk(chunk_key(runtime.space, digest), ids),))
                async with aclosing(runtime.engine.submit(request)) as events:
                    async for event in events:
                        if isinstance(event, Encoded):
                            tiers[event.tier] += 1
                await asyncio.to_thread(runtime.store.flush)  # or the backlog would drop what comes too fast
    finally:
        await runtime.stop()
    return tiers


def _keys_of(settings: Settings, collection: str, document: str | None) -> set[str]:
    """Keys of the chunks of a collection or document, for all models that were ever used here."""
    database = Database(settings.catalogue_url)
    try:
        spaces = Jobs(database, "").key_spaces()
        held = Catalogue(database, "").holders((collection, document) if document is not None else None)
        return {chunk_key(space, digest) for digest, home, _ in held if home == collection for space in spaces}
    finally:
        database.close()


def _damage(data: bytes, key: str) -> str | None:
    """What is wrong with an entry; None when it is whole and lies under its own key."""
    try:
        return None if examine(memoryview(data)) == key else "another key"
    except CorruptEntry as error:
        return error.reason


def _folder(settings: Settings) -> Path:
    return Path(settings.data_dir) / "kv"


@contextmanager
def _redis(settings: Settings) -> Iterator[RedisStore | None]:
    if not settings.redis_url:
        yield None
        return
    store = RedisStore(settings.redis_url, _NO_LAYOUT, max(settings.redis_timeout_ms / 1000, _PATIENCE_SECONDS))
    try:
        yield store
    finally:
        store.close()
