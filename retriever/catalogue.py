"""Collections, documents, revisions and chunks. One public method, one transaction.

Methods block; callers on an event loop use a thread.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import numpy as np
from sqlalchemy import Select, delete, func, select
from sqlalchemy.orm import Session

from errors import NotFound
from retriever.chunking import TextChunk
from retriever.database import Database
from retriever.documents import ParsedDocument, Section
from retriever.embedding import Vectors
from retriever.jobs import Work, add_job, cancel_jobs
from retriever.schema import ChunkRow, CollectionRow, DocumentRow, JobRow, PurgeRow, RevisionRow


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document as the API shows it. `answers`: some revision of it is searchable now."""

    id: str
    collection: str
    title: str | None
    metadata: dict[str, Any]
    state: str
    error: str | None
    answers: bool
    kind: str
    chunks: int
    tokens: int
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Upsert:
    """What an upsert did:

    created, replaced, updated (title or metadata), unchanged, or pending (same content on its way).
    """

    result: str
    document: DocumentInfo
    job: str | None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A live chunk with what a prompt and a citation need."""

    id: int
    document: str
    title: str | None
    metadata: dict[str, Any]
    ordinal: int
    start: int
    end: int
    page: int | None
    last_page: int | None
    heading: str | None
    text: str
    token_ids: tuple[int, ...]
    tokens_digest: str


@dataclass(frozen=True, slots=True)
class Change:
    """Chunk ids that a commit added to and removed from a collection, whose new state is `state`."""

    collection: str
    added: tuple[int, ...]
    removed: tuple[int, ...]
    state: str


# Tokens digest of a chunk, and collection and metadata of a document that has it.
Holder = tuple[str, str, dict[str, Any]]


class Catalogue:
    """See the module. `signature` names how chunks and vectors are made now; others are never served."""

    def __init__(self, database: Database, signature: str) -> None:
        self._database = database
        self._signature = signature

    # Collections

    def ensure_collection(self, name: str) -> None:
        """Creates the collection when it does not exist."""
        with self._database.write() as session:
            self._collection(session, name, create=True)

    def collection_state(self, name: str) -> str:
        """The token that changes with every change of the collection's chunks. Raises NotFound."""
        with self._database.read() as session:
            return self._collection(session, name).state

    def collections(self) -> list[str]:
        """All names."""
        with self._database.read() as session:
            return list(session.scalars(select(CollectionRow.name).order_by(CollectionRow.name)))

    # Documents

    def upsert(
        self,
        collection: str,
        name: str,
        *,
        digest: str,
        kind: str,
        content: bytes,
        parsed: ParsedDocument,
        title: str | None,
        metadata: dict[str, Any],
    ) -> Upsert:
        """Stores a new content of the document durably, with the job that will index it, unless it is there already."""
        title = title or parsed.title
        with self._database.write() as session:
            home = self._collection(session, collection, create=True)
            row = session.scalar(select(DocumentRow).filter_by(collection_id=home.id, name=name))
            created = row is None
            if row is None:
                row = DocumentRow(collection_id=home.id, name=name, title=title, attributes=metadata)
                session.add(row)
                session.flush()
            latest = None if created else _latest(session, row)
            if latest is not None and latest.digest == digest and latest.state != "failed":
                told = (row.title, row.attributes) == (title, metadata)
                row.title, row.attributes = title, metadata
                session.flush()
                job = session.scalar(select(JobRow).filter_by(revision_id=latest.id).order_by(JobRow.created_at.desc()))
                waiting = latest.state != "ready" and job is not None
                result = "pending" if waiting else "unchanged" if told else "updated"
                return Upsert(result, self._info(session, row), job.id if job and waiting else None)
            row.title, row.attributes = title, metadata
            # What still waits for indexing is superseded; what answers now stays until the new revision is ready.
            for old in session.scalars(select(RevisionRow).filter_by(document_id=row.id)):
                if old.state != "ready":
                    cancel_jobs(session, old.id, "superseded by newer content")
                    self._drop_revisions(session, [old.id])
            revision = RevisionRow(
                document_id=row.id,
                digest=digest,
                kind=kind,
                content=content,
                text=parsed.text,
                sections=[asdict(section) for section in parsed.sections],
                state="pending",
            )
            session.add(revision)
            session.flush()
            job_id = add_job(session, row.id, revision.id, "index")
            return Upsert("created" if created else "replaced", self._info(session, row), job_id)

    def documents(self, collection: str, limit: int, after: str | None = None) -> list[DocumentInfo]:
        """Documents by id, at most `limit`, those behind `after`. Raises NotFound for an unknown collection."""
        with self._database.read() as session:
            home = self._collection(session, collection)
            query = select(DocumentRow).filter_by(collection_id=home.id).order_by(DocumentRow.name).limit(limit)
            if after is not None:
                query = query.where(DocumentRow.name > after)
            return [self._info(session, row) for row in session.scalars(query)]

    def document(self, collection: str, name: str) -> DocumentInfo:
        """One document. Raises NotFound."""
        with self._database.read() as session:
            return self._info(session, self._document(session, collection, name))

    def delete_document(self, collection: str, name: str) -> Change:
        """Removes the document and all that hangs on it; notes the chunk tokens that it held. Raises NotFound."""
        with self._database.write() as session:
            row = self._document(session, collection, name)
            revisions = list(session.scalars(select(RevisionRow.id).filter_by(document_id=row.id)))
            for revision in revisions:
                cancel_jobs(session, revision, "the document was deleted")
            removed = self._drop_revisions(session, revisions)
            session.delete(row)
            home = self._collection(session, collection)
            home.state = uuid.uuid4().hex
            return Change(collection, (), tuple(removed), home.state)

    # Chunks

    def commit_chunks(
        self, work: Work, chunks: Sequence[TextChunk], digests: Sequence[str], vectors: Sequence[Vectors]
    ) -> Change | None:
        """Makes the revision ready with these chunks and drops its predecessors, all at one commit.

        `digests`: the tokens digest of each chunk. None when the revision is gone: replaced or deleted meanwhile.
        """
        with self._database.write() as session:
            revision = session.get(RevisionRow, work.revision)
            if revision is None:
                return None
            older = list(
                session.scalars(
                    select(RevisionRow.id).where(
                        RevisionRow.document_id == revision.document_id, RevisionRow.id < revision.id
                    )
                )
            )
            stale = list(session.scalars(select(ChunkRow.id).filter_by(revision_id=revision.id)))
            rows = [
                ChunkRow(
                    revision_id=revision.id,
                    ordinal=chunk.ordinal,
                    start=chunk.start,
                    end=chunk.end,
                    page=chunk.page,
                    last_page=chunk.last_page,
                    heading=chunk.heading,
                    text=chunk.text,
                    token_ids=np.asarray(chunk.token_ids, dtype="<i4").tobytes(),
                    tokens_digest=digest,
                    vectors=vector.astype("<f4").tobytes(),
                )
                for chunk, digest, vector in zip(chunks, digests, vectors, strict=True)
            ]
            session.add_all(rows)
            session.flush()
            removed = self._drop_revisions(session, older) + self._drop_chunks(session, stale)
            revision.state, revision.error, revision.signature = "ready", None, self._signature
            revision.chunk_count = len(rows)
            revision.token_count = sum(len(chunk.token_ids) for chunk in chunks)
            home = self._collection(session, work.collection)
            home.state = uuid.uuid4().hex
            return Change(work.collection, tuple(row.id for row in rows), tuple(removed), home.state)

    def live_chunks(self, ids: Sequence[int]) -> dict[int, StoredChunk]:
        """Those of the chunks that belong to ready revisions of the present signature."""
        query = (
            select(ChunkRow, DocumentRow)
            .join(RevisionRow, ChunkRow.revision_id == RevisionRow.id)
            .join(DocumentRow, RevisionRow.document_id == DocumentRow.id)
            .where(ChunkRow.id.in_(ids), *self._live())
        )
        with self._database.read() as session:
            return {chunk.id: _stored(chunk, document) for chunk, document in session.execute(query)}

    def revision_chunks(self, revision: int) -> list[tuple[str, tuple[int, ...]]]:
        """Tokens digest and token ids of the revision's chunks, in order."""
        query = select(ChunkRow).filter_by(revision_id=revision).order_by(ChunkRow.ordinal)
        with self._database.read() as session:
            return [(row.tokens_digest, token_ids(row.token_ids)) for row in session.scalars(query)]

    def live_tokens(self, collection: str, document: str | None = None) -> dict[str, tuple[int, ...]]:
        """Token ids by digest of the chunks that answer in a collection, or of one document. Raises NotFound."""
        with self._database.read() as session:
            home = self._collection(session, collection)
            query = (
                select(ChunkRow.tokens_digest, ChunkRow.token_ids)
                .join(RevisionRow, ChunkRow.revision_id == RevisionRow.id)
                .join(DocumentRow, RevisionRow.document_id == DocumentRow.id)
                .where(DocumentRow.collection_id == home.id, *self._live())
            )
            if document is not None:
                query = query.where(DocumentRow.id == self._document(session, collection, document).id)
            return {digest: token_ids(ids) for digest, ids in session.execute(query)}

    def holders(self, document: tuple[str, str] | None = None, revision: int | None = None) -> list[Holder]:
        """Once for each document that has a chunk, of all chunks, or of those of one `document` or one `revision`."""
        with self._database.read() as session:
            wanted = select(ChunkRow.tokens_digest).join(RevisionRow, RevisionRow.id == ChunkRow.revision_id)
            if document is not None:
                wanted = wanted.where(RevisionRow.document_id == self._document(session, *document).id)
            if revision is not None:
                wanted = wanted.where(RevisionRow.id == revision)
            return self._holders(session, wanted)

    def remaining_holders(self) -> list[Holder]:
        """`holders` of those chunks that have lost one since this was asked last."""
        with self._database.write() as session:
            found = self._holders(session, select(PurgeRow.tokens_digest))
            session.execute(delete(PurgeRow).where(PurgeRow.tokens_digest.in_(select(ChunkRow.tokens_digest))))
            return found

    def vectors(self, collection: str, dim: int) -> Iterator[tuple[int, Vectors]]:
        """Chunk id and vectors of every live chunk of the collection."""
        query = (
            select(ChunkRow.id, ChunkRow.vectors)
            .join(RevisionRow, ChunkRow.revision_id == RevisionRow.id)
            .join(DocumentRow, RevisionRow.document_id == DocumentRow.id)
            .join(CollectionRow, DocumentRow.collection_id == CollectionRow.id)
            .where(CollectionRow.name == collection, *self._live())
        )
        with self._database.read() as session:
            for chunk_id, data in session.execute(query.execution_options(yield_per=1000)):
                yield chunk_id, np.frombuffer(data, dtype="<f4").reshape(-1, dim)

    def counts(self) -> dict[str, int]:
        """Documents by the state of their latest content: pending, processing, ready or failed."""
        newest = select(func.max(RevisionRow.id)).group_by(RevisionRow.document_id)
        query = select(RevisionRow.state, func.count()).where(RevisionRow.id.in_(newest)).group_by(RevisionRow.state)
        with self._database.read() as session:
            return dict(iter(session.execute(query)))

    def not_searchable(self, collection: str) -> int:
        """Documents of the collection that wait to be indexed and do not answer meanwhile."""
        live = select(RevisionRow.id).where(RevisionRow.document_id == DocumentRow.id, *self._live()).exists()
        coming = select(RevisionRow.id).where(
            RevisionRow.document_id == DocumentRow.id, RevisionRow.state.in_(("pending", "processing"))
        )
        query = (
            select(func.count())
            .select_from(DocumentRow)
            .join(CollectionRow, DocumentRow.collection_id == CollectionRow.id)
            .where(CollectionRow.name == collection, coming.exists(), ~live)
        )
        with self._database.read() as session:
            return session.scalar(query) or 0

    def revision_source(self, revision: int) -> ParsedDocument | None:
        """The extracted text to be chunked; None when the revision is gone."""
        with self._database.read() as session:
            row = session.get(RevisionRow, revision)
            return None if row is None else ParsedDocument(row.text, None, tuple(Section(**s) for s in row.sections))

    # Inside a transaction

    def _live(self) -> tuple[Any, ...]:
        return RevisionRow.state == "ready", RevisionRow.signature == self._signature

    def _collection(self, session: Session, name: str, create: bool = False) -> CollectionRow:
        row = session.scalar(select(CollectionRow).filter_by(name=name))
        if row is None:
            if not create:
                raise NotFound(f"there is no collection {name!r}")
            row = CollectionRow(name=name, state=uuid.uuid4().hex)
            session.add(row)
            session.flush()
        return row

    def _document(self, session: Session, collection: str, name: str) -> DocumentRow:
        home = self._collection(session, collection)
        row = session.scalar(select(DocumentRow).filter_by(collection_id=home.id, name=name))
        if row is None:
            raise NotFound(f"there is no document {name!r} in collection {collection!r}")
        return row

    def _info(self, session: Session, row: DocumentRow) -> DocumentInfo:
        latest = _latest(session, row)
        assert latest is not None
        answers = select(RevisionRow.id).where(RevisionRow.document_id == row.id, *self._live()).exists()
        return DocumentInfo(
            id=row.name,
            collection=session.get_one(CollectionRow, row.collection_id).name,
            title=row.title,
            metadata=row.attributes,
            state=latest.state,
            error=latest.error,
            answers=bool(session.scalar(select(answers))),
            kind=latest.kind,
            chunks=latest.chunk_count,
            tokens=latest.token_count,
            created_at=row.created_at,
            updated_at=row.updated_at,
        )

    def _holders(self, session: Session, digests: Select[Any]) -> list[Holder]:
        query = (
            select(ChunkRow.tokens_digest, CollectionRow.name, DocumentRow.attributes)
            .join(RevisionRow, RevisionRow.id == ChunkRow.revision_id)
            .join(DocumentRow, DocumentRow.id == RevisionRow.document_id)
            .join(CollectionRow, CollectionRow.id == DocumentRow.collection_id)
            .where(ChunkRow.tokens_digest.in_(digests))
        )
        return [(digest, collection, metadata) for digest, collection, metadata in session.execute(query)]

    def _drop_revisions(self, session: Session, revisions: Sequence[int]) -> list[int]:
        """Deletes revisions with their chunks; returns the chunk ids."""
        chunks = list(session.scalars(select(ChunkRow.id).where(ChunkRow.revision_id.in_(revisions))))
        self._drop_chunks(session, chunks)
        session.execute(delete(RevisionRow).where(RevisionRow.id.in_(revisions)))
        return chunks

    def _drop_chunks(self, session: Session, chunks: Sequence[int]) -> list[int]:
        """Deletes chunks and notes their token sequences."""
        digests = set(session.scalars(select(ChunkRow.tokens_digest).where(ChunkRow.id.in_(chunks))))
        session.execute(delete(ChunkRow).where(ChunkRow.id.in_(chunks)))
        noted = set(session.scalars(select(PurgeRow.tokens_digest).where(PurgeRow.tokens_digest.in_(digests))))
        session.add_all(PurgeRow(tokens_digest=digest) for digest in digests - noted)
        return list(chunks)


def _latest(session: Session, row: DocumentRow) -> RevisionRow | None:
    return session.scalar(select(RevisionRow).filter_by(document_id=row.id).order_by(RevisionRow.id.desc()).limit(1))


def _stored(chunk: ChunkRow, document: DocumentRow) -> StoredChunk:
    return StoredChunk(
        id=chunk.id,
        document=document.name,
        title=document.title,
        metadata=document.attributes,
        ordinal=chunk.ordinal,
        start=chunk.start,
        end=chunk.end,
        page=chunk.page,
        last_page=chunk.last_page,
        heading=chunk.heading,
        text=chunk.text,
        token_ids=token_ids(chunk.token_ids),
        tokens_digest=chunk.tokens_digest,
    )


def token_ids(data: bytes) -> tuple[int, ...]:
    """Of the stored form."""
    return tuple(np.frombuffer(data, dtype="<i4").tolist())
