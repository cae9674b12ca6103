"""Composes catalogue, chunker, embedder and index: documents in, chunks for a question out."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from errors import Cancelled, UnreadableDocument
from retriever import chunking
from retriever.catalogue import Catalogue, Change, StoredChunk
from retriever.chunking import chunk_document
from retriever.documents import TextEncoder
from retriever.embedding import Embedder
from retriever.index import VectorIndex
from retriever.jobs import Work

_EMBED_BATCH = 8  # chunks between two looks at whether the job was cancelled


@dataclass(frozen=True, slots=True)
class Hit:
    """A retrieved chunk and its cosine similarity to the question."""

    chunk: StoredChunk
    score: float


def index_signature(tokenizer_digest: str, chunk_tokens: int, embedder_digest: str) -> str:
    """Names everything that decides chunk boundaries, token ids and vectors. Another signature, another index."""
    told = [tokenizer_digest, chunk_tokens, embedder_digest, chunking.VERSION]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


class Retriever:
    """Searches see every commit whole: a commit and its index update happen under the lock that searches take."""

    def __init__(
        self,
        catalogue: Catalogue,
        embedder: Embedder,
        encode: TextEncoder,
        digest: Callable[[tuple[int, ...]], str],
        chunk_tokens: int,
        index_folder: Path,
        signature: str,
    ) -> None:
        """`encode`: the language model's tokenizer. `digest`: names a chunk's token ids, as the KV store does."""
        self._catalogue = catalogue
        self._embedder = embedder
        self._encode = encode
        self._digest = digest
        self._chunk_tokens = chunk_tokens
        self._folder = index_folder
        self._signature = signature
        self._indexes: dict[str, VectorIndex] = {}
        self._states: dict[str, str] = {}  # the catalogue's state that each index was last brought to
        self._lock = threading.Lock()

    def open(self) -> None:
        """Loads every collection's index, or rebuilds it from the catalogue."""
        for collection in self._catalogue.collections():
            state = self._catalogue.collection_state(collection)
            index = VectorIndex.load(self._path(collection), self._embedder.dim, self._stamp(state))
            if index is None:
                index = VectorIndex(self._embedder.dim)
                for chunk_id, vectors in self._catalogue.vectors(collection, self._embedder.dim):
                    index.add(chunk_id, vectors)
            self._indexes[collection], self._states[collection] = index, state

    def save(self) -> None:
        """Writes the indexes, so that the next start need not rebuild them."""
        with self._lock:
            for collection, index in self._indexes.items():
                index.save(self._path(collection), self._stamp(self._states[collection]))

    def search(self, collection: str, question: str, count: int) -> list[Hit]:
        """The `count` chunks most similar to the question, best first. Raises NotFound for an unknown collection."""
        self._catalogue.collection_state(collection)  # raises NotFound
        vector = self._embedder.embed_query(question)
        with self._lock:
            index = self._indexes.get(collection)
            found = index.search(vector, count) if index is not None else []
            chunks = self._catalogue.live_chunks([chunk_id for chunk_id, _ in found])
        return [Hit(chunks[chunk_id], score) for chunk_id, score in found if chunk_id in chunks]

    def index(self, work: Work, progress: Callable[[int, int], bool]) -> bool:
        """Chunks and embeds a revision and makes it the one that answers. False when it is gone meanwhile.

        `progress` is told (chunks done, chunks in all) and answers False to cancel, which raises Cancelled. Raises
        UnreadableDocument for a text of no tokens.
        """
        source = self._catalogue.revision_source(work.revision)
        if source is None:
            return False
        chunks = chunk_document(source, self._encode, self._chunk_tokens)
        if not chunks:
            raise UnreadableDocument(
                "the model's tokenizer makes no token of this text: there is nothing to answer from"
            )
        vectors = []
        for start in range(0, len(chunks), _EMBED_BATCH):
            if not progress(start, len(chunks)):
                raise Cancelled("the job was cancelled")
            vectors += self._embedder.embed_chunks([chunk.text for chunk in chunks[start : start + _EMBED_BATCH]])
        digests = [self._digest(chunk.token_ids) for chunk in chunks]
        with self._lock:
            change = self._catalogue.commit_chunks(work, chunks, digests, vectors)
            if change is None:
                return False
            index = self._apply(change)
            for chunk_id, vector in zip(change.added, vectors, strict=True):
                index.add(chunk_id, vector)
        return True

    def delete(self, collection: str, document: str) -> None:
        """Removes a document; no later search returns it. Raises NotFound."""
        with self._lock:
            self._apply(self._catalogue.delete_document(collection, document))

    def _apply(self, change: Change) -> VectorIndex:
        index = self._indexes.setdefault(change.collection, VectorIndex(self._embedder.dim))
        index.remove(change.removed)
        self._states[change.collection] = change.state
        return index

    def _path(self, collection: str) -> Path:
        return self._folder / f"{hashlib.sha256(collection.encode()).hexdigest()[:32]}.faiss"

    def _stamp(self, collection_state: str) -> str:
        return f"{self._signature}:{collection_state}"
