"""The HTTP surface: routes, error answers, server-sent events."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict
from pathlib import PurePath
from typing import Annotated, Any, TypeVar

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.sse import KEEPALIVE_COMMENT, format_sse_event
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException

from errors import InvalidInput, MalformedBody, ProphetKVError, QueueFull, UnsupportedContentType
from retriever.catalogue import DocumentInfo
from retriever.documents import ParsedDocument
from retriever.jobs import JobInfo
from retriever.parsing import kind_of, parse
from service.edge import Edge
from service.names import NAME_PATTERN
from service.pipeline import AnswerEvent
from service.problems import problem, problem_body
from service.runtime import DEFAULT_COLLECTION, Runtime
from service.schemas import DocumentBody, QueryBody
from service.settings import Settings
from service.version import __version__

log = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

_PING_SECONDS = 15.0
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_MAX_WAIT_SECONDS = 3600.0


def create_app(settings: Settings) -> FastAPI:
    """The application. It answers at once; `/health/ready` turns green when the models are loaded."""
    runtime = Runtime(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        start = asyncio.create_task(_start(app, runtime))
        try:
            yield
        finally:
            start.cancel()  # a server that is told to end while it loads does not finish loading
            await asyncio.gather(start, return_exceptions=True)
            await runtime.stop()

    app = FastAPI(title="ProphetKV", version=__version__, lifespan=lifespan, redoc_url=None)
    app.state.runtime = runtime
    app.state.on_failure = None  # the server sets it, to end the process when starting fails
    app.add_middleware(Edge, max_body_bytes=settings.max_body_bytes)
    _add_error_answers(app)
    _add_routes(app)
    return app


async def _start(app: FastAPI, runtime: Runtime) -> None:
    try:
        await runtime.start()
    except Exception as error:
        log.error("cannot start: %s", error, exc_info=not isinstance(error, ProphetKVError))
        runtime.failure = error
        if app.state.on_failure is not None:
            app.state.on_failure()


def _runtime(request: Request) -> Runtime:
    runtime: Runtime = request.app.state.runtime
    return runtime


def _started(request: Request) -> Runtime:
    runtime = _runtime(request)
    runtime.require_started()
    return runtime


AnyRuntime = Annotated[Runtime, Depends(_runtime)]
StartedRuntime = Annotated[Runtime, Depends(_started)]
Collection = Annotated[str, Query(pattern=NAME_PATTERN)]
Wait = Annotated[float, Query(ge=0.0, le=_MAX_WAIT_SECONDS)]


def _add_routes(app: FastAPI) -> None:
    @app.post("/query", openapi_extra=_json_body(QueryBody))
    async def query(request: Request, runtime: StartedRuntime) -> Response:
        """Answers a question from retrieved chunks, or from `contexts`."""
        body = _validated(QueryBody, await _json(request))
        searched = body.contexts is None
        indexing = await asyncio.to_thread(runtime.catalogue.not_searchable, body.collection) if searched else 0
        events = runtime.pipeline.answer(body, indexing)
        try:
            # Whatever fails up to here has a proper status: no header was sent.
            first = await anext(events)
        except QueueFull:
            runtime.metrics.rejected.labels("queue_full").inc()
            raise
        if body.stream:
            stream = _sse(first, events, request.state.request_id)
            return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM_HEADERS)
        return await _unless_disconnected(request, _collect(first, events))

    @app.put("/documents/{document_id:path}")
    async def put_document(
        request: Request,
        runtime: StartedRuntime,
        document_id: str,
        collection: Collection = DEFAULT_COLLECTION,
        wait: Wait = 0.0,
    ) -> Response:
        """Creates or replaces the document with the caller's id."""
        return await _upsert(request, runtime, collection, _checked_id(document_id), wait)

    @app.post("/documents")
    async def post_document(
        request: Request, runtime: StartedRuntime, collection: Collection = DEFAULT_COLLECTION, wait: Wait = 0.0
    ) -> Response:
        """Creates a document; its id follows from name and content, so the same again is the same document."""
        return await _upsert(request, runtime, collection, None, wait)

    @app.get("/documents")
    async def list_documents(
        runtime: StartedRuntime,
        collection: Collection = DEFAULT_COLLECTION,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        after: Annotated[str | None, Query(max_length=128)] = None,
    ) -> dict[str, Any]:
        """Documents in order of id; `next` is the `after` of the following page."""
        found = await asyncio.to_thread(runtime.catalogue.documents, collection, limit + 1, after)
        page = found[:limit]
        return {
            "documents": [_document(info) for info in page],
            "next": page[-1].id if len(found) > limit else None,
        }

    @app.get("/documents/{document_id:path}")
    async def get_document(
        runtime: StartedRuntime, document_id: str, collection: Collection = DEFAULT_COLLECTION
    ) -> dict[str, Any]:
        """One document."""
        return _document(await asyncio.to_thread(runtime.catalogue.document, collection, _checked_id(document_id)))

    @app.delete("/documents/{document_id:path}", status_code=204)
    async def delete_document(
        runtime: StartedRuntime, document_id: str, collection: Collection = DEFAULT_COLLECTION
    ) -> None:
        """Removes the document in whatever state it is, and the KV that no other document holds."""
        await asyncio.to_thread(runtime.retriever.delete, collection, _checked_id(document_id))
        await runtime.ingestor.purge_now()

    @app.get("/jobs/{job_id}")
    async def get_job(runtime: StartedRuntime, job_id: str) -> dict[str, Any]:
        """State, progress and error of a job."""
        return _job(await asyncio.to_thread(runtime.jobs.job, job_id))

    @app.delete("/jobs/{job_id}")
    async def cancel_job(runtime: StartedRuntime, job_id: str) -> dict[str, Any]:
        """Cancels a job unless it has ended."""
        return _job(await asyncio.to_thread(runtime.jobs.cancel, job_id))

    @app.get("/health/live")
    async def live() -> dict[str, str]:
        """The process answers."""
        return {"status": "live"}

    @app.get("/health/ready")
    async def ready(request: Request, runtime: AnyRuntime) -> Response:
        """200 when queries are served; else 503 with the reasons."""
        reasons = runtime.checks()
        told: dict[str, Any] = {"status": "not ready" if reasons else "ready", "version": __version__}
        if runtime.started:
            told["engine"] = asdict(runtime.engine.stats())
            told["documents"] = await asyncio.to_thread(runtime.catalogue.counts)
            told["tiers"] = [tier.name for tier in runtime.store.tiers]
            told["model"] = {"name": runtime.settings.model, "dtype": str(runtime.model.dtype).removeprefix("torch.")}
        if not reasons:
            return JSONResponse(told)
        detail = "; ".join(f"{what}: {why}" for what, why in reasons.items())
        body = problem_body(503, "not_ready", detail, request.state.request_id)
        return _problem_answer(503, {**body, **told, "reasons": reasons}, {"Retry-After": "5"})

    @app.get("/metrics")
    async def metrics(runtime: AnyRuntime) -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(runtime.metrics.registry), media_type=CONTENT_TYPE_LATEST)


