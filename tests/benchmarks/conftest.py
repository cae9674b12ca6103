from __future__ import annotations

from pathlib import Path

import pytest

from engine.model import encode_text, load_tokenizer
from retriever.documents import TextEncoder


@pytest.fixture(scope="session")
def encode(smollm: Path) -> TextEncoder:
    """A real tokenizer."""
    tokenizer = load_tokenizer(smollm)
    return lambda text: encode_text(tokenizer, text)
