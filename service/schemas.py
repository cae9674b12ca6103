"""Request bodies as pydantic models: validated at the edge, unknown fields refused."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, WithJsonSchema, field_validator

from engine.strategies import SERVED
from errors import InvalidInput
from service.names import NAME_PATTERN
from service.retention import FIELD, parse_retention

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=20_000_000)]
_MAX_METADATA_BYTES = 16 << 10
_MAX_METADATA_DEPTH = 32
Stop = Annotated[str, StringConstraints(min_length=1, max_length=128)]


def _strategy_schema() -> dict[str, Any]:
    """JSON schema of the field `strategy`: one object a strategy, with its options."""
    kinds = []
    for name, kind in SERVED.items():
        schema = kind.model_json_schema()
        schema["properties"] = {"name": {"const": name}, **schema["properties"]}
        kinds.append(schema | {"required": ["name"]})
    return {"anyOf": [*kinds, {"type": "null"}]}


class QueryBody(BaseModel):
    """`POST /query`."""

    model_config = ConfigDict(extra="forbid")

    question: Text
    collection: Name = "default"
    top_k: int | None = Field(None, ge=1, le=100)
    filters: None = Field(None, description="not supported yet: must be absent")
    contexts: list[Text] | None = Field(
        None, min_length=1, max_length=1000, description="bypass retrieval with these texts"
    )
    # Checked by the strategy itself, which knows its options and the model.
    strategy: Annotated[dict[str, Any] | None, WithJsonSchema(_strategy_schema())] = None
    max_tokens: int | None = Field(None, ge=1, le=32768)
    temperature: float = Field(0.0, ge=0.0, le=2.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    stop: list[Stop] = Field(default_factory=list, max_length=8)
    seed: int | None = Field(None, ge=0, lt=1 << 63)
    stream: bool = False

    @field_validator("question")
    @classmethod
    def _not_blank(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("the question is empty")
        return value

    @field_validator("strategy")
    @classmethod
    def _named(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and not (isinstance(value.get("name"), str) and len(value["name"]) <= 64):
            raise ValueError("strategy.name must be a string of at most 64 characters")
        return value

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value or []

    @field_validator("contexts")
    @classmethod
    def _contexts_not_blank(cls, value: list[str] | None) -> list[str] | None:
        for index, text in enumerate(value or []):
            if not text.strip():
                raise ValueError(f"contexts[{index}] is empty")
        return value


class DocumentBody(BaseModel):
    """A document sent as JSON."""

    model_config = ConfigDict(extra="forbid")

    text: Text
    title: str | None = Field(None, max_length=1000)
    metadata: dict[str, Any] = Field(default_factory=dict, description="shown with every source of the document")

    @field_validator("metadata")
    @classmethod
    def _plain_json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"metadata must be plain JSON: {error}") from error
        if FIELD in value:
            try:
                parse_retention(value[FIELD])
            except InvalidInput as error:
                raise ValueError(str(error)) from error
        if size > _MAX_METADATA_BYTES or _depth(value) > _MAX_METADATA_DEPTH:
            raise ValueError(
                f"metadata may have {_MAX_METADATA_BYTES} bytes as JSON and {_MAX_METADATA_DEPTH} levels of nesting"
            )
        return value


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]
    return depth
