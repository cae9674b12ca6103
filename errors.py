"""The one error tree. Every package raises from it; `service/problems.py` maps it to HTTP in one table.

ProphetKVError
├── BadRequest                 the caller can mend it
│   ├── InvalidInput           a field has a value that cannot be served
│   ├── PromptTooLong          question or contexts exceed the model's window
│   ├── UnknownStrategy
│   ├── ReuseRefused           reuse is not proven for the model: only a full prefill is served
│   ├── NotFound               no such collection, document or job
│   ├── UnsupportedDocument    the type is not one of those that can be parsed, or not what its name says
│   ├── UnreadableDocument     empty, broken, encrypted or undecodable
│   ├── UnsupportedContentType  the endpoint does not take bodies of that media type
│   ├── MalformedBody          not the JSON or multipart it claims to be
│   └── BodyTooLarge
├── Unavailable                right request, wrong moment: try again later
│   ├── QueueFull
│   └── NotReady               starting, draining, or the engine is dead
├── Cancelled                  the client left, or the server stops
├── StoreError                 a KV tier failed; the tiered store turns it into a miss and a metric
│   ├── StoreUnavailable
│   │   └── StoreMoved         the entry is with another node of the cluster
│   └── CorruptEntry
├── NumericalFault             NaN or infinity where numbers should be: the request falls back, or fails
├── ModelError
│   ├── UnsupportedModel       reuse is not proven for it, or it cannot be loaded whole
│   └── ModelUnavailable       no source answered, or what came has another digest
├── CatalogueError             the database was made by a newer version, or is not ours
│   └── CatalogueUnavailable   it does not answer now: locked, disk full, connection lost
└── ConfigError                a setting is out of bounds, unknown, or contradicts another
"""

from __future__ import annotations


class ProphetKVError(Exception):
    """Root of the tree. The message says what was wrong and what to do about it."""


class BadRequest(ProphetKVError):
    """The caller can mend it."""


class InvalidInput(BadRequest):
    """A field has a value that cannot be served. `field` names it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(BadRequest):
    """The prompt does not fit the model's window."""


class UnknownStrategy(BadRequest):
    """No strategy of that name is registered."""


class ReuseRefused(BadRequest):
    """Reuse is not proven for the configured model; it is served by full prefill."""


class NotFound(BadRequest):
    """No such collection, document or job."""


class UnsupportedDocument(BadRequest):
    """The document's type cannot be parsed, or the content is not what the name says."""


class UnreadableDocument(BadRequest):
    """The document is empty, broken, encrypted or undecodable."""


class UnsupportedContentType(BadRequest):
    """The endpoint does not take bodies of that media type."""


class MalformedBody(BadRequest):
    """The body is not the JSON or multipart that it claims to be."""


class BodyTooLarge(BadRequest):
    """The request body exceeds the limit."""


class Unavailable(ProphetKVError):
    """Right request, wrong moment. `retry_after` is in seconds."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(Unavailable):
    """The bounded request queue is full."""


class NotReady(Unavailable):
    """The service is starting, draining, or its engine is dead."""


class Cancelled(ProphetKVError):
    """The request was aborted: the client left or the server stops."""


class StoreError(ProphetKVError):
    """A KV tier failed."""


class StoreUnavailable(StoreError):
    """The tier's medium does not answer."""


class StoreMoved(StoreUnavailable):
    """The node that was asked does not serve the key (any more)."""


class CorruptEntry(StoreError):
    """An entry is not what its key claims. `reason` is a short label for the metric."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason


class NumericalFault(ProphetKVError):
    """The model's arithmetic overflowed, or reused KV is not what it should be."""


class ModelError(ProphetKVError):
    """Something about the model."""


class UnsupportedModel(ModelError):
    """KV reuse is not proven for this architecture, RoPE type or attention, or the model cannot be loaded whole."""


class ModelUnavailable(ModelError):
    """The weights could not be had, or are not what was asked for."""


class CatalogueError(ProphetKVError):
    """The catalogue database cannot be used."""


class CatalogueUnavailable(CatalogueError):
    """The catalogue database does not answer now."""


class ConfigError(ProphetKVError):
    """A setting is out of bounds, unknown, or contradicts another."""
