"""Builds the parts of the service from its settings, starts and stops them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from cache_store.base import Chunk, KVStore
from cache_store.disk import DiskStore
from cache_store.keys import key_space, tokens_digest
from cache_store.memory import MemoryStore
from cache_store.prefetch import Prefetcher
from cache_store.redis import RedisStore
from cache_store.source import ChunkSource
from cache_store.tiered import TieredStore
from engine.base import EncodeRequest, Request
from engine.calibration import calibrate, calibrate_tiers
from engine.controller import Controller
from engine.decode import EventSteps
from engine.encode import PrefixCache, encode_observed
from engine.engine import Engine
from engine.generate import encode, generate
from engine.model import Model, load_model, tokenizer_digest
from engine.plain import PlainModel
from engine.strategies import SERVED
from errors import ConfigError, NotReady, StoreUnavailable
from retriever.catalogue import Catalogue
from retriever.database import Database
from retriever.embedding import Embedder
from retriever.jobs import Jobs
from retriever.retriever import Retriever, index_signature
from retriever.uses import Uses
from service.backlog import Backlog
from service.certificate import require_certified
from service.ingest import Ingestor
from service.metrics import Metrics
from service.models import resolve_embedder, resolve_language_model
from service.pipeline import Pipeline
from service.prompt import PromptTemplate
from service.retention import RetentionRules, parse_rules
from service.settings import Settings
from service.warmup import WarmUp

log = logging.getLogger(__name__)

TENANT = "default"
_BACKLOG_BYTES = 256 << 20  # chunk KV that queries found missing and that is still to be computed
_LOADER = "load"  # the thread's name
_PARSERS = 2  # documents parsed at a time: bounds memory, and leaves threads to the queries
DEFAULT_COLLECTION = "default"


class Runtime:
    """Everything behind the HTTP layer. The parts exist once `start` has returned."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model)
        self.failure: Exception | None = None
        self.started = False
        self.parsing = asyncio.Semaphore(_PARSERS)
        self.catalogue: Catalogue
        self.jobs: Jobs
        self.retriever: Retriever
        self.store: TieredStore
        self.model: Model | PlainModel
        self.engine: Engine
        self.space: str  # of chunk keys
        self.pipeline: Pipeline
        self.ingestor: Ingestor
        self._prefetcher: Prefetcher | None
        self._warm_up: WarmUp | None = None
        self._database: Database
        self._lock: FileLock

    def require_started(self) -> None:
        """Raises NotReady until `start` has returned."""
        if not self.started:
            raise NotReady("the model is being loaded", retry_after=5.0)

    async def start(self) -> None:
        """Loads models, opens catalogue, index and KV tiers, starts the engine and the workers."""
        self._lock = FileLock(_made(self.settings.data_dir) / "lock", thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"another server uses {self.settings.data_dir}; give each its own PROPHETKV_DATA_DIR"
            ) from None
        try:
            await _in_daemon_thread(self._load)
            await self.ingestor.start()
            if self._warm_up is not None:
                self._warm_up.start()
        except BaseException:
            self._lock.release()
            raise
        self.started = True
        log.info("ready: %s on %s in %s", self.settings.model, self.model.device, self.model.dtype)

    @staticmethod
    def loading() -> bool:
        """A thread still loads models, though nobody may be waiting for it any more."""
        return any(thread.name == _LOADER for thread in threading.enumerate())

    async def stop(self) -> None:
        """Stops what was started, in reverse order."""
        if not self.started:
            return
        if self._warm_up is not None:
            await self._warm_up.stop()
        await self.ingestor.stop()
        await asyncio.to_thread(self.engine.close)
        if self._prefetcher is not None:
            await asyncio.to_thread(self._prefetcher.close)
        await asyncio.to_thread(self.store.close)
        await asyncio.to_thread(self.retriever.save)
        self._database.close()
        self._lock.release()

    def checks(self) -> dict[str, str]:
        """Why the service is not ready; empty when it is."""
        told = {}
        if self.failure is not None:
            told["start"] = str(self.failure)
        elif not self.started:
            told["start"] = "the model is being loaded"
        else:
            stats = self.engine.stats()
            if not stats.alive:
                told["engine"] = "the device thread is dead"
            elif stats.waiting >= self.settings.max_waiting:
                told["queue"] = f"{stats.waiting} queries are waiting"
            if self.pipeline.draining:
                told["draining"] = "the server is shutting down"
        return told

    def _count(self, chunks: Sequence[Chunk]) -> None:
        if self._warm_up is not None:
            self._warm_up.count(chunks)

    def _load(self) -> None:
        settings = self.settings
        if settings.strategy not in SERVED:
            raise ConfigError(f"PROPHETKV_STRATEGY is {settings.strategy!r}; there are {', '.join(SERVED)}")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        folder = resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype)
        embedder = Embedder(resolve_embedder(settings.embedder, settings.model_cache))
        self.model = load_model(folder, settings.device, settings.dtype)
        reuses = isinstance(self.model, Model)
        if isinstance(self.model, PlainModel):
            log.warning("every answer is a full prefill: %s", self.model.refused)
        if isinstance(self.model, Model):
            require_certified(self.model, settings.kv_codec, settings.data_dir)
        prompt = PromptTemplate(self.model.tokenizer, settings.system_prompt)
        self.space = key_space(self.model.fingerprint, prompt.prefix, TENANT, settings.kv_codec)
        signature = index_signature(tokenizer_digest(folder), settings.chunk_tokens, embedder.digest)

        self._database = Database(settings.catalogue_url)
        self.catalogue = Catalogue(self._database, signature)
        self.catalogue.ensure_collection(DEFAULT_COLLECTION)
        self.jobs = Jobs(self._database, signature)
        self.retriever = Retriever(
            self.catalogue,
            embedder,
            prompt.encode,
            tokens_digest,
            settings.chunk_tokens,
            settings.data_dir / "index",
            signature,
        )
        self.retriever.open()
        self.store = TieredStore(
            _tiers(settings, self.model),
            in_flight_bytes=settings.kv_in_flight_bytes,
            pinned=self.model.device.type == "cuda",
            patience={"disk": settings.disk_timeout_ms / 1000},  # Redis bounds its own waiting
            answer={"redis": 2 * settings.redis_timeout_ms / 1000},  # but not that for names, or for several nodes
        )
        token_bytes = _token_bytes(self.model, settings.kv_codec)
        steps, self._prefetcher = _steps(self.model, self.store, prompt.prefix, settings, token_bytes)
        self.engine = Engine(steps, settings.max_waiting, settings.max_running, self._prefetcher)
        self.metrics.watch(self.store.tiers, self.engine.stats)
        backlog = Backlog(_BACKLOG_BYTES, token_bytes, self.metrics.dropped_encodings)
        self.pipeline = Pipeline(
            settings,
            self.retriever,
            self.engine,
            prompt,
            self.space,
            self.model.window,
            self.model.layout.layers if isinstance(self.model, Model) else self.model.layers,
            self.model.refused if isinstance(self.model, PlainModel) else None,
            backlog,
            self._count,
            self.metrics,
        )
        self.ingestor = Ingestor(
            self.catalogue,
            self.jobs,
            self.retriever,
            self.engine,
            self.store,
            self.space,
            token_bytes,
            settings.precompute and reuses,
            self.pipeline.wait_for_active,
            backlog,
            self.metrics,
            RetentionRules(parse_rules(settings.kv_retention)),
        )
        if settings.warm_up and reuses:
            uses, quiet = Uses(self._database), self.ingestor.encoding
            self._warm_up = WarmUp(uses, self.store, self.space, token_bytes, settings.memory_bytes, quiet)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


