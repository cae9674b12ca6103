"""Bytes to text: TXT, Markdown, HTML, PDF, DOCX.

`parse` runs `parse_bytes` in a child process with limits on memory, CPU and wall time, for these formats come from
strangers and a crashing, looping or exploding parser must cost one request, not the service. The child speaks JSON.

Libraries: pypdfium2 (PDFium; permissive, fast, good text order), python-docx, BeautifulSoup with lxml (keeps everything
that is not navigation; main-text heuristics drop content without a word), markdown-it-py, charset-normalizer.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
import zipfile
from dataclasses import asdict
from itertools import pairwise
from pathlib import PurePosixPath

from errors import ProphetKVError, UnreadableDocument, UnsupportedDocument
from retriever.documents import ParsedDocument, Section

KINDS = {
    ".txt": "txt",
    ".text": "txt",
    ".md": "md",
    ".markdown": "md",
    ".html": "html",
    ".htm": "html",
    ".pdf": "pdf",
    ".docx": "docx",
}
MEDIA_TYPES = {
    "text/plain": "txt",
    "text/markdown": "md",
    "text/html": "html",
    "application/pdf": "pdf",
    "application/vnd.openxmlformats-officedocument.wordprocessingml.document": "docx",
}
_HTML_HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
_HTML_BLOCKS = {
    *_HTML_HEADINGS,
    *("address", "article", "aside", "blockquote", "dd", "details", "div", "dl", "dt", "fieldset", "figcaption"),
    *("figure", "footer", "form", "header", "hr", "li", "main", "ol", "p", "section", "summary", "table", "tbody"),
    *("td", "tfoot", "th", "thead", "ul"),
}
_HTML_SKIPPED = {"script", "style", "noscript", "template", "head", "nav", "svg"}
_HTML_PAGE_SKIPPED = _HTML_SKIPPED | {"header", "footer"}  # of the page; those of its content are content
_HTML_CONTENT = {"main", "article", "section"}
_MAX_INFLATED = 200 << 20
_MAX_CHARACTERS = 20_000_000
_SECONDS = 60
_CHILD_MEMORY = 2 << 30


def kind_of(filename: str | None, media_type: str | None) -> str:
    """The document's kind by its name, else by its media type. Raises UnsupportedDocument."""
    suffix = PurePosixPath(filename or "").suffix.lower()
    if suffix in KINDS:
        return KINDS[suffix]
    essence = (media_type or "").split(";")[0].strip().lower()
    if not suffix and essence in MEDIA_TYPES:
        return MEDIA_TYPES[essence]
    raise UnsupportedDocument(
        f"cannot tell a supported type from the name {filename!r} and content type {media_type!r}; "
        f"supported are {', '.join(sorted(KINDS))}"
    )


