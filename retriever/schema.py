"""Tables of the catalogue, the one truth: FAISS and chunk KV are derived from it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import (
    JSON,
    DateTime,
    Dialect,
    ForeignKey,
    Integer,
    LargeBinary,
    String,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION = 1


def now() -> datetime:
    """The present, in UTC."""
    return datetime.now(UTC)


class UtcTime(TypeDecorator[datetime]):
    """A moment in UTC. SQLite forgets the time zone; it is put back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Called by SQLAlchemy on reading."""
        return value.replace(tzinfo=UTC) if value is not None and value.tzinfo is None else value


class Base(DeclarativeBase):
    """Root of the tables."""


class Meta(Base):
    """Facts about the database itself."""

    __tablename__ = "meta"
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    value: Mapped[str] = mapped_column(Text)


class CollectionRow(Base):
    """A named set of documents. `state` changes in every transaction that changes the collection's chunks."""

    __tablename__ = "collections"
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    name: Mapped[str] = mapped_column(String(128), unique=True)
    state: Mapped[str] = mapped_column(String(32))


class DocumentRow(Base):
    """A document under the caller's id. What it says stands in its revisions."""

    __tablename__ = "documents"
    __table_args__ = (UniqueConstraint("collection_id", "name"), {"sqlite_autoincrement": True})
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    collection_id: Mapped[int] = mapped_column(ForeignKey("collections.id", ondelete="CASCADE"))
    name: Mapped[str] = mapped_column(String(128))
    title: Mapped[str | None] = mapped_column(Text)
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcTime, default=now)
    updated_at: Mapped[datetime] = mapped_column(UtcTime, default=now, onupdate=now)


class RevisionRow(Base):
    """One content of a document.

    The newest `ready` one answers; its predecessors vanish in the commit that makes it ready.

    `signature`: the tokenizer, chunk size, chunker and embedder its chunks were made with. `encoded_for`: the KV
    key space for which all its chunks were computed ahead.
    """

    __tablename__ = "revisions"
    __table_args__ = ({"sqlite_autoincrement": True},)
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    document_id: Mapped[int] = mapped_column(ForeignKey("documents.id", ondelete="CASCADE"), index=True)
    digest: Mapped[str] = mapped_column(String(64))
    kind: Mapped[str] = mapped_column(String(8))
    content: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)
    text: Mapped[str] = mapped_column(Text, deferred=True)
    sections: Mapped[list[dict[str, Any]]] = mapped_column(JSON, deferred=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    error: Mapped[str | None] = mapped_column(Text)
    signature: Mapped[str | None] = mapped_column(String(64))
    encoded_for: Mapped[str | None] = mapped_column(String(64))
    chunk_count: Mapped[int] = mapped_column(Integer, default=0)
    token_count: Mapped[int] = mapped_column(Integer, default=0)


class ChunkRow(Base):
    """A chunk of a revision. Ids are never used again, so an index can not mistake one chunk for another."""

    __tablename__ = "chunks"
    __table_args__ = ({"sqlite_autoincrement": True},)
    id: Mapped[int] = mapped_column(Integer, primary_key=True)
    revision_id: Mapped[int] = mapped_column(ForeignKey("revisions.id", ondelete="CASCADE"), index=True)
    ordinal: Mapped[int] = mapped_column(Integer)
    start: Mapped[int] = mapped_column(Integer)
    end: Mapped[int] = mapped_column(Integer)
    page: Mapped[int | None] = mapped_column(Integer)
    last_page: Mapped[int | None] = mapped_column(Integer)
    heading: Mapped[str | None] = mapped_column(Text)
    text: Mapped[str] = mapped_column(Text)
    token_ids: Mapped[bytes] = mapped_column(LargeBinary)
    tokens_digest: Mapped[str] = mapped_column(String(64), index=True)
    vectors: Mapped[bytes] = mapped_column(LargeBinary, deferred=True)


class JobRow(Base):
    """Work on a revision that must survive a restart. Stages: index, then precompute."""

    __tablename__ = "jobs"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    document_id: Mapped[int | None] = mapped_column(ForeignKey("documents.id", ondelete="SET NULL"), index=True)
    revision_id: Mapped[int | None] = mapped_column(ForeignKey("revisions.id", ondelete="SET NULL"), index=True)
    state: Mapped[str] = mapped_column(String(16), index=True)
    stage: Mapped[str] = mapped_column(String(16))
    done: Mapped[int] = mapped_column(Integer, default=0)
    total: Mapped[int] = mapped_column(Integer, default=0)
    attempts: Mapped[int] = mapped_column(Integer, default=0)
    error: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[datetime] = mapped_column(UtcTime, default=now)
    updated_at: Mapped[datetime] = mapped_column(UtcTime, default=now, onupdate=now)


class PurgeRow(Base):
    """Chunk tokens that a document does not hold any more: their KV is to be removed, or kept as others want."""

    __tablename__ = "purges"
    tokens_digest: Mapped[str] = mapped_column(String(64), primary_key=True)


class KeySpaceRow(Base):
    """A KV key space that was ever in use here, so that a purge reaches the KV of former models too."""

    __tablename__ = "key_spaces"
    space: Mapped[str] = mapped_column(String(64), primary_key=True)


class ChunkUseRow(Base):
    """How often a chunk stood in a prompt; kept only by servers that warm up."""

    __tablename__ = "chunk_uses"
    tokens_digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    uses: Mapped[int] = mapped_column(Integer)