async def _in_daemon_thread(call: Callable[[], None]) -> None:
    """Awaits `call`. Whoever stops waiting may end the process: it does not wait for daemon threads."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def settle(error: Exception | None) -> None:
        if not done.done():
            done.set_exception(error) if error is not None else done.set_result(None)

    def run() -> None:
        error = None
        try:
            call()
        except Exception as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, error)

    threading.Thread(target=run, name=_LOADER, daemon=True).start()
    await done


def _token_bytes(model: Model | PlainModel, codec: str) -> int:
    """Chunk KV of one token, as the codec writes it; what it writes once a chunk is spread over 256 tokens."""
    if isinstance(model, PlainModel):
        return 0
    return model.layout.layers * replace(model.layout, codec=codec).block_bytes(256) // 256


def _tiers(settings: Settings, model: Model | PlainModel) -> list[KVStore]:
    """The configured tiers, fastest first. A model whose KV is not reused has none to keep."""
    if isinstance(model, PlainModel):
        return [MemoryStore(0)]
    policy, layout = settings.kv_eviction, replace(model.layout, codec=settings.kv_codec)
    on_gpu = model.device.type == "cuda"
    tiers: list[KVStore] = []
    if on_gpu and settings.device_bytes:
        tiers.append(MemoryStore(settings.device_bytes, policy, "device", model.device))
    tiers.append(MemoryStore(settings.memory_bytes, policy, pinned=on_gpu))
    if settings.disk_bytes:
        try:
            tiers.append(DiskStore(Path(settings.data_dir) / "kv", layout, settings.disk_bytes, policy))
        except StoreUnavailable as error:
            raise ConfigError(f"{error}; mend the folder, or do without it by PROPHETKV_DISK_BYTES=0") from error
    if settings.redis_url:
        timeout = settings.redis_timeout_ms / 1000
        tiers.append(RedisStore(settings.redis_url, layout, timeout, settings.redis_bytes))
    return tiers


def _steps(
    model: Model | PlainModel, store: TieredStore, prefix: tuple[int, ...], settings: Settings, token_bytes: int
) -> tuple[Callable[[Request], EventSteps], Prefetcher | None]:
    """What the engine runs for a request, and what loads ahead for it.

    Chunk KV is always computed behind the service's own prefix.
    """
    if isinstance(model, PlainModel):
        return partial(_plain_steps, model), None
    prefixes = PrefixCache(model)
    controller = Controller(model, store.tiers, token_bytes)
    calibrate(model, prefixes, prefix, controller)
    calibrate_tiers(store.tiers, replace(model.layout, codec=settings.kv_codec), controller)
    prefetcher = Prefetcher(store, token_bytes, settings.prefetch_bytes, controller.worth_loading)
    encode_one = partial(encode_observed, model, prefixes, prefix, settings.kv_codec, controller)
    source = ChunkSource(store, encode_one)

    def steps(request: Request) -> EventSteps:
        if isinstance(request, EncodeRequest):
            return encode(source, request)
        return generate(model, source, prefixes, request, controller)

    return steps, prefetcher


def _plain_steps(model: PlainModel, request: Request) -> EventSteps:
    assert not isinstance(request, EncodeRequest), "nothing is encoded ahead for a model whose KV is not reused"
    return model.generate(request)
