"""The command `prophetkv`: serve, ingest, ask, models, doctor, plan, config, store."""

from __future__ import annotations

import logging
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from errors import ConfigError, ProphetKVError
from service.client import Client
from service.names import document_id
from service.settings import PREFIX, Settings, load_settings
from service.store_cli import app as store_app
from service.version import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Long-context RAG with chunk KV reuse.",
)
app.add_typer(store_app, name="store")
console = Console()

Url = Annotated[str, typer.Option(help="the server's address")]
_DEFAULT_URL = "http://127.0.0.1:8000"


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help=f"overrides {PREFIX}HOST")] = None,
    port: Annotated[int | None, typer.Option(help=f"overrides {PREFIX}PORT")] = None,
) -> None:
    """Run the server in the foreground."""
    overrides = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    settings = _settings(**overrides)
    _log_to_stderr(settings)
    from service.server import serve as run

    raise typer.Exit(run(settings))


@app.command()
def ingest(
    paths: Annotated[list[Path], typer.Argument(exists=True, help="files, or folders to walk")],
    collection: str = "default",
    url: Url = _DEFAULT_URL,
    wait: Annotated[bool, typer.Option(help="wait until everything is indexed and precomputed")] = True,
) -> None:
    """Send documents to a running server."""
    files: dict[str, Path] = {}  # by document id
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                files[document_id(file.relative_to(path).as_posix() if path.is_dir() else file.name)] = file
    failed = 0
    with Client(url) as client, _progress() as bar:
        jobs = {}
        task = bar.add_task("sending", total=len(files))
        for name, file in files.items():
            try:
                answer = client.put_file(file, name, collection)
                if "job" in answer:
                    jobs[name] = answer["job"]["id"]
                bar.console.print(f"{name}: {answer['result']}")
            except ProphetKVError as error:
                failed += 1
                bar.console.print(f"[red]{name}: {error}[/red]")
            bar.advance(task)
        if wait:
            failed += _follow(client, jobs, bar)
    raise typer.Exit(1 if failed else 0)


@app.command()
def ask(
    question: str,
    collection: str = "default",
    strategy: Annotated[
        str | None, typer.Option(help="auto, full, prefix, naive, epic, cacheblend, kvshare, prophetkv or random")
    ] = None,
    ratio: Annotated[float | None, typer.Option(min=0.0, max=1.0)] = None,
    top_k: Annotated[int | None, typer.Option(min=1)] = None,
    url: Url = _DEFAULT_URL,
) -> None:
    """Ask a running server and stream the answer."""
    options: dict[str, Any] = {"collection": collection}
    if strategy is not None:
        options["strategy"] = {"name": strategy} | ({"ratio": ratio} if ratio is not None else {})
    elif ratio is not None:
        options["strategy"] = {"name": "auto", "ratio": ratio}
    if top_k is not None:
        options["top_k"] = top_k
    with Client(url) as client:
        try:
            stream_answer(client, question, options)
        except ProphetKVError as error:
            _fail(error)


@app.command()
def models(fetch: Annotated[str | None, typer.Option(help="fetch and convert this manifest entry now")] = None) -> None:
    """List the manifest, or fetch a model ahead of time."""
    from service.models import MANIFEST, is_cached, resolve_embedder, resolve_language_model

    settings = _settings()
    _log_to_stderr(settings)
    if fetch is not None:
        try:
            if fetch in MANIFEST and MANIFEST[fetch].purpose == "embedder":
                console.print(str(resolve_embedder(fetch, settings.model_cache)))
            else:
                console.print(str(resolve_language_model(fetch, settings.model_cache, settings.device, settings.dtype)))
        except ProphetKVError as error:
            _fail(error)
        return
    table = Table("name", "purpose", "file", "size", "licence", "cached")
    for name, entry in MANIFEST.items():
        cached = "yes" if is_cached(name, settings.model_cache) else "no"
        table.add_row(name, entry.purpose, entry.file, f"{entry.nbytes / 1e6:.0f} MB", entry.licence, cached)
    console.print(table)


@app.command()
def doctor(
    codecs: Annotated[bool, typer.Option(help="also what every lossy codec costs this model; takes minutes")] = False,
) -> None:
    """Test the configured model and measure this machine: is reuse correct and does it pay here?"""
    settings = _settings()
    _log_to_stderr(settings)
    from cache_store.codec import CODECS
    from engine.model import load_model
    from engine.plain import PlainModel
    from service.doctor import examine
    from service.models import resolve_language_model

    try:
        folder = resolve_language_model(settings.model, settings.model_cache, settings.device, settings.dtype)
        model = load_model(folder, settings.device, settings.dtype)
    except ProphetKVError as error:
        _fail(error)
    if isinstance(model, PlainModel):
        console.print(
            f"[red]FAIL[/red] reuse: {escape(model.refused)}; every answer is a full prefill", highlight=False
        )
        raise typer.Exit(1)
    console.print(f"{settings.model} on {model.device} in {str(model.dtype).removeprefix('torch.')}")
    failed = 0
    for finding in examine(model, settings, tuple(CODECS) if codecs else ()):
        mark = {True: "[green]ok  [/green]", False: "[red]FAIL[/red]", None: "    "}[finding.passed]
        console.print(f"{mark} {finding.what}: {finding.detail}", highlight=False)
        failed += finding.passed is False
    raise typer.Exit(1 if failed else 0)


