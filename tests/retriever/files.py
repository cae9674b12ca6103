"""Real documents of every format, made by the libraries that people make them with."""

from __future__ import annotations

import io
from collections.abc import Sequence

import docx
from reportlab.lib import pdfencrypt
from reportlab.pdfgen.canvas import Canvas


def pdf(pages: Sequence[str], title: str = "Tide tables", password: str | None = None) -> bytes:
    sink = io.BytesIO()
    encrypt = pdfencrypt.StandardEncryption(password) if password else None
    canvas = Canvas(sink, encrypt=encrypt)
    canvas.setTitle(title)
    for page in pages:
        for number, line in enumerate(page.splitlines()):
            canvas.drawString(72, 720 - 14 * number, line)
        canvas.showPage()
    canvas.save()
    return sink.getvalue()


def word(blocks: Sequence[tuple[str, str]], table: Sequence[Sequence[str]] = (), title: str = "") -> bytes:
    """`blocks`: pairs of style and text."""
    document = docx.Document()
    document.core_properties.title = title
    for style, text in blocks:
        document.add_paragraph(text, style=style)
    if table:
        cells = document.add_table(len(table), len(table[0]))
        for row, values in enumerate(table):
            for column, value in enumerate(values):
                cells.cell(row, column).text = value
    sink = io.BytesIO()
    document.save(sink)
    return sink.getvalue()
