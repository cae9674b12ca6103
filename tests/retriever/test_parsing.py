"""Every format through the child process, and every kind of bad file with its own message."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import docx
import pytest

from errors import UnreadableDocument, UnsupportedDocument
from retriever import parsing
from retriever.parsing import kind_of, parse, parse_bytes
from tests.retriever.files import pdf, word


def test_txt_in_utf8_utf16_and_latin1() -> None:
    text = (
        "Das grüne Boot gehört den fünf Köchen; süße Äpfel hängen über dem öden Hafen. Übermütige Möwen stören.\n" * 5
    )
    for content in (text.encode(), b"\xef\xbb\xbf" + text.encode(), text.encode("utf-16"), text.encode("latin-1")):
        assert parse(content, "txt").text == text
    assert parse(text.replace("\n", "\r\n").encode(), "txt").text == text


def test_markdown_keeps_its_source_and_knows_its_headings() -> None:
    text = "intro\n\n# Boats\n\nThe *Alke*.\n\n```\n# not a heading\n```\n\nEngines\n-------\n\nDiesel.\n"
    parsed = parse(text.encode(), "md")
    assert parsed.text == text
    assert parsed.title == "Boats"
    assert [section.heading for section in parsed.sections] == [None, "Boats", "Engines"]
    assert parsed.section_at(text.index("Alke")).heading == "Boats"
    assert parsed.section_at(text.index("Diesel")).heading == "Engines"
    assert parsed.section_at(0).heading is None


def test_html_drops_navigation_and_scripts_and_keeps_all_words() -> None:
    html = """<html><head><title>Harbour &amp; boats</title><style>p {}</style></head><body><nav>Home</nav>
    <header>Site name</header><article><header><h1>Boats</h1></header></article>
    <p>The <b>Alke</b> is<br>red.</p><script>alert(1)</script>
    <ul><li>one</li><li>two <ul><li>inner</li></ul></li></ul>
    <div>loose words <p>inside</p> tail words</div>
    <table><tr><th>name</th><th>length</th></tr><tr><td>Alke</td><td>7 m</td></tr></table>
    <h2>Rules</h2><pre>a
      b</pre><blockquote>quoted <p>and more</p></blockquote><footer>Imprint</footer></body></html>"""
    parsed = parse(html.encode(), "html")
    assert parsed.title == "Harbour & boats"
    words = parsed.text.split()
    assert {"Boats", "red.", "one", "two", "inner", "loose", "inside", "tail", "length", "quoted", "more"} <= set(words)
    assert words.count("Alke") == 2
    assert "Alke | 7 m" in parsed.text
    assert "a\n      b" in parsed.text
    for gone in ("Home", "Site name", "alert", "Imprint", "p {}"):
        assert gone not in parsed.text
    assert parsed.section_at(parsed.text.index("quoted")).heading == "Rules"


def test_html_without_blocks_and_in_another_encoding() -> None:
    assert parse(b"just words", "html").text.strip() == "just words"
    latin = '<html><head><meta charset="iso-8859-1"></head><body><p>Köche</p></body></html>'.encode("latin-1")
    assert parse(latin, "html").text.strip() == "Köche"


def test_pdf_pages_become_sections() -> None:
    parsed = parse(pdf(["High water at nine.", "Low water at three."]), "pdf")
    assert parsed.title == "Tide tables"
    assert parsed.section_at(parsed.text.index("High")).page == 1
    assert parsed.section_at(parsed.text.index("Low")).page == 2


def test_docx_headings_tables_and_title() -> None:
    content = word(
        [("Heading 1", "Boats"), ("Normal", "The Alke is red."), ("Heading 2", "Engines"), ("Normal", "Diesel.")],
        [["name", "length"], ["Alke", "7 m"]],
        "Harbour book",
    )
    parsed = parse(content, "docx")
    assert parsed.title == "Harbour book"
    assert "Alke | 7 m" in parsed.text
    assert parsed.section_at(parsed.text.index("Diesel")).heading == "Engines"


@pytest.mark.parametrize(
    ("content", "kind", "error", "message"),
    [
        (b"", "txt", UnreadableDocument, "empty"),
        (b" \n\t ", "md", UnreadableDocument, "empty"),
        (b"<html><body><script>x</script></body></html>", "html", UnreadableDocument, "no text"),
        (pdf([""]), "pdf", UnreadableDocument, "scan"),
        (pdf(["secret"], password="swordfish"), "pdf", UnreadableDocument, "encrypted"),
        (pdf(["words"])[:300], "pdf", UnreadableDocument, "broken"),
        (b"%PDF-1.7\nrubbish", "pdf", UnreadableDocument, "broken"),
        (b"plain words", "pdf", UnsupportedDocument, "named as pdf"),
        (pdf(["words"]), "txt", UnsupportedDocument, "content is a pdf"),
        (word([("Normal", "x")]), "html", UnsupportedDocument, "content is a docx"),
        (word([("Normal", "x")])[:-200], "docx", UnreadableDocument, "broken"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", "txt", UnsupportedDocument, "binary file"),
        (bytes(range(128, 256)) * 20, "txt", UnreadableDocument, "encoding"),
    ],
)
def test_bad_files_say_what_is_wrong(content: bytes, kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse(content, kind)


def test_a_zip_that_is_no_docx_and_a_bomb() -> None:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("a.txt", "x")
    with pytest.raises(UnsupportedDocument, match="zip archive"):
        parse(sink.getvalue(), "docx")
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("word/document.xml", bytes(300 << 20))
    with pytest.raises(UnreadableDocument, match="inflates"):
        parse(sink.getvalue(), "docx")


def test_a_parser_that_dies_or_hangs_costs_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    # An XML bomb of nested entities: lxml refuses it, whatever else happens the child is limited.
    entities = "".join(f'<!ENTITY e{i} "{f"&e{i - 1};" * 10}">' for i in range(1, 12))
    bomb = f'<?xml version="1.0"?><!DOCTYPE x [<!ENTITY e0 "ha">{entities}]><x>&e11;</x>'
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w") as archive:
        archive.writestr("word/document.xml", bomb)
        archive.writestr("[Content_Types].xml", "<x/>")
    with pytest.raises(UnreadableDocument):
        parse(sink.getvalue(), "docx")
    monkeypatch.setattr(parsing, "_SECONDS", 0.01)
    with pytest.raises(UnreadableDocument, match="stopped"):
        parse(b"fine", "txt")


@pytest.mark.parametrize(
    ("filename", "media_type", "kind"),
    [
        ("a.txt", None, "txt"),
        ("A.B.PDF", "application/octet-stream", "pdf"),
        ("x.markdown", None, "md"),
        (None, "text/html; charset=utf-8", "html"),
        ("noending", "application/pdf", "pdf"),
    ],
)
def test_the_kind_follows_from_name_then_type(filename: str | None, media_type: str | None, kind: str) -> None:
    assert kind_of(filename, media_type) == kind


@pytest.mark.parametrize("filename", ["a.exe", "a.doc", "a.xlsx", "noending", None, "a.pdf.zip"])
def test_unknown_types_are_refused_by_name(filename: str | None) -> None:
    with pytest.raises(UnsupportedDocument, match="supported are"):
        kind_of(filename, "application/octet-stream")


def test_markdown_lines_end_at_newlines_only() -> None:
    text = "a\u2028b\x0cc\n\n# Head\n\nbody"
    parsed = parse_bytes(text.encode(), "md")
    assert parsed.section_at(text.index("body")).heading == "Head"
    assert parsed.sections[1].start == text.index("# Head")


def test_html_nested_tables_and_broken_headings() -> None:
    page = (
        "<h2>Head<br>two</h2><table><tr><td><table><tr><td>A</td><td>B</td></tr></table></td></tr></table><p>x<br>y</p>"
    )
    parsed = parse_bytes(page.encode(), "html")
    assert parsed.text == "Head two\n\nA | B\nx\ny\n\n"
    assert parsed.title == "Head two"


def test_docx_merged_cells_are_told_once(tmp_path: Path) -> None:
    document = docx.Document()
    table = document.add_table(1, 3)
    table.cell(0, 0).merge(table.cell(0, 1)).text = "Fee"
    table.cell(0, 2).text = "5"
    document.save(str(tmp_path / "t.docx"))
    assert parse_bytes((tmp_path / "t.docx").read_bytes(), "docx").text.strip() == "Fee | 5"
