"""The outermost layer, pure ASGI so that streams pass untouched: request ids, and the body limit before any parsing."""

from __future__ import annotations

import contextlib
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from errors import BodyTooLarge
from service.problems import problem

_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Edge:
    """Gives every request an id (the caller's `x-request-id` if it is harmless) and counts its body's bytes."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._limit = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        told = headers.get("x-request-id", "")
        request_id = told if _ID.fullmatch(told) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        too_large = False
        started = False
        received = 0

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if too_large and not started:
                return  # whatever the application made of the cut body; the answer is sent below
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        async def counted() -> Message:
            nonlocal received, too_large
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._limit:
                too_large = True
                raise _Stop
            return message

        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._limit:
            too_large = True
        else:
            with contextlib.suppress(_Stop):
                await self._app(scope, counted, send_with_id)
        if too_large and not started:
            error = BodyTooLarge(f"the body is larger than the limit of {self._limit} bytes")
            status, body, _ = problem(error, request_id)
            answer = JSONResponse(body, status, {"Connection": "close"}, media_type="application/problem+json")
            too_large = False
            await answer(scope, receive, send_with_id)


class _Stop(Exception):
    """Ends reading a body that is too large."""
