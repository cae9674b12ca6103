"""Prometheus metrics.

Names, buckets and the `model_name` label follow vLLM's, so that its dashboards work after a rename.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache_store.base import KVStore
from engine.base import EngineStats

_PREFIX = "prophetkv_"
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75)
_TTFT_BUCKETS = (*_TTFT, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
_E2E_BUCKETS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The service's metrics in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self.ttft = self._histogram("time_to_first_token_seconds", "arrival to first token", _TTFT_BUCKETS)
        self.latency = self._histogram("e2e_request_latency_seconds", "arrival to the end of the answer", _E2E_BUCKETS)
        self.phases = Histogram(
            f"{_PREFIX}request_phase_seconds",
            "time by phase: retrieve, queue, load, assemble, stage1, select, stage2",
            ("model_name", "phase"),
            registry=self.registry,
            buckets=_TTFT_BUCKETS,
        )
        self.requests = self._counter("requests", "queries by strategy and how they ended", ("strategy", "outcome"))
        self.rejected = self._counter("requests_rejected", "queries turned away before any work", ("reason",))
        self.prompt_tokens = self._counter("prompt_tokens", "prompt tokens of answered queries")
        self.generation_tokens = self._counter("generation_tokens", "generated tokens")
        self.recomputed_tokens = self._counter("recompute_tokens", "context tokens recomputed in Stage II")
        self.chunk_hits = self._counter("chunk_kv_chunks", "chunks by where their KV came from", ("tier",))
        self.degraded = self._counter("degraded", "answers given although something failed", ("what",))
        self.jobs = self._counter("ingest_jobs", "ingestion jobs by how they ended", ("state",))
        self.dropped_chunks = self._counter("dropped_chunks", "retrieved chunks that did not fit the window")
        self.purge_failures = self._counter(
            "kv_purge_failures", "removals of KV that a tier refused; they are repeated"
        )

    def observe_phases(self, timings: dict[str, float]) -> None:
        """`timings`: milliseconds by phase."""
        for phase, milliseconds in timings.items():
            self.phases.labels(self._model, phase).observe(milliseconds / 1000)

    def watch(self, tiers: Sequence[KVStore], engine: Callable[[], EngineStats]) -> None:
        """Exports the tiers' own counters and the engine's state at every scrape."""
        self.registry.register(_Live(self._model, tiers, engine))

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(_PREFIX + name, text, ("model_name",), registry=self.registry, buckets=buckets)
        return metric.labels(self._model)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(_PREFIX + name, text, labels, registry=self.registry)


class _Live(Collector):
    """Reads counters where they live instead of copying them about."""

    def __init__(self, model: str, tiers: Sequence[KVStore], engine: Callable[[], EngineStats]) -> None:
        self._model = model
        self._tiers = tiers
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Called at every scrape."""
        stats = self._engine()
        for name, text, value in (
            ("num_requests_running", "queries between admission and last token", stats.running),
            ("num_requests_waiting", "queries waiting for the device", stats.waiting),
            ("num_encodings_waiting", "background encodings", stats.background),
            ("seconds_since_step", "age of the device thread's last step; 0 when idle", stats.seconds_since_step),
        ):
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text in (
            ("hits", "entries found"),
            ("misses", "entries not found"),
            ("writes", "entries written"),
            ("dropped_writes", "entries not written: no room, backlog full, or the tier failed"),
            ("evictions", "entries evicted"),
            ("errors", "failures of the medium"),
            ("read_bytes", "bytes of entries found"),
            ("read_seconds", "time spent reading entries that were found"),
        ):
            counter = CounterMetricFamily(f"{_PREFIX}chunk_kv_{name}", text, labels=["tier"])
            for tier in self._tiers:
                counter.add_metric([tier.name], getattr(tier.stats, name))
            yield counter
        rejected = CounterMetricFamily(
            f"{_PREFIX}kv_entry_rejected", "entries that were not what their key claims", labels=["tier", "reason"]
        )
        for tier in self._tiers:
            for reason, count in list(tier.stats.rejected.items()):
                rejected.add_metric([tier.name, reason], count)
        yield rejected
        for name, text in (("entries", "entries held"), ("nbytes", "bytes held")):
            label = {"entries": "entries", "nbytes": "bytes"}[name]
            gauge = GaugeMetricFamily(f"{_PREFIX}chunk_kv_{label}", text, labels=["tier"])
            for tier in self._tiers:
                gauge.add_metric([tier.name], getattr(tier.stats, name))
            yield gauge
