from __future__ import annotations

from pathlib import Path

import pytest

from engine.model import load_tokenizer, text_encoder
from retriever.documents import TextEncoder


@pytest.fixture(scope="session")
def encode(smollm: Path) -> TextEncoder:
    """A real tokenizer."""
    return text_encoder(load_tokenizer(smollm))
