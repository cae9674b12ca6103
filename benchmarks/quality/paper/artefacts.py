"""A table or figure with what is measured, the paper's numbers beside it, and its files: CSV, Markdown, PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality.paper.published import Published
from benchmarks.quality.tables import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Artefact:
    """stem: its files' name; measured: in words; table: None when it was not run, for which `notes` give the reason.

    detail: more than the page can show, as CSV only; draw: makes the PNG; notes: what must be known to read it;
    published: the paper's own numbers, or words.
    """

    stem: str
    title: str
    measured: str
    table: Table | None = None
    detail: Table | None = None
    draw: Callable[[Path], None] | None = None
    notes: Sequence[str] = ()
    published: Sequence[Published | str] = ()
    failed: bool = False


def write(folder: Path, artefact: Artefact) -> str:
    """Writes the artefact's files; returns its section of the index page."""
    lines = [f"## {artefact.title}", "", artefact.measured, ""]
    if artefact.table is None:
        lines += ["**Not run.**", ""]
    else:
        (folder / f"{artefact.stem}.csv").write_text(artefact.table.csv())
        (folder / f"{artefact.stem}.md").write_text(artefact.table.markdown())
        links = [f"[CSV]({artefact.stem}.csv)", f"[Markdown]({artefact.stem}.md)"]
        if artefact.detail is not None:
            (folder / f"{artefact.stem}-detail.csv").write_text(artefact.detail.csv())
            links.append(f"[detail]({artefact.stem}-detail.csv)")
        lines += [artefact.table.markdown(), ", ".join(links), ""]
        if artefact.draw is not None:
            artefact.draw(folder / f"{artefact.stem}.png")
            lines += [f"![{artefact.title}]({artefact.stem}.png)", ""]
    lines += [f"- {note}" for note in artefact.notes]
    for told in artefact.published:
        if isinstance(told, str):
            lines += ["", f"The paper, {told}"]
        else:
            lines += ["", f"The paper, {told.source}:", "", told.table.markdown()]
    return "\n".join(lines) + "\n"
