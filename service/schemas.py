"""Request bodies as pydantic models: validated at the edge, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Text = Annotated[str, StringConstraints(min_length=1, max_length=20_000_000)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class StrategyBody(BaseModel):
    """How the context's KV is had; see GET /docs for the names."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=64)
    ratio: float | None = Field(None, ge=0.0, le=1.0, description="share of context tokens to recompute")


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
    strategy: StrategyBody | None = None
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
    metadata: dict[str, Any] = Field(default_factory=dict)