async def _upsert(request: Request, runtime: Runtime, collection: str, name: str | None, wait: float) -> Response:
    content, kind, title, metadata, filename = await _document_body(request)
    digest = hashlib.sha256(kind.encode() + b"\0" + content).hexdigest()
    if name is None:
        name = hashlib.sha256(json.dumps([filename, title, digest]).encode()).hexdigest()[:32]
    async with runtime.parsing:
        parsed = await asyncio.to_thread(_parsed, content, kind)
    done = await asyncio.to_thread(
        lambda: runtime.catalogue.upsert(
            collection,
            name,
            digest=digest,
            kind=kind,
            content=content,
            parsed=parsed,
            title=title or parsed.title or filename,
            metadata=metadata,
        )
    )
    runtime.ingestor.wake()
    if done.result not in ("created", "unchanged"):  # what answers now may have other metadata
        await runtime.ingestor.retain(collection, name)
    told: dict[str, Any] = {"result": done.result, "document": _document(done.document)}
    if done.job is None:
        return JSONResponse(told, 200)

    async def give_up() -> bool:
        return runtime.pipeline.draining or await request.is_disconnected()

    info = await runtime.ingestor.wait(done.job, wait, give_up)
    if info.state not in ("pending", "running"):
        told["document"] = _document(await asyncio.to_thread(runtime.catalogue.document, collection, name))
    return JSONResponse({**told, "job": _job(info)}, 202, {"Location": f"/jobs/{info.id}"})


def _parsed(content: bytes, kind: str) -> ParsedDocument:
    if kind == "text":
        return ParsedDocument(content.decode())
    return parse(content, kind)


async def _document_body(request: Request) -> tuple[bytes, str, str | None, dict[str, Any], str | None]:
    """Content, kind, title, metadata and file name, from a JSON or a multipart body."""
    essence = _essence(request)
    if essence == "application/json":
        body = _validated(DocumentBody, await _json(request))
        if not body.text.strip():
            raise InvalidInput("the text is empty", field="text")
        return body.text.encode(), "text", body.title, body.metadata, None
    if essence != "multipart/form-data":
        raise UnsupportedContentType(
            "send application/json with a `text`, or multipart/form-data with a `file`; "
            f"got {essence or 'no content type'}"
        )
    try:
        async with request.form(max_files=1, max_fields=4, max_part_size=1 << 20) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise MalformedBody("the multipart body has no file part named `file`")
            title, metadata = form.get("title"), form.get("metadata")
            content = await file.read()
            filename = PurePath(file.filename or "").name or None
            kind = kind_of(filename, file.content_type)
    except HTTPException as error:
        raise MalformedBody(f"the multipart body cannot be read: {error.detail}") from error
    fields = {"text": "file", "title": title or None}
    if metadata is not None:
        try:
            fields["metadata"] = json.loads(str(metadata))
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"metadata is not JSON: {error}", field="metadata") from error
    told = _validated(DocumentBody, fields)
    return content, kind, told.title, told.metadata, filename


def _essence(request: Request) -> str:
    return request.headers.get("content-type", "").split(";")[0].strip().lower()


