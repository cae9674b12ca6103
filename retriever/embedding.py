"""Sentence embeddings.

The embedder reads fewer word pieces than a chunk has tokens, so a chunk is embedded in windows.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from errors import ModelUnavailable

Vectors = NDArray[np.float32]
_BATCH = 4  # windows at a time: larger batches are no faster on a CPU and take more memory


class Embedder:
    """A sentence-transformers model. Vectors have unit length, so the inner product is the cosine."""

    def __init__(self, folder: Path) -> None:
        try:
            self._model = SentenceTransformer(str(folder), device="cpu", local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise ModelUnavailable(f"cannot load the embedder from {folder}: {error}") from error
        size = self._model.get_embedding_dimension()
        assert size is not None
        self.dim: int = size
        self.digest = _folder_digest(folder)
        self._lock = threading.Lock()  # one at a time: embedding must not take all cores from the device thread
        self._queries = 0  # that wait or run; indexing lets them go first
        self._no_queries = threading.Condition()

    def embed_chunks(self, texts: Sequence[str]) -> list[Vectors]:
        """For each text the vectors of its windows, float32 [windows, dim]."""
        windows = [self._windows(text) for text in texts]
        flat = [window for group in windows for window in group]
        batches = []
        for start in range(0, len(flat), _BATCH):
            with self._no_queries:
                self._no_queries.wait_for(lambda: self._queries == 0)
            batches.append(self._embed(flat[start : start + _BATCH]))
        vectors = np.concatenate(batches) if batches else np.empty((0, self.dim), np.float32)
        ends = np.cumsum([len(group) for group in windows])
        return np.split(vectors, ends[:-1]) if windows else []

    def embed_query(self, text: str) -> Vectors:
        """float32 [dim]; a query longer than the window is the mean of its windows."""
        with self._no_queries:
            self._queries += 1
        try:
            mean: Vectors = self._embed(self._windows(text)).mean(axis=0)
        finally:
            with self._no_queries:
                self._queries -= 1
                self._no_queries.notify_all()
        return mean / np.float32(max(float(np.linalg.norm(mean)), 1e-12))

    def _embed(self, texts: list[str]) -> Vectors:
        with self._lock:
            vectors = self._model.encode(
                texts, batch_size=_BATCH, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
            )
        return np.asarray(vectors, dtype=np.float32)

    def _windows(self, text: str) -> list[str]:
        """Equal windows of at most what the model reads, cut between word pieces."""
        tokenizer = self._model.tokenizer
        offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False).offset_mapping
        limit = self._model.get_max_seq_length() - tokenizer.num_special_tokens_to_add()
        count = max(1, -(-len(offsets) // limit))
        edges = [round(index * len(offsets) / count) for index in range(count + 1)]
        if count == 1:
            return [text]
        return [text[offsets[a][0] : offsets[b - 1][1]] for a, b in pairwise(edges)]


def _folder_digest(folder: Path) -> str:
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".safetensors", ".json", ".txt"):
            sha.update(path.relative_to(folder).as_posix().encode() + b"\0")
            with path.open("rb") as file:
                sha.update(hashlib.file_digest(file, "sha256").digest())
    return sha.hexdigest()
