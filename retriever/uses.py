"""How often chunks stood in a prompt: what a server loads first when it starts again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sqlalchemy import delete, select

from retriever.catalogue import token_ids
from retriever.database import Database
from retriever.schema import ChunkRow, ChunkUseRow


class Uses:
    """Counts by tokens digest, as long as a document holds the chunk. Blocking and thread-safe."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, counts: Mapping[str, int]) -> None:
        """Adds to the counts, and forgets those of chunks that no document holds any more."""
        with self._database.write() as session:
            for digest, count in counts.items():
                row = session.get(ChunkUseRow, digest)
                if row is None:
                    session.add(ChunkUseRow(tokens_digest=digest, uses=count))
                else:
                    row.uses += count
            session.flush()
            session.execute(delete(ChunkUseRow).where(ChunkUseRow.tokens_digest.not_in(select(ChunkRow.tokens_digest))))

    def most_used(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Tokens digest and token ids of the chunks that were used, the most used first."""
        query = (
            select(ChunkRow.tokens_digest, ChunkRow.token_ids)
            .join(ChunkUseRow, ChunkUseRow.tokens_digest == ChunkRow.tokens_digest)
            .order_by(ChunkUseRow.uses.desc(), ChunkRow.tokens_digest)
        )
        last = None
        with self._database.read() as session:
            for digest, data in session.execute(query.execution_options(yield_per=100)):
                if digest != last:  # several documents may hold the same chunk
                    yield digest, token_ids(data)
                last = digest
