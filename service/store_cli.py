"""The command `prophetkv store`. Imports nothing heavy until a subcommand runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from errors import ProphetKVError
from service.settings import Settings, load_settings

app = typer.Typer(no_args_is_help=True, help="Look after stored chunk KV, on disk and in Redis.")
console = Console()

Collection = Annotated[str | None, typer.Option(help="only chunks of this collection")]


@app.command()
def stats() -> None:
    """Print what the disk and Redis hold. The memory tier's figures are in the server's /metrics."""
    from service import maintenance

    with _settings() as settings:
        table = Table("tier", "entries", "MB", "budget in MB")
        for tier, entries, nbytes, budget in maintenance.stats(settings):
            table.add_row(tier, str(entries), f"{nbytes / 1e6:.1f}", f"{budget / 1e6:.0f}" if budget else "its own")
        console.print(table)


@app.command()
def verify(remove: Annotated[bool, typer.Option(help="remove what is damaged")] = False) -> None:
    """Read every entry and check it against its checksums and its name; exit status 1 when one is damaged and stays."""
    from service import maintenance

    with _settings() as settings:
        good = bad = 0
        for tier, key, reason in maintenance.verify(settings, remove):
            good, bad = good + (reason is None), bad + (reason is not None)
            if reason is not None:
                console.print(f"{tier} {key}: {reason}", highlight=False)
        console.print(f"{good} entries are whole, {bad} damaged" + " and removed" * remove, highlight=False)
        raise typer.Exit(1 if bad and not remove else 0)


@app.command()
def purge(
    collection: Collection = None,
    document: Annotated[str | None, typer.Option(help="only chunks of this document of the collection")] = None,
) -> None:
    """Remove entries: all, or those of a collection or document. They are computed again when needed."""
    from service import maintenance

    with _settings() as settings:
        console.print(f"removed {maintenance.purge(settings, collection, document)} entries", highlight=False)


@app.command()
def warm(collection: Collection = None) -> None:
    """Compute the KV of all chunks that no tier holds. No server may be running on the data folder."""
    from service import maintenance

    with _settings() as settings:
        tiers = asyncio.run(maintenance.warm(settings, collection))
        there = tiers.total() - tiers["computed"]
        console.print(f"{tiers['computed']} chunks computed, {there} were there", highlight=False)


@contextmanager
def _settings() -> Iterator[Settings]:
    """The settings; what fails is told, with exit status 1."""
    try:
        yield load_settings()
    except ProphetKVError as error:
        console.print(f"[red]{error}[/red]", highlight=False)
        raise typer.Exit(1) from None
