"""Catalogue, index and embedder together: real SQLite, real FAISS, the real embedder."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy

from cache_store.keys import tokens_digest
from errors import Cancelled, CatalogueError, CatalogueUnavailable, NotFound
from retriever.catalogue import Catalogue, Upsert
from retriever.database import Database
from retriever.documents import ParsedDocument
from retriever.embedding import Embedder
from retriever.index import VectorIndex
from retriever.jobs import MAX_ATTEMPTS, Jobs
from retriever.retriever import Retriever
from retriever.uses import Uses
from tests.retriever.test_chunking import words


@pytest.fixture(scope="module")
def embedder(minilm: Path) -> Embedder:
    return Embedder(minilm)


class Library:
    """A retriever on disk that can be closed and opened again."""

    def __init__(self, folder: Path, embedder: Embedder, signature: str = "a" * 64, chunk_tokens: int = 40) -> None:
        self.folder = folder
        self.database = Database(f"sqlite:///{folder / 'catalogue.sqlite'}")
        self.catalogue = Catalogue(self.database, signature)
        self.jobs = Jobs(self.database, signature)
        self.retriever = Retriever(
            self.catalogue, embedder, words, tokens_digest, chunk_tokens, folder / "index", signature
        )
        self.catalogue.ensure_collection("default")
        self.retriever.open()

    def put(self, name: str, text: str, collection: str = "default", **options: Any) -> Upsert:
        return self.catalogue.upsert(
            collection,
            name,
            digest=tokens_digest(tuple(text.encode())),
            kind="txt",
            content=text.encode(),
            parsed=ParsedDocument(text),
            title=options.get("title"),
            metadata=options.get("metadata", {}),
        )

    def work(self) -> int:
        """Does all pending index jobs; returns how many."""
        count = 0
        while (claimed := self.jobs.claim("index")) is not None:
            if self.retriever.index(claimed, lambda done, total: self.jobs.progress(claimed.job, done, total)):
                self.jobs.finish(claimed.job)
            count += 1
        return count

    def find(self, question: str, count: int = 3, collection: str = "default") -> list[str]:
        return [hit.chunk.document for hit in self.retriever.search(collection, question, count)]


@pytest.fixture
def library(tmp_path: Path, embedder: Embedder) -> Iterator[Library]:
    made = Library(tmp_path, embedder)
    yield made
    made.database.close()


BOATS = "The Alke is a red rigid inflatable boat with two outboard engines. "
SEALS = "Grey seals have their pups on the skerries in November. "
POWER = "The tidal turbine charges the battery bank of the station. "


def test_the_right_document_is_found(library: Library) -> None:
    for name, text in (("boats", BOATS * 20), ("seals", SEALS * 20), ("power", POWER * 20)):
        assert library.put(name, text).result == "created"
    assert library.find("anything") == []
    assert library.work() == 3
    assert library.find("When do seals give birth?", 1) == ["seals"]
    assert library.find("Which engines does the boat have?", 1) == ["boats"]
    [hit] = library.retriever.search("default", "What charges the battery?", 1)
    assert hit.chunk.document == "power"
    assert 0.3 < hit.score <= 1.0
    assert hit.chunk.text == (POWER * 20)[hit.chunk.start : hit.chunk.end]
    assert tokens_digest(hit.chunk.token_ids) == hit.chunk.tokens_digest


def test_a_chunk_longer_than_the_embedders_window_is_found_by_its_end(library: Library, embedder: Embedder) -> None:
    library.retriever._chunk_tokens = 4000
    filler = "The committee approved the minutes of the former meeting without discussion. " * 120
    library.put("long", filler + SEALS * 3)
    library.put("other", POWER * 30)
    library.work()
    assert max(len(v) for _, v in library.catalogue.vectors("default", embedder.dim)) > 4
    assert library.find("When do seals give birth?", 1) == ["long"]


def test_the_same_again_is_unchanged_and_a_failed_one_is_tried_again(library: Library) -> None:
    first = library.put("boats", BOATS)
    again = library.put("boats", BOATS)
    assert (again.result, again.job) == ("pending", first.job)
    library.work()
    assert library.put("boats", BOATS).result == "unchanged"
    assert library.put("boats", BOATS, title="New title").result == "updated"
    assert library.catalogue.document("default", "boats").title == "New title"
    assert library.put("boats", SEALS).result == "replaced"
    claimed = library.jobs.claim("index")
    assert claimed is not None
    library.jobs.fail(claimed.job, "ran out of luck")
    info = library.catalogue.document("default", "boats")
    assert (info.state, info.error, info.answers) == ("failed", "ran out of luck", True)
    assert library.find("engines", 1) == ["boats"]
    assert library.put("boats", SEALS).result == "replaced"
    library.work()
    assert library.catalogue.document("default", "boats").state == "ready"


def test_old_chunks_vanish_at_the_commit_at_which_new_ones_appear(library: Library) -> None:
    """Searches in another thread see the whole old or the whole new document, never both, never none."""
    library.put("doc", BOATS * 30)
    library.work()
    seen: list[set[str]] = []
    stop = threading.Event()

    def search() -> None:
        while not stop.is_set():
            hits = library.retriever.search("default", "boat seal", 100)
            seen.append({"seals" if "seal" in hit.chunk.text.lower() else "boats" for hit in hits})

    searcher = threading.Thread(target=search)
    searcher.start()
    try:
        for round_ in range(4):
            library.put("doc", (SEALS if round_ % 2 == 0 else BOATS) * 30)
            library.work()
    finally:
        stop.set()
        searcher.join()
    assert len(seen) > 4
    assert all(len(found) == 1 for found in seen)
    assert {"seals"} in seen


def test_a_superseded_revision_never_answers(library: Library) -> None:
    library.put("doc", BOATS * 5)
    claimed = library.jobs.claim("index")
    assert claimed is not None
    library.put("doc", SEALS * 5)
    assert library.jobs.job(claimed.job).state == "cancelled"
    assert library.retriever.index(claimed, lambda done, total: True) is False
    library.work()
    [hit] = library.retriever.search("default", "x", 1)
    assert "seals" in hit.chunk.text


def test_a_job_cancelled_while_it_runs_stops(library: Library) -> None:
    library.put("doc", BOATS * 500)
    claimed = library.jobs.claim("index")
    assert claimed is not None

    def progress(done: int, total: int) -> bool:
        if done:
            library.jobs.cancel(claimed.job)
        return library.jobs.progress(claimed.job, done, total)

    with pytest.raises(Cancelled):
        library.retriever.index(claimed, progress)
    assert library.find("x", 5) == []


def test_delete_in_every_state(library: Library) -> None:
    library.put("pending", BOATS)
    library.retriever.delete("default", "pending")
    assert library.work() == 0
    library.put("ready", SEALS * 20)
    library.put("kept", POWER * 20)
    library.work()
    library.retriever.delete("default", "ready")
    assert set(library.find("seals", 50)) == {"kept"}
    with pytest.raises(NotFound, match="no document 'ready'"):
        library.retriever.delete("default", "ready")
    with pytest.raises(NotFound, match="no document 'ready'"):
        library.catalogue.document("default", "ready")


def test_purges_name_only_chunks_that_nobody_holds(library: Library) -> None:
    library.put("a", BOATS * 20)
    library.put("b", BOATS * 20 + SEALS * 20)
    library.work()
    digests = {
        name: {digest for digest, _ in library.catalogue.revision_chunks(number)}
        for name, number in (("a", 1), ("b", 2))
    }
    assert digests["a"] & digests["b"]
    library.retriever.delete("default", "b")
    purges = set(library.jobs.purges())
    assert purges == digests["b"] - digests["a"]
    remaining = library.catalogue.remaining_holders()
    assert {digest for digest, *_ in remaining} == digests["b"] & digests["a"]
    assert library.catalogue.remaining_holders() == []
    assert set(library.jobs.purges()) == purges
    library.put("c", BOATS * 20 + SEALS * 20)
    library.work()
    assert library.jobs.purges() == []


def test_collections_are_apart(library: Library) -> None:
    library.put("doc", BOATS, "fleet")
    library.put("doc", SEALS, "wildlife")
    library.work()
    assert library.find("boat", 5, "fleet") == ["doc"]
    assert "seals" in library.retriever.search("wildlife", "boat", 5)[0].chunk.text
    with pytest.raises(NotFound, match="no collection 'nowhere'"):
        library.retriever.search("nowhere", "boat", 5)


def test_documents_are_listed_in_pages(library: Library) -> None:
    for number in range(5):
        library.put(f"d{number}", BOATS)
    assert [info.id for info in library.catalogue.documents("default", 2)] == ["d0", "d1"]
    assert [info.id for info in library.catalogue.documents("default", 9, "d1")] == ["d2", "d3", "d4"]


# Restarts


def reopen(library: Library, embedder: Embedder, **options: Any) -> Library:
    library.database.close()
    return Library(library.folder, embedder, **options)


@pytest.mark.parametrize("harm", ["none", "missing", "truncated", "flipped", "stale", "rubbish"])
def test_the_index_file_is_used_when_good_and_rebuilt_when_not(
    library: Library, embedder: Embedder, harm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library.put("boats", BOATS * 20)
    library.put("seals", SEALS * 20)
    library.work()
    library.retriever.save()
    [path] = (library.folder / "index").glob("*.faiss")
    data = bytearray(path.read_bytes())
    if harm == "missing":
        path.unlink()
    elif harm == "truncated":
        path.write_bytes(data[:-1])
    elif harm == "flipped":
        data[-5] ^= 1
        path.write_bytes(data)
    elif harm == "rubbish":
        path.write_bytes(b"rubbish")
    elif harm == "stale":
        library.put("power", POWER * 20)
        library.work()  # and killed before it could save
    reads: list[str] = []
    vectors = Catalogue.vectors

    def counted(self: Catalogue, collection: str, dim: int) -> Any:
        reads.append(collection)
        return vectors(self, collection, dim)

    monkeypatch.setattr(Catalogue, "vectors", counted)
    again = reopen(library, embedder)
    assert bool(reads) == (harm != "none")
    assert again.find("seals giving birth", 1) == ["seals"]
    assert set(again.find("x", 50)) == {"boats", "seals"} | ({"power"} if harm == "stale" else set())
    again.database.close()


def test_another_signature_makes_everything_anew_and_never_mixes(library: Library, embedder: Embedder) -> None:
    library.put("boats", BOATS * 20)
    library.put("seals", SEALS * 20)
    library.work()
    library.retriever.save()
    again = reopen(library, embedder, signature="b" * 64, chunk_tokens=25)
    assert again.find("seals", 50) == []
    again.jobs.recover()
    assert again.find("seals", 50) == []
    assert again.catalogue.counts() == {"pending": 2}
    claimed = again.jobs.claim("index")
    assert claimed is not None
    again.retriever.index(claimed, lambda done, total: True)
    assert set(again.find("seals", 50)) == {"boats"}
    again.work()
    assert set(again.find("seals", 50)) == {"boats", "seals"}
    assert max(len(ids) for _, ids in again.catalogue.revision_chunks(1)) <= 25
    again.database.close()


def test_running_jobs_run_again_after_a_restart(library: Library, embedder: Embedder) -> None:
    done = library.put("boats", BOATS)
    assert library.jobs.claim("index") is not None
    again = reopen(library, embedder)
    assert done.job is not None
    assert again.jobs.job(done.job).state == "running"
    again.jobs.recover()
    assert again.jobs.job(done.job).state == "pending"
    assert again.work() == 1
    assert again.jobs.job(done.job).state == "succeeded"
    again.database.close()


def test_a_job_that_kills_the_process_is_given_up(library: Library) -> None:
    done = library.put("poison", BOATS)
    for _ in range(MAX_ATTEMPTS):
        assert library.jobs.claim("index") is not None
        library.jobs.recover()
    assert library.jobs.claim("index") is None
    assert done.job is not None
    assert library.jobs.job(done.job).state == "failed"
    assert library.catalogue.document("default", "poison").state == "failed"


def test_a_job_that_gets_farther_each_time_is_not_given_up(library: Library) -> None:
    library.put("long", BOATS * 100)
    for done in range(1, MAX_ATTEMPTS + 3):
        claimed = library.jobs.claim("index")
        assert claimed is not None
        assert library.jobs.progress(claimed.job, done, 100)
        library.jobs.recover()


def test_a_job_given_back_costs_no_attempt(library: Library) -> None:
    library.put("late", BOATS)
    for _ in range(MAX_ATTEMPTS + 2):
        claimed = library.jobs.claim("index")
        assert claimed is not None
        library.jobs.release(claimed.job)
    assert library.catalogue.document("default", "late").state == "pending"
    assert library.work() == 1


def test_content_replaced_while_it_waits_to_be_made_anew_is_purged(library: Library, embedder: Embedder) -> None:
    library.put("boats", BOATS)
    library.work()
    old = library.catalogue.revision_chunks(1)
    library.database.close()
    again = Library(library.folder, embedder, signature="b" * 64)
    again.jobs.recover()
    again.put("boats", SEALS)
    assert again.jobs.purges() == [old[0][0]]
    again.database.close()


def test_what_is_not_searchable_is_counted_by_collection(library: Library) -> None:
    library.put("boats", BOATS)
    library.put("seals", SEALS, "other")
    assert (library.catalogue.not_searchable("default"), library.catalogue.not_searchable("other")) == (1, 1)
    library.work()
    library.put("boats", POWER)  # its former content answers until the new one is ready
    assert (library.catalogue.not_searchable("default"), library.catalogue.not_searchable("other")) == (0, 0)
    assert library.catalogue.counts() == {"pending": 1, "ready": 1}


def test_an_index_is_saved_as_of_the_state_it_was_brought_to(library: Library, embedder: Embedder) -> None:
    """Another program changed the catalogue meanwhile: the file must not pass for current at the next start."""
    library.put("boats", BOATS)
    library.work()
    with Database(str(library.database._engine.url)).write() as session:
        session.execute(sqlalchemy.text("update collections set state = 'changed elsewhere'"))
    library.retriever.save()
    state = library.retriever._stamp("changed elsewhere")
    assert VectorIndex.load(library.retriever._path("default"), embedder.dim, state) is None


def test_a_query_goes_before_the_next_windows_of_an_indexing(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    started = threading.Event()
    embed = Embedder._embed

    def traced(self: Embedder, texts: list[str]) -> Any:
        order.append("query" if texts == ["Which boat?"] else "chunks")
        started.set()
        return embed(self, texts)

    monkeypatch.setattr(Embedder, "_embed", traced)
    indexing = threading.Thread(target=embedder.embed_chunks, args=([BOATS * 20] * 40,))
    indexing.start()
    started.wait()
    embedder.embed_query("Which boat?")
    position = len(order)
    indexing.join()
    assert order.count("query") == 1
    assert position < len(order)


def test_a_locked_database_is_named(library: Library) -> None:
    library.database._engine.dispose()
    with sqlite3.connect(library.folder / "catalogue.sqlite", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")

        def impatient(connection: Any, *_: Any) -> None:
            connection.execute("PRAGMA busy_timeout=10")

        sqlalchemy.event.listen(library.database._engine, "connect", impatient)
        with pytest.raises(CatalogueUnavailable, match="locked"):
            library.put("boats", BOATS)
        other.execute("ROLLBACK")
    assert library.put("boats", BOATS).result == "created"


def test_precompute_jobs_are_added_for_another_key_space(library: Library) -> None:
    library.put("boats", BOATS)
    library.work()
    library.jobs.encode_again("space one")
    library.jobs.encode_again("space one")
    claimed = library.jobs.claim("precompute")
    assert claimed is not None
    assert library.jobs.claim("precompute") is None
    library.jobs.finish(claimed.job, "space one")
    library.jobs.encode_again("space one")
    assert library.jobs.claim("precompute") is None
    library.jobs.encode_again("space two")
    assert library.jobs.claim("precompute") is not None
    assert library.jobs.register_key_space("space one") == ["space one"]
    assert set(library.jobs.register_key_space("space two")) == {"space one", "space two"}


def test_a_cancelled_job_stays_cancelled(library: Library) -> None:
    done = library.put("boats", BOATS)
    assert done.job is not None
    assert library.jobs.cancel(done.job).state == "cancelled"
    assert library.work() == 0
    assert library.catalogue.document("default", "boats").state == "failed"
    assert library.jobs.cancel(done.job).state == "cancelled"
    with pytest.raises(NotFound):
        library.jobs.cancel("nonsense")
    assert library.put("boats", BOATS).result == "replaced"


def test_a_database_of_another_version_is_refused(tmp_path: Path) -> None:
    Database(f"sqlite:///{tmp_path / 'c.sqlite'}").close()
    with sqlite3.connect(tmp_path / "c.sqlite") as connection:
        connection.execute("UPDATE meta SET value = '999' WHERE name = 'schema_version'")
    connection.close()
    with pytest.raises(CatalogueError, match="999"):
        Database(f"sqlite:///{tmp_path / 'c.sqlite'}")
    (tmp_path / "d.sqlite").write_bytes(b"this is no database at all, whatever its name says" * 50)
    with pytest.raises(CatalogueError, match="not a database"):
        Database(f"sqlite:///{tmp_path / 'd.sqlite'}")


def test_sqlite_is_durable_and_checked(library: Library) -> None:
    with library.database.read() as session:
        connection = session.connection().connection
        for pragma, value in (("synchronous", 2), ("journal_mode", "wal"), ("foreign_keys", 1)):
            assert connection.cursor().execute(f"PRAGMA {pragma}").fetchone()[0] == value


# The index alone


def unit(generator: np.random.Generator, count: int, dim: int = 8) -> Any:
    vectors = generator.standard_normal((count, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_the_index_ranks_chunks_by_their_best_window() -> None:
    generator = np.random.default_rng(0)
    index = VectorIndex(8)
    held = {number: unit(generator, 1 + number % 5) for number in range(1, 60)}
    for number, vectors in held.items():
        index.add(number, vectors)
    index.remove([3, 7, 1000])
    del held[3], held[7]
    for _ in range(20):
        query = unit(generator, 1)[0]
        expected = sorted(held, key=lambda number: -float((held[number] @ query).max()))
        found = index.search(query, 10)
        assert [number for number, _ in found] == expected[:10]
        assert found[0][1] == pytest.approx(float((held[expected[0]] @ query).max()), abs=1e-5)
    assert len(index.search(unit(generator, 1)[0], 500)) == len(held)
    assert VectorIndex(8).search(unit(generator, 1)[0], 5) == []


def test_an_index_of_another_type_or_size_is_not_loaded(tmp_path: Path) -> None:
    index = VectorIndex(8)
    index.add(1, unit(np.random.default_rng(0), 2))
    index.save(tmp_path / "i.faiss", "state")
    assert VectorIndex.load(tmp_path / "i.faiss", 8, "state") is not None
    assert VectorIndex.load(tmp_path / "i.faiss", 16, "state") is None
    assert VectorIndex.load(tmp_path / "i.faiss", 8, "other") is None


def test_embeddings_have_unit_length(embedder: Embedder) -> None:
    long, short = embedder.embed_chunks(["word " * 1000, "word"])
    assert long.shape == (4, embedder.dim)
    assert short.shape == (1, embedder.dim)
    assert np.allclose(np.linalg.norm(long, axis=1), 1, atol=1e-5)
    assert float(np.linalg.norm(embedder.embed_query("word " * 1000))) == pytest.approx(1, abs=1e-5)
    assert embedder.embed_chunks([]) == []


def test_uses_are_counted_while_a_document_holds_the_chunk(library: Library) -> None:
    uses = Uses(library.database)
    library.put("boats", BOATS * 20)
    library.put("copy", BOATS * 20)
    library.work()
    hits = library.retriever.search("default", "boat", 20)
    held = {hit.chunk.tokens_digest: hit.chunk.token_ids for hit in hits}
    first, second, *_ = held
    uses.add({first: 1, second: 2, "f" * 64: 100})
    assert list(uses.most_used()) == [(second, held[second]), (first, held[first])]
    uses.add({first: 5})
    assert [digest for digest, _ in uses.most_used()] == [first, second]
    for name in ("boats", "copy"):
        library.retriever.delete("default", name)
    assert list(uses.most_used()) == []
