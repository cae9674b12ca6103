"""Errors as HTTP: one table, one body that is RFC 9457 problem+json and carries an OpenAI `error` object."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

import errors

# The most derived class that is listed decides. Everything else is a 500 whose detail stays in the log.
TABLE: dict[type[Exception], tuple[int, str]] = {
    errors.InvalidInput: (422, "invalid_input"),
    errors.PromptTooLong: (400, "context_length_exceeded"),
    errors.UnknownStrategy: (422, "unknown_strategy"),
    errors.ReuseRefused: (422, "reuse_refused"),
    errors.NotFound: (404, "not_found"),
    errors.UnsupportedDocument: (415, "unsupported_document"),
    errors.UnreadableDocument: (422, "unreadable_document"),
    errors.UnsupportedContentType: (415, "unsupported_content_type"),
    errors.MalformedBody: (400, "malformed_body"),
    errors.BodyTooLarge: (413, "body_too_large"),
    errors.NumericalFault: (500, "numerical_fault"),
    errors.QueueFull: (429, "queue_full"),
    errors.CatalogueUnavailable: (503, "catalogue_unavailable"),
    errors.NotReady: (503, "not_ready"),
}


def problem(error: Exception, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and extra headers for an error."""
    known = next((TABLE[kind] for kind in type(error).__mro__ if kind in TABLE), None)
    status, code = known or (500, "internal_error")
    detail = str(error) if known else f"internal error; the log has the details under request id {request_id}"
    headers = {}
    if isinstance(error, errors.Unavailable):
        headers["Retry-After"] = str(math.ceil(error.retry_after))
    field = getattr(error, "field", None)
    return status, problem_body(status, code, detail, request_id, field), headers


def problem_body(status: int, code: str, detail: str, request_id: str, field: str | None = None) -> dict[str, Any]:
    """The body of every error answer and of every `error` event."""
    return {
        "type": f"urn:prophetkv:error:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": request_id,
        "error": {
            "message": detail,
            "type": "invalid_request_error" if status < 500 else "server_error",
            "code": code,
            "param": field,
        },
    }
