"""The job table: work that survives restarts, and the purges that deletions leave behind.

One method, one transaction.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, select, update
from sqlalchemy.orm import Session

from errors import NotFound
from retriever.database import Database
from retriever.schema import ChunkRow, CollectionRow, DocumentRow, JobRow, KeySpaceRow, PurgeRow, RevisionRow

MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class JobInfo:
    """A job as the API shows it."""

    id: str
    document: str | None
    collection: str | None
    state: str
    stage: str
    done: int
    total: int
    error: str | None
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Work:
    """A claimed job: the revision to index or to encode."""

    job: str
    revision: int
    collection: str


class Jobs:
    """Jobs on revisions, stage `index` and then `precompute`. `signature` as in Catalogue."""

    def __init__(self, database: Database, signature: str) -> None:
        self._database = database
        self._signature = signature

    def recover(self) -> None:
        """At start: what was running runs again, and what another signature made is to be made anew."""
        with self._database.write() as session:
            session.execute(update(JobRow).where(JobRow.state == "running").values(state="pending"))
            session.execute(update(RevisionRow).where(RevisionRow.state == "processing").values(state="pending"))
            others = session.scalars(
                select(RevisionRow).where(RevisionRow.state == "ready", RevisionRow.signature != self._signature)
            )
            for row in others:
                cancel_jobs(session, row.id, "the index settings changed")
                row.state, row.encoded_for = "pending", None
                add_job(session, row.document_id, row.id, "index")

    def encode_again(self, space: str) -> None:
        """Adds a precompute job for every ready revision whose chunks were not computed for this KV key space."""
        with self._database.write() as session:
            wanted = select(RevisionRow).where(
                RevisionRow.state == "ready",
                (RevisionRow.encoded_for.is_(None)) | (RevisionRow.encoded_for != space),
                ~select(JobRow.id)
                .where(JobRow.revision_id == RevisionRow.id, JobRow.state.in_(("pending", "running")))
                .exists(),
            )
            for row in session.scalars(wanted):
                add_job(session, row.document_id, row.id, "precompute")

    def claim(self, stage: str) -> Work | None:
        """Takes the oldest pending job of the stage. A job that killed the process three times fails instead."""
        with self._database.write() as session:
            query = select(JobRow).filter_by(state="pending", stage=stage).order_by(JobRow.created_at, JobRow.id)
            while (job := session.scalar(query.limit(1))) is not None:
                revision = _revision(session, job)
                if revision is None:
                    job.state, job.error = "cancelled", "the document was replaced or deleted"
                    session.flush()
                    continue
                if job.attempts >= MAX_ATTEMPTS:
                    _fail(job, revision, f"gave up after {MAX_ATTEMPTS} attempts that ended the process")
                    session.flush()
                    continue
                job.state, job.attempts = "running", job.attempts + 1
                if stage == "index":
                    revision.state = "processing"
                home = select(CollectionRow.name).join(DocumentRow).where(DocumentRow.id == revision.document_id)
                return Work(job.id, revision.id, session.scalars(home).one())
            return None

    def progress(self, job: str, done: int, total: int) -> bool:
        """Notes how far the job is; False when it was cancelled."""
        with self._database.write() as session:
            row = session.get(JobRow, job)
            if row is None or row.state != "running":
                return False
            if done > row.done:
                # Farther than ever before, so what ended the process last time does not stand in the way.
                row.done, row.attempts = done, 1
            row.total = total
            return True

    def release(self, job: str) -> None:
        """Gives a claimed job back as if nobody had tried: an orderly stop, or a failure outside of it."""
        with self._database.write() as session:
            row = session.get(JobRow, job)
            if row is not None and row.state == "running":
                row.state, row.attempts = "pending", row.attempts - 1
                revision = _revision(session, row)
                if revision is not None and revision.state == "processing":
                    revision.state = "pending"

    def next_stage(self, job: str, stage: str) -> None:
        """Hands the job on."""
        with self._database.write() as session:
            row = session.get(JobRow, job)
            if row is not None and row.state == "running":
                row.state, row.stage, row.done, row.total, row.attempts = "pending", stage, 0, 0, 0

    def finish(self, job: str, encoded_for: str | None = None) -> None:
        """Marks the job as succeeded and its chunks as computed for the key space `encoded_for`."""
        with self._database.write() as session:
            row = session.get(JobRow, job)
            if row is not None and row.state == "running":
                row.state = "succeeded"
                revision = _revision(session, row)
                if revision is not None and encoded_for is not None:
                    revision.encoded_for = encoded_for

    def fail(self, job: str, error: str) -> None:
        """Marks the job as failed; its document too, unless that answers already."""
        with self._database.write() as session:
            row = session.get(JobRow, job)
            if row is not None and row.state == "running":
                revision = _revision(session, row)
                _fail(row, revision, error)

    def job(self, job: str) -> JobInfo:
        """One job. Raises NotFound."""
        with self._database.read() as session:
            row = session.get(JobRow, job)
            if row is None:
                raise NotFound(f"there is no job {job!r}")
            return _job_info(session, row)

    def cancel(self, job: str) -> JobInfo:
        """Cancels the job unless it has ended. A revision that does not answer yet becomes failed. Raises NotFound."""
        with self._database.write() as session:
            row = session.get(JobRow, job)
            if row is None:
                raise NotFound(f"there is no job {job!r}")
            if row.state in ("pending", "running"):
                revision = _revision(session, row)
                _fail(row, revision, "cancelled")
                row.state = "cancelled"
            session.flush()
            return _job_info(session, row)

    # Purges

    def register_key_space(self, space: str) -> list[str]:
        """Notes the key space now in use; returns all that ever were."""
        with self._database.write() as session:
            session.merge(KeySpaceRow(space=space))
            session.flush()
            return list(session.scalars(select(KeySpaceRow.space)))

    def key_spaces(self) -> list[str]:
        """All that ever were in use."""
        with self._database.read() as session:
            return list(session.scalars(select(KeySpaceRow.space)))

    def purges(self) -> list[str]:
        """Tokens digests whose KV is to be removed. Those that a document holds, still or again, are left out."""
        held = select(ChunkRow.id).where(ChunkRow.tokens_digest == PurgeRow.tokens_digest).exists()
        with self._database.read() as session:
            return list(session.scalars(select(PurgeRow.tokens_digest).where(~held)))

    def purged(self, digests: Iterable[str]) -> None:
        """The KV of these is gone from every tier."""
        with self._database.write() as session:
            session.execute(delete(PurgeRow).where(PurgeRow.tokens_digest.in_(list(digests))))


def add_job(session: Session, document: int, revision: int, stage: str) -> str:
    """Adds a pending job; returns its id."""
    job = JobRow(id=uuid.uuid4().hex, document_id=document, revision_id=revision, state="pending", stage=stage)
    session.add(job)
    session.flush()
    return job.id


def cancel_jobs(session: Session, revision: int, why: str) -> None:
    """Cancels what has not ended of the revision's jobs."""
    session.execute(
        update(JobRow)
        .where(JobRow.revision_id == revision, JobRow.state.in_(("pending", "running")))
        .values(state="cancelled", error=why)
    )


def _fail(job: JobRow, revision: RevisionRow | None, error: str) -> None:
    job.state, job.error = "failed", error
    if revision is not None and revision.state != "ready":
        revision.state, revision.error = "failed", error


def _revision(session: Session, job: JobRow) -> RevisionRow | None:
    return session.get(RevisionRow, job.revision_id) if job.revision_id is not None else None


def _job_info(session: Session, row: JobRow) -> JobInfo:
    document = session.get(DocumentRow, row.document_id) if row.document_id is not None else None
    collection = session.get(CollectionRow, document.collection_id) if document is not None else None
    return JobInfo(
        id=row.id,
        document=document.name if document else None,
        collection=collection.name if collection else None,
        state=row.state,
        stage=row.stage,
        done=row.done,
        total=row.total,
        error=row.error,
        created_at=row.created_at,
        updated_at=row.updated_at,
    )