def parse(content: bytes, kind: str) -> ParsedDocument:
    """Parses in a child process. Raises UnsupportedDocument or UnreadableDocument with the reason."""
    if not content.strip():
        raise UnreadableDocument("the document is empty")
    try:
        child = subprocess.run(
            [sys.executable, "-m", "retriever.parsing", kind],
            input=content,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UnreadableDocument(f"parsing took over {_SECONDS} s and was stopped") from None
    try:
        answer = json.loads(child.stdout)
    except ValueError:
        raise UnreadableDocument(
            f"the parser died (exit status {child.returncode}): the {kind} file is broken, or needs too much memory"
        ) from None
    if "error" in answer:
        known = {error.__name__: error for error in (UnsupportedDocument, UnreadableDocument)}
        raise known[answer["error"]](answer["message"])
    return ParsedDocument(answer["text"], answer["title"], tuple(Section(**section) for section in answer["sections"]))


def parse_bytes(content: bytes, kind: str) -> ParsedDocument:
    """Parses here and now.

    Raises UnsupportedDocument when the content is of another kind, UnreadableDocument when bad.
    """
    _check_kind(content, kind)
    parsed = _PARSERS[kind](content)
    if not parsed.text.strip():
        raise UnreadableDocument(f"no text in the {kind} file" + (": is it a scan?" if kind == "pdf" else ""))
    if len(parsed.text) > _MAX_CHARACTERS:
        raise UnreadableDocument(f"{len(parsed.text)} characters of text; the limit is {_MAX_CHARACTERS}")
    return parsed


def _check_kind(content: bytes, kind: str) -> None:
    """Raises UnsupportedDocument unless the content looks like its kind."""
    head = content[:1024]
    found = None
    if b"%PDF-" in head:
        found = "pdf"
    elif head.startswith(b"PK\x03\x04"):
        found = "docx" if _is_docx(content) else "zip archive"
    elif b"\x00" in head and not head.startswith((b"\xff\xfe", b"\xfe\xff")):
        found = "binary file"
    elif kind in ("pdf", "docx"):
        found = "text file or something unknown"
    if found is not None and found != kind:
        raise UnsupportedDocument(f"the file is named as {kind} but its content is a {found}")


def _is_docx(content: bytes) -> bool:
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if sum(info.file_size for info in archive.infolist()) > _MAX_INFLATED:
                raise UnreadableDocument(f"the archive inflates to more than {_MAX_INFLATED} bytes")
    except zipfile.BadZipFile as error:
        raise UnreadableDocument(f"broken zip container: {error}") from error
    return "word/document.xml" in names


def _decode(content: bytes) -> str:
    """UTF-8, UTF-16 with a mark, else what charset-normalizer is sure of."""
    from charset_normalizer import from_bytes

    for encoding in ("utf-8-sig", "utf-16") if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig",):
        try:
            return content.decode(encoding).replace("\r\n", "\n")
        except UnicodeDecodeError:
            continue
    best = from_bytes(content).best()
    if best is None or b"\x00" in content:
        raise UnreadableDocument("the text is in no known character encoding; save it as UTF-8")
    return str(best).replace("\r\n", "\n")


def _parse_txt(content: bytes) -> ParsedDocument:
    return ParsedDocument(_decode(content))


def _parse_markdown(content: bytes) -> ParsedDocument:
    """Keeps the source as it is, for it reads well; headings become sections, the first the title."""
    from markdown_it import MarkdownIt

    text = _decode(content)
    starts = [0]
    for line in text.split("\n"):  # not splitlines: Markdown knows no other line ends, such as form feeds
        starts.append(starts[-1] + len(line) + 1)
    tokens = MarkdownIt().parse(text)
    headings = [
        Section(starts[token.map[0]], heading=inline.content)
        for token, inline in pairwise(tokens)
        if token.type == "heading_open" and token.map
    ]
    title = headings[0].heading if headings else None
    return ParsedDocument(text, title, _from_zero(headings))


def _parse_html(content: bytes) -> ParsedDocument:
    """Keeps every word but navigation and the like: what a main-text heuristic drops is lost without a trace."""
    from bs4 import BeautifulSoup, Tag
    from bs4.element import NavigableString, PreformattedString

    soup = BeautifulSoup(content, "lxml")
    builder = _Builder()
    line: list[str] = []

    def flush(end: str = "\n\n", heading: bool = False) -> None:
        words = " ".join("".join(line).split())
        line.clear()
        builder.add(words, end, heading=words if heading else None)

    def walk(node: Tag, in_content: bool = False) -> None:
        for child in node.children:
            if isinstance(child, NavigableString):
                if not isinstance(child, PreformattedString):  # comments, declarations
                    line.append(child)
            elif not isinstance(child, Tag) or child.name in (_HTML_SKIPPED if in_content else _HTML_PAGE_SKIPPED):
                continue
            elif child.name == "pre":
                flush()
                builder.add(child.get_text())
            elif child.name == "tr" and child.find("table") is None:  # a table in a cell is no row but layout
                flush()
                line.append(" | ".join(cell.get_text(" ", strip=True) for cell in child.find_all(["td", "th"])))
                flush("\n")
            elif child.name == "br":
                line.append(" ") if node.name in _HTML_HEADINGS else flush("\n")
            elif child.name in _HTML_BLOCKS:
                flush()
                walk(child, in_content or child.name in _HTML_CONTENT)
                flush(heading=child.name in _HTML_HEADINGS)
            else:
                walk(child, in_content)

    walk(soup.body or soup)
    flush()
    return builder.document(soup.title.get_text(" ", strip=True) if soup.title else None)


def _parse_pdf(content: bytes) -> ParsedDocument:
    import pypdfium2

    try:
        pdf = pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise UnreadableDocument("the PDF is encrypted; remove the password and send it again") from error
        raise UnreadableDocument(f"the PDF is broken: {error}") from error
    builder = _Builder()
    for number, page in enumerate(pdf, start=1):
        builder.add(page.get_textpage().get_text_bounded().replace("\r\n", "\n"), page=number)
    return builder.document(pdf.get_metadata_dict().get("Title") or None)


def _parse_docx(content: bytes) -> ParsedDocument:
    import docx
    from docx.table import Table
    from lxml.etree import LxmlError

    try:
        document = docx.Document(io.BytesIO(content))
        builder = _Builder()
        for block in document.iter_inner_content():
            if isinstance(block, Table):
                for row in block.rows:
                    merged_once = {id(cell._tc): cell for cell in row.cells}.values()
                    builder.add(" | ".join(cell.text.strip() for cell in merged_once), "\n")
            else:
                style = (block.style.name if block.style is not None else None) or ""
                is_heading = style.startswith(("Heading", "Title"))
                builder.add(block.text, heading=block.text.strip() if is_heading else None)
    except (KeyError, ValueError, LxmlError, zipfile.BadZipFile) as error:
        raise UnreadableDocument(f"the DOCX is broken: {error}") from error
    return builder.document(document.core_properties.title or None)


class _Builder:
    """Joins blocks of text and notes the sections that they open."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self._length = 0
        self._sections: list[Section] = []

    def add(self, text: str, end: str = "\n\n", page: int | None = None, heading: str | None = None) -> None:
        """Appends a block; a page or heading starts a section."""
        text = text.strip()
        if not text:
            return
        if page is not None or heading:
            self._sections.append(Section(self._length, page, heading))
        self.parts.append(text + end)
        self._length += len(text) + len(end)

    def document(self, title: str | None) -> ParsedDocument:
        """What was added, with `title` or else the first heading."""
        first = next((section.heading for section in self._sections if section.heading), None)
        return ParsedDocument("".join(self.parts), title or first, _from_zero(self._sections))


def _from_zero(sections: list[Section]) -> tuple[Section, ...]:
    if sections and sections[0].start > 0:
        sections = [Section(0), *sections]
    return tuple(sections)


_PARSERS = {
    "txt": _parse_txt,
    "md": _parse_markdown,
    "html": _parse_html,
    "pdf": _parse_pdf,
    "docx": _parse_docx,
}


def _main() -> None:
    """The child process: kind as argument, document on standard input, JSON on standard output."""
    resource.setrlimit(resource.RLIMIT_AS, (_CHILD_MEMORY, _CHILD_MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (_SECONDS, _SECONDS))
    try:
        answer = asdict(parse_bytes(sys.stdin.buffer.read(), sys.argv[1]))
    except ProphetKVError as error:
        answer = {"error": type(error).__name__, "message": str(error)}
    except Exception as error:  # any parser's own exception means that the file is bad
        answer = {"error": "UnreadableDocument", "message": f"cannot be parsed: {type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    _main()
