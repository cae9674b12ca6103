"""The catalogue's database: SQLite (WAL, synchronous=FULL) by default, PostgreSQL by URL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.engine import Engine
from sqlalchemy.exc import DatabaseError, OperationalError
from sqlalchemy.orm import Session

from errors import CatalogueError, CatalogueUnavailable
from retriever.schema import SCHEMA_VERSION, Base, Meta


class Database:
    """Opens or creates the tables; gives out transactions. Blocking and thread-safe."""

    def __init__(self, url: str) -> None:
        """Raises CatalogueError when the database is of another schema version or cannot be opened."""
        self._engine = _connect(url)
        self._writer = self._engine.execution_options(write=True)
        try:
            Base.metadata.create_all(self._engine)
            with self.write() as session:
                held = session.get(Meta, "schema_version")
                if held is None:
                    session.add(Meta(name="schema_version", value=str(SCHEMA_VERSION)))
                elif int(held.value) != SCHEMA_VERSION:
                    raise CatalogueError(
                        f"the catalogue has schema version {held.value}, this program knows {SCHEMA_VERSION}; "
                        "use the program version that made it"
                    )
        except CatalogueUnavailable:
            raise
        except DatabaseError as error:
            raise CatalogueError(f"cannot open the catalogue: {error.orig}") from error

    @contextmanager
    def read(self) -> Iterator[Session]:
        """A session that sees one state of the database. Raises CatalogueUnavailable."""
        with _named_failures(), Session(self._engine) as session:
            yield session

    @contextmanager
    def write(self) -> Iterator[Session]:
        """A transaction: committed at the end of the block, rolled back when it raises. CatalogueUnavailable."""
        with _named_failures(), Session(self._writer) as session, session.begin():
            yield session

    def close(self) -> None:
        """Closes all connections."""
        self._engine.dispose()


@contextmanager
def _named_failures() -> Iterator[None]:
    try:
        yield
    except OperationalError as error:
        raise CatalogueUnavailable(f"the catalogue does not answer: {error.orig}; try again later") from error


def _connect(url: str) -> Engine:
    engine = create_engine(url, pool_pre_ping=True)
    if engine.dialect.name != "sqlite":
        return engine

    @event.listens_for(engine, "connect")
    def configure(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # transactions begin where `begin` below says so
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=10000"):
            connection.execute(f"PRAGMA {pragma}")

    @event.listens_for(engine, "begin")
    def begin(connection: Any) -> None:
        # A writer takes the lock at once: upgrading a read transaction could fail half-way.
        write = connection.get_execution_options().get("write", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if write else "BEGIN")

    return engine
