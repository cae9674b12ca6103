"""What a user of the service waits for, measured: `make bench`. Interleaved pairs, one process each, medians.

full      the engine's full prefill against the plain transformers model under SDPA, in one process
ttft      warm ProphetKV against full over HTTP, contexts given, to the first token event with text
ingest    chunk tokens per second of ingestion with precompute, against a plain batched prefill of the same chunks
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.launch import running_server
from benchmarks.report import conditions, paired_ratio, write
from engine.base import GenerateRequest, Sampling
from engine.encode import PrefixCache
from engine.forward import run_steps
from engine.model import Model, load_tokenizer, text_encoder
from engine.prefill import Prefill
from engine.strategies import STRATEGIES
from service.models import resolve_language_model
from service.settings import Settings, load_settings


def words(count: int, seed: int) -> str:
    """Plain sentences, about a token a word, the same for a seed."""
    chance = random.Random(seed)
    nouns = ("boat", "harbour", "engine", "winch", "island", "tide", "ladder", "sensor", "report", "crew", "battery")
    verbs = ("checks", "moves", "carries", "repairs", "watches", "paints", "loads", "measures", "lifts", "cleans")
    parts = []
    for _ in range(count // 8 + 1):
        subject, thing, place = chance.sample(nouns, 3)
        parts.append(f"The {subject} {chance.choice(verbs)} the {thing} near the {place}.")
    return " ".join(parts)


@torch.inference_mode()
def measure_full(settings: Settings, tokens: int, pairs: int) -> dict[str, Any]:
    """The engine's full prefill against the plain model, interleaved."""
    model = load_model(settings)
    ids = text_encoder(model.tokenizer)(words(2 * tokens, 0))[0][:tokens]
    request = GenerateRequest("bench", (), (), tuple(ids), STRATEGIES["full"](), Sampling(max_tokens=1))

    def ours() -> None:
        run_steps(request.strategy.prefill(Prefill(model, _NoSource(), PrefixCache(model), request)))

    def plain() -> None:
        model.plain_logits(torch.tensor(ids))

    times: dict[Any, list[float]] = {ours: [], plain: []}
    for number in range(pairs + 1):
        for run in (ours, plain) if number % 2 else (plain, ours):
            start = time.perf_counter()
            run()
            if number:  # the first pair warms up
                times[run].append(time.perf_counter() - start)
    return {"tokens": tokens, **paired_ratio(times[plain], times[ours])}


def measure_ttft(settings: Settings, tokens: int, ratio: float, pairs: int) -> dict[str, Any]:
    """Warm ProphetKV against full over HTTP, as a client sees it."""
    with running_server(settings, precompute=False, memory_bytes=2 << 30) as server:
        client = server.client
        model_tokens = text_encoder(_tokenizer(settings))(words(2 * tokens, 1))
        text = words(2 * tokens, 1)[: model_tokens[1][tokens - 1][1]]
        times: dict[str, list[float]] = {"full": [], "prophetkv": []}
        usage: dict[str, Any] = {}
        phases: list[dict[str, float]] = []
        for number in range(pairs + 1):
            for name in ("full", "prophetkv") if number % 2 else ("prophetkv", "full"):
                start = time.perf_counter()
                first, done = 0.0, {}
                for event, data in client.ask(
                    "Which thing does the crew repair?",
                    contexts=[text],
                    strategy={"name": name, "ratio": ratio},
                    max_tokens=2,
                ):
                    if event == "token" and not first:
                        first = time.perf_counter() - start
                    if event == "done":
                        done = data
                if number:  # the first pair warms up and fills the store
                    times[name].append(first)
                    usage[name] = done["usage"]
                    if name == "prophetkv":
                        phases.append(done["timings"])
        warm = usage["prophetkv"]
        assert warm["chunk_hits"]["computed"] == 0
        return {
            "context_tokens": warm["context_tokens"],
            "recomputed_tokens": warm["recomputed_tokens"],
            "ratio_recomputed": ratio,
            "chunk_hits": warm["chunk_hits"],
            **paired_ratio(times["full"], times["prophetkv"]),
            "prophetkv_phases_ms": {name: sorted(p[name] for p in phases)[len(phases) // 2] for name in phases[0]},
            "predicted_full_prefill_ms": warm["predicted_full_prefill_ms"],
        }


def measure_ingest(settings: Settings, tokens: int) -> dict[str, Any]:
    """Ingestion with precompute, from sending the document to the end of its job, against a plain batched prefill."""
    text = words(2 * tokens, 2)
    with running_server(settings, precompute=True) as server:
        client = server.client
        path = server.folder / "document.txt"
        ids, offsets = text_encoder(_tokenizer(settings))(text)
        path.write_text(text[: offsets[tokens - 1][1]])
        rates = []
        for collection in ("one", "two"):  # the second finds all KV there: only indexing is left
            start = time.perf_counter()
            job = client.put_file(path, path.name, collection, wait=3600)["job"]
            assert job["state"] == "succeeded", job
            rates.append(tokens / (time.perf_counter() - start))
    model = load_model(settings)
    size = settings.chunk_tokens
    batch = torch.tensor([ids[start : start + size] for start in range(0, tokens - size + 1, size)])
    with torch.inference_mode():
        model.plain_logits(batch[0])
        start = time.perf_counter()
        for part in torch.split(batch, 4):
            model.plain_logits(part)
        plain = batch.numel() / (time.perf_counter() - start)
    return {
        "tokens": tokens,
        "ingest_tokens_per_s": round(rates[0], 1),
        "indexing_alone_tokens_per_s": round(rates[1], 1),
        "plain_batched_tokens_per_s": round(plain, 1),
        "share": round(rates[0] / plain, 3),
    }


class _NoSource:
    """A full prefill loads nothing."""

    def load(self, chunk: object) -> Any:
        raise AssertionError

    prefetch = compute = locate_many = load


def load_model(settings: Settings) -> Model:
    """The configured model, in this process."""
    folder = resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype)
    return Model.load(folder, settings.device, settings.dtype)


def _tokenizer(settings: Settings) -> Any:
    return load_tokenizer(resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype))


def main() -> None:
    """Measures and writes one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["full", "ttft", "ingest"], help="one of the three instead of all")
    parser.add_argument("--tokens", type=int, default=4000, help="context tokens")
    parser.add_argument("--ratio", type=float, default=0.2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("docs/results/service.json"))
    options = parser.parse_args()
    settings = load_settings()
    result: dict[str, Any] = {"command": " ".join(["benchmarks.service", *sys.argv[1:]]), "model": settings.model}
    result["conditions"] = conditions()
    if options.only in (None, "full"):
        result["full_against_plain"] = measure_full(settings, options.tokens // 2, options.pairs)
    if options.only in (None, "ttft"):
        result["ttft_over_http"] = measure_ttft(settings, options.tokens, options.ratio, options.pairs)
    if options.only in (None, "ingest"):
        result["ingest"] = measure_ingest(settings, options.tokens)
    write(options.out, result)


if __name__ == "__main__":
    main()