@app.command()
def plan(
    model: Annotated[str, typer.Option(help="such as llama-3.1-8b, a folder, or a config.json")],
    gpu: Annotated[str, typer.Option(help="such as h100, h200, a100, l40s, l4")],
    medium: Annotated[str, typer.Option(help="GB/s, or such as host-pcie5, nvme-gen4, 100gbe, redis")],
    length: Annotated[list[int] | None, typer.Option(min=1, max=1 << 20, help="context tokens; repeatable")] = None,
    ratio: Annotated[float, typer.Option(min=0.0, max=1.0)] = 0.2,
    codec: Annotated[str, typer.Option(help="raw, int8, fp8 or int4")] = "raw",
) -> None:
    """Does reuse pay for this model, GPU and medium? On paper: neither is needed."""
    from service.plan import CODECS, GPUS, Paper, medium_rate, report, shape_of

    try:
        for kind, name, known in (("GPU", gpu, GPUS), ("codec", codec, CODECS)):
            if name not in known:
                raise ConfigError(f"no {kind} {name!r}: there are {', '.join(known)}")
        shape = shape_of(model, _settings().model_cache)
        paper = Paper(shape, GPUS[gpu], medium_rate(medium), ratio, codec)
    except ProphetKVError as error:
        _fail(error)
    for part in report(paper, length or (4096, 8192, 16384, 32768, 65536, 131072), codec, medium):
        console.print(part, highlight=False, soft_wrap=isinstance(part, str))


@app.command()
def config() -> None:
    """Print the effective settings and where each comes from; secrets are hidden."""
    settings = _settings()
    origins, values = settings.origins(), settings.shown()
    for name, field in Settings.model_fields.items():
        print(f"{PREFIX}{name.upper()}={values[name]}  # {origins[name]}: {field.description}")


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="print the version")] = False) -> None:
    if version:
        console.print(__version__)
        raise typer.Exit


def stream_answer(
    client: Client, question: str, options: dict[str, Any]
) -> tuple[str, dict[str, Any], list[dict[str, Any]]]:
    """Prints an answer as it comes and its sources. Returns the answer, the `done` event's data, and the sources."""
    answer, done, sources = "", {}, []
    for name, data in client.ask(question, **options):
        if name == "sources":
            sources = data["sources"]
        elif name == "token":
            answer += data["text"]
            console.print(data["text"], end="", markup=False, highlight=False, soft_wrap=True)
        elif name == "done":
            done = data
    console.print()
    for source in sources:
        console.print(
            f"  [{source['index']}] {_place(source)}", markup=False, style="dim", highlight=False, soft_wrap=True
        )
    return answer, done, sources


def _place(source: dict[str, Any]) -> str:
    """Document, page or heading, and characters of a source."""
    place = f"characters {source['start']} to {source['end']}"
    if "heading" in source:
        place = f"{source['heading']!r}, {place}"
    if "page" in source:
        first, last = source["page"], source["last_page"]
        place = (f"page {first}" if first == last else f"pages {first} to {last}") + f", {place}"
    return f"{source.get('document', 'context')}, {place}"


def _follow(client: Client, jobs: dict[str, str], bar: Progress) -> int:
    """Shows the jobs' progress until all have ended; returns how many failed."""
    failed = 0
    tasks = {name: bar.add_task(name, total=None) for name in jobs}
    while jobs:
        for name, job in list(jobs.items()):
            info = client.job(job)
            progress = info["progress"]
            bar.update(
                tasks[name],
                description=f"{name}: {progress['stage']}",
                completed=progress["done"],
                total=progress["total"] or None,
            )
            if info["state"] not in ("pending", "running"):
                del jobs[name]
                bar.update(tasks[name], description=f"{name}: {info['state']}", completed=1, total=1)
                if info["state"] != "succeeded":
                    failed += 1
                    bar.console.print(f"[red]{name}: {info['error']}[/red]")
        time.sleep(0.2)
    return failed


def _progress() -> Progress:
    return Progress(
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    )


def _settings(**overrides: object) -> Settings:
    try:
        return load_settings(**overrides)
    except ProphetKVError as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
    raise typer.Exit(1)


def _log_to_stderr(settings: Settings) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=settings.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for noisy in ("httpx", "httpcore", "sentence_transformers", "filelock", "urllib3"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _add_commands() -> None:
    """Adds what other packages of ours offer, which this one must not import."""
    for entry in entry_points(group="prophetkv.commands"):
        app.add_typer(entry.load(), name=entry.name)


def main() -> None:
    """Entry point."""
    _add_commands()
    app()


if __name__ == "__main__":
    main()