async def _json(request: Request) -> Any:
    """The body as JSON. Raises UnsupportedContentType or MalformedBody."""
    if _essence(request) != "application/json":
        raise UnsupportedContentType(f"send application/json; got {_essence(request) or 'no content type'}")
    body = await request.body()
    try:
        data = json.loads(body.decode())  # not from bytes, which would let half characters pass
        if b"\\ud" in body.lower():  # an escape for half of a character, which is no text without the other half
            json.dumps(data, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise MalformedBody(f"the body is not JSON: {error}") from error
    return data


def _validated(model: type[T], data: Any) -> T:
    """Raises InvalidInput that names the first bad field."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _invalid(error.errors()) from error


def _invalid(details: Any) -> InvalidInput:
    first = details[0]
    field = ".".join(str(part) for part in first["loc"])
    return InvalidInput(f"{field}: {first['msg']}" if field else first["msg"], field or None)


def _json_body(model: type[BaseModel]) -> dict[str, Any]:
    """Documents a body that the route validates itself, so that its errors say what was wrong."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": model.model_json_schema()}}}}


def _checked_id(document_id: str) -> str:
    if not re.fullmatch(NAME_PATTERN, document_id):
        raise InvalidInput(
            f"document id {document_id!r} is not allowed: 1 to 128 letters, digits, '.', '_' or '-', "
            "beginning with a letter or digit",
            field="id",
        )
    return document_id


def _document(info: DocumentInfo) -> dict[str, Any]:
    return {
        **asdict(info),
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
    }


def _job(info: JobInfo) -> dict[str, Any]:
    progress = {"stage": info.stage, "done": info.done, "total": info.total}
    return {
        "id": info.id,
        "document": info.document,
        "collection": info.collection,
        "state": info.state,
        "progress": progress,
        "error": info.error,
        "created_at": info.created_at.isoformat(),
        "updated_at": info.updated_at.isoformat(),
    }


async def _sse(first: AnswerEvent, events: AsyncGenerator[AnswerEvent], request_id: str) -> AsyncIterator[bytes]:
    """Events on the wire. A failure after the first becomes an `error` event; pings keep idle proxies patient."""

    def wire(name: str, data: dict[str, Any]) -> bytes:
        # No ids: a stream cannot be resumed, and a ping after an id looks like an empty event to some clients.
        return format_sse_event(event=name, data_str=json.dumps(data, ensure_ascii=False))

    pending: asyncio.Future[AnswerEvent] | None = None
    try:
        yield wire(first.name, first.data)
        while True:
            pending = asyncio.ensure_future(anext(events))
            while not (await asyncio.wait({pending}, timeout=_PING_SECONDS))[0]:
                yield KEEPALIVE_COMMENT
            event = pending.result()
            yield wire(event.name, event.data)
    except StopAsyncIteration:
        return
    except Exception as error:
        _, body, _ = problem(error, request_id)
        if body["status"] == 500:
            log.exception("request %s failed while streaming", request_id)
        yield wire("error", body)
    finally:
        if pending is not None and not pending.done():
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)
        await events.aclose()


async def _collect(first: AnswerEvent, events: AsyncGenerator[AnswerEvent]) -> dict[str, Any]:
    """The whole answer as one object."""
    told: dict[str, Any] = {"answer": "", "sources": first.data["sources"], "citations": []}
    async with aclosing(events):
        async for event in events:
            if event.name == "token":
                told["answer"] += event.data["text"]
            elif event.name == "citation":
                told["citations"].append({name: value for name, value in event.data.items() if name != "source"})
            elif event.name == "done":
                told |= event.data
    return told


async def _unless_disconnected(request: Request, answer: Awaitable[dict[str, Any]]) -> Response:
    """Awaits the answer, and drops the work when the client leaves."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return JSONResponse(work.result())
        return Response(status_code=499)  # nobody reads it
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(ProphetKVError)
    async def known(request: Request, error: ProphetKVError) -> Response:
        status, body, headers = problem(error, request.state.request_id)
        if status == 500:
            log.error("request %s failed", request.state.request_id, exc_info=error)
        return _problem_answer(status, body, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        status, body, headers = problem(_invalid(error.errors()), request.state.request_id)
        return _problem_answer(status, body, headers)

    @app.exception_handler(HTTPException)
    async def routing(request: Request, error: HTTPException) -> Response:
        codes = {404: "not_found", 405: "method_not_allowed"}
        detail = {404: f"there is nothing at {request.url.path}"}.get(error.status_code, error.detail)
        body = problem_body(
            error.status_code, codes.get(error.status_code, "http_error"), detail, request.state.request_id
        )
        return _problem_answer(error.status_code, body, dict(error.headers or {}))

    @app.exception_handler(Exception)
    async def unknown(request: Request, error: Exception) -> Response:
        status, body, headers = problem(error, request.state.request_id)
        return _problem_answer(status, body, headers)


def _problem_answer(status: int, body: dict[str, Any], headers: dict[str, str]) -> Response:
    return JSONResponse(body, status, headers, media_type="application/problem+json")
