"""The demonstration behind `make demo`: sample documents in, three questions, each answered cold, warm and in full.

Cold: the store holds none of the chunks (precompute is off, and the documents that the question before it used are
deleted and sent again). Warm: ProphetKV again, on the KV that is there now. Full: no reuse. Exit status 0 when every
full and every ProphetKV answer holds the fact that the documents state.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.launch import running_server
from service.cli import stream_answer
from service.client import Client
from service.models import is_cached
from service.settings import load_settings, with_settings

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "docs" / "sample"
MODELS = ("all-minilm-l6-v2", "qwen2.5-coder-0.5b-instruct")
TOP_K = 4
MAX_TOKENS = 64
QUESTIONS = (
    ("Where is the spare impeller for pump P-204 kept?", "drawer 17"),
    ("What colour are the flipper tags for grey seal pups?", "orange"),
    ("How much did the repair of RIB Alke 2 cost after the grounding at Sørbåen?", "18,400"),
)
PHASES = {
    "retrieve": "retrieve",
    "load": "load",
    "assemble": "place",
    "stage1": "stage I",
    "stage2": "stage II",
    "first_token": "first token",
    "total": "total",
}

console = Console()


def main() -> int:
    """Runs the demonstration; the exit status."""
    settings = load_settings(model=MODELS[1], embedder=MODELS[0])
    for model in MODELS:
        if not is_cached(model, settings.model_cache):
            command = [sys.executable, "-m", "service.cli", "models", "--fetch", model]
            subprocess.run(command, env=with_settings(model_dir=settings.model_cache), check=True, stdout=sys.stderr)
    console.print("starting the service ...")
    options = {"embedder": settings.embedder, "precompute": False, "memory_bytes": 256 << 20}
    with running_server(settings, **options) as server:
        ingest(server.client, sorted(SAMPLE.iterdir()))
        rows, right = ask_all(server.client)
        peak = server.peak_memory()
    Console(width=max(console.width, 110)).print(table(rows))
    console.print(f"peak memory of the server: {peak:.2f} GiB", highlight=False)
    console.print("all answers hold their fact" if right else "[red]some answer lacks its fact[/red]")
    return 0 if right else 1


def ingest(client: Client, files: list[Path]) -> None:
    """Sends the documents and waits until all are searchable."""
    with _progress() as bar:
        task = bar.add_task("ingesting", total=len(files))
        jobs = [answer["job"]["id"] for file in files if "job" in (answer := client.put_file(file, file.name))]
        for job in jobs:
            while (info := client.job(job))["state"] in ("pending", "running"):
                time.sleep(0.05)
            if info["state"] != "succeeded":
                raise SystemExit(f"{info['document']}: {info['error']}")
            bar.advance(task)


def ask_all(client: Client) -> tuple[list[tuple[str, dict[str, Any]]], bool]:
    """Asks every question cold, warm and in full; the `done` events, and whether all facts were there."""
    rows: list[tuple[str, dict[str, Any]]] = []
    right = True
    used: set[str] = set()
    for number, (question, fact) in enumerate(QUESTIONS, start=1):
        for document in used:
            client.delete(document)
        if used:
            ingest(client, [SAMPLE / document for document in sorted(used)])
        used = set()
        for name, strategy in (("cold", "prophetkv"), ("warm", "prophetkv"), ("full", "full")):
            console.print(f"\n[bold]{number} {name}:[/bold] {question}", highlight=False)
            options = {"strategy": {"name": strategy}, "top_k": TOP_K, "max_tokens": MAX_TOKENS}
            answer, done, sources = stream_answer(client, question, options)
            right &= fact in answer.lower()
            used |= {source["document"] for source in sources}
            rows.append((f"{number} {name}", done))
            if name == "cold" and done["usage"]["chunk_hits"]["computed"] != len(sources):
                raise SystemExit("the cold question found KV in the store")
    return rows, right


def table(rows: list[tuple[str, dict[str, Any]]]) -> Table:
    """Where the time went, in seconds."""
    title = "where the time went, in seconds; context tokens, and how many of them were recomputed"
    made = Table("", *PHASES.values(), "tokens", "recomputed", title=title, box=SIMPLE, padding=(0, 1, 0, 0))
    for column in made.columns:
        column.no_wrap = True
        column.justify = "right"
    for name, done in rows:
        timings, usage = done["timings"], done["usage"]
        cells = [f"{timings[f'{phase}_ms'] / 1000:.2f}" for phase in PHASES]
        made.add_row(name, *cells, str(usage["context_tokens"]), str(usage["recomputed_tokens"]))
    return made


def _progress() -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())


if __name__ == "__main__":
    raise SystemExit(main())
