"""Names that callers choose: which are legal, and a legal document id for any file."""

from __future__ import annotations

import hashlib
import re

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"


def document_id(path: str) -> str:
    """A file's path as a document id; where it has folders or other characters, with a digest that keeps it unique."""
    if re.fullmatch(NAME_PATTERN, path):
        return path
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", path)[-100:].strip("-._") or "file"
    return f"{slug}-{hashlib.sha256(path.encode()).hexdigest()[:8]}"
