"""The vector index of one collection: exact inner product in FAISS, ids chosen by the catalogue.

Derived data: it is rebuilt from the vectors in the catalogue whenever its file is missing, damaged or of another state.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retriever.embedding import Vectors

log = logging.getLogger(__name__)

_WINDOW_BITS = 12  # a chunk's vectors have ids chunk_id << 12 | window


class VectorIndex:
    """Maps chunks, each with one or more vectors, to search hits. Not thread-safe: the retriever locks."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._index: Any = faiss.IndexIDMap2(faiss.IndexFlatIP(dim))

    def add(self, chunk_id: int, vectors: Vectors) -> None:
        """Adds a chunk's vectors, float32 [windows, dim]."""
        assert 0 < len(vectors) <= 1 << _WINDOW_BITS
        self._index.add_with_ids(vectors, (chunk_id << _WINDOW_BITS) + np.arange(len(vectors), dtype=np.int64))

    def remove(self, chunk_ids: Iterable[int]) -> None:
        """Removes the chunks' vectors; unknown ids are fine."""
        wanted = np.fromiter(chunk_ids, dtype=np.int64)
        if len(wanted):
            held: NDArray[np.int64] = faiss.vector_to_array(self._index.id_map)
            self._index.remove_ids(held[np.isin(held >> _WINDOW_BITS, wanted)])

    def search(self, vector: Vectors, count: int) -> list[tuple[int, float]]:
        """The `count` best chunks as (chunk id, score), best first; a chunk scores as its best window."""
        best: dict[int, float] = {}
        fetch = count
        while True:
            fetch = min(fetch * 4, self._index.ntotal)
            if fetch == 0:
                return []
            scores, ids = self._index.search(vector[None], fetch)
            best.clear()
            for score, key in zip(scores[0].tolist(), (ids[0] >> _WINDOW_BITS).tolist(), strict=True):
                best.setdefault(key, score)
            if len(best) >= count or fetch == self._index.ntotal:
                return list(best.items())[:count]

    def __len__(self) -> int:
        """Vectors held."""
        return int(self._index.ntotal)

    def save(self, path: Path, state: str) -> None:
        """Writes the index for catalogue state `state`, atomically."""
        data = faiss.serialize_index(self._index).tobytes()
        header = json.dumps({"state": state, "sha256": hashlib.sha256(data).hexdigest()}).encode() + b"\n"
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_bytes(header + data)
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path, dim: int, state: str) -> VectorIndex | None:
        """The saved index, or None when it is missing, damaged or not of `state`. Checked before FAISS parses it."""
        try:
            header, _, data = path.read_bytes().partition(b"\n")
            told = json.loads(header)
            if told["state"] != state or told["sha256"] != hashlib.sha256(data).hexdigest():
                raise ValueError("stale or damaged")
            loaded = faiss.deserialize_index(np.frombuffer(data, dtype=np.uint8))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            log.warning("index file %s not used, rebuilding: %s", path.name, error)
            return None
        if not isinstance(loaded, faiss.IndexIDMap2) or loaded.d != dim:
            log.warning("index file %s not used, rebuilding: other type or dimension", path.name)
            return None
        index = cls(dim)
        index._index = loaded
        return index
