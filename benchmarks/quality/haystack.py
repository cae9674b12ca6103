"""What needles are hidden in: sentences of a text at a path, or of the sample documents that the project ships."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

from errors import BadRequest, ConfigError, InvalidInput
from retriever.parsing import kind_of, parse_bytes

SHIPPED = Path(__file__).parents[2] / "docs" / "sample"

# RULER repeats one line of short plain sentences; these are ours.
NOISE = "The river runs slow. The hill is steep. The night is cool. On we walk. Out and home once more."

_SENTENCE_END = re.compile(r"""(?<=[.!?])\s+|(?<=[.!?]["')\]])\s+""")
_PARAGRAPH_END = re.compile(r"\n\s*\n")


def read_sentences(path: Path | None) -> tuple[str, ...]:
    """Sentences of a haystack, white space made single.

    `path`: a text, a document that the service can parse, a folder of these, or JSON `{"text": ...}` as RULER keeps its
    essays. None: the documents under docs/sample, of which only full sentences are taken, for they hold tables too.

    Raises InvalidInput when there is nothing at `path` or no sentence in it, ConfigError when nothing is shipped.
    """
    if path is None:
        if not SHIPPED.is_dir():
            raise ConfigError(f"the sample documents are not at {SHIPPED}; give the path of a haystack text")
        return _shipped()
    if not path.exists():
        raise InvalidInput(f"no haystack at {path}", field="haystack")
    sentences = tuple(_sentences(path))
    if not sentences:
        raise InvalidInput(f"no text in the haystack at {path}", field="haystack")
    return sentences


def split_sentences(text: str) -> list[str]:
    """Sentences in order; a paragraph's end ends a sentence too."""
    pieces = (piece for paragraph in _PARAGRAPH_END.split(text) for piece in _SENTENCE_END.split(paragraph))
    return [" ".join(piece.split()) for piece in pieces if piece.strip()]


@cache
def _shipped() -> tuple[str, ...]:
    return tuple(sentence for sentence in _sentences(SHIPPED) if _is_prose(sentence))


def _sentences(path: Path) -> list[str]:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [sentence for file in files for sentence in split_sentences(_read(file))]


def _read(path: Path) -> str:
    try:
        if path.suffix == ".json":
            return str(json.loads(path.read_text())["text"])
        return parse_bytes(path.read_bytes(), kind_of(path.name, None)).text
    except (BadRequest, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"the haystack file {path} cannot be read: {error}", field="haystack") from error


def _is_prose(sentence: str) -> bool:
    return sentence[0].isupper() and sentence.endswith(".") and 6 <= len(sentence.split()) <= 60
