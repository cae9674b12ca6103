"""All settings: one flat model, prefix PROPHETKV_, every field with a bound and a default.

The only reader of the environment.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from errors import ConfigError, InvalidInput

PREFIX = "PROPHETKV_"
_ENV_FILE = ".env"

GIB = 1 << 30
_REDIS_SCHEMES = (
    *("redis://", "redis+sentinel://", "redis+cluster://"),
    *("rediss://", "rediss+sentinel://", "rediss+cluster://"),
    "unix://",
)

SYSTEM_PROMPT = (
    "You answer questions from the numbered sources that the user gives. Answer briefly and only with what the "
    "sources say, and name the source of each fact by its number in square brackets, like [1]. "
    "When the sources do not hold the answer, say so."
)


class Settings(BaseSettings):
    """Effective settings. Sources, strongest first: arguments, environment, `.env` in the working folder, defaults."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_file=_ENV_FILE, extra="ignore", frozen=True)

    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    data_dir: Path = Field(Path("prophetkv-data"), description="catalogue, index, disk tier and model cache")
    model_dir: Path | None = Field(None, description="model cache, when it is to lie outside the data folder")
    model: str = Field(
        "qwen2.5-coder-0.5b-instruct", min_length=1, description="language model: manifest name, folder or hub id"
    )
    embedder: str = Field("all-minilm-l6-v2", min_length=1, description="embedder: manifest name, folder or hub id")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where the language model runs")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and KV")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of the language model; 0: one a core")

    strategy: str = Field("auto", description="default strategy of queries; auto: prophetkv or full, the faster")
    ratio: float = Field(0.2, ge=0.0, le=1.0, description="default share of context tokens to recompute")
    system_prompt: str = Field(
        SYSTEM_PROMPT, max_length=8000, description="stands before the sources; part of every key"
    )
    max_context_tokens: int = Field(16384, ge=256, le=1 << 20, description="bound on prompt and answer of one query")
    max_tokens: int = Field(256, ge=1, le=32768, description="default length limit of an answer")
    top_k: int = Field(5, ge=1, le=100, description="default number of chunks to retrieve")
    chunk_tokens: int = Field(512, ge=16, le=4096, description="chunk length in tokens of the language model")

    memory_bytes: int = Field(1 * GIB, ge=0, description="budget of the memory tier")
    disk_bytes: int = Field(20 * GIB, ge=0, description="budget of the disk tier; 0 turns it off")
    disk_timeout_ms: int = Field(250, ge=10, le=60000, description="longest wait for a byte from the disk tier")
    redis_url: str = Field("", description="Redis tier, such as redis://host:6379/0 or unix:///path; empty: none")
    redis_bytes: int = Field(0, ge=0, description="nothing is written to a Redis that holds more; 0: its own maxmemory")
    redis_timeout_ms: int = Field(250, ge=10, le=60000, description="longest wait for a byte from Redis")
    prefetch_bytes: int = Field(
        256 << 20, ge=0, description="chunk KV that is read ahead of the requests that need it; 0 turns that off"
    )
    warm_up: bool = Field(
        False, description="count which chunks are used, and load the most used into memory at the next start"
    )
    device_bytes: int = Field(0, ge=0, description="budget of the tier in GPU memory; 0 turns it off")
    kv_codec: Literal["raw", "int8", "fp8", "int4"] = Field("raw", description="how chunk KV is written in every tier")
    kv_eviction: Literal["lru", "cost"] = Field(
        "lru",
        description="who goes first when a tier is full: least recently used, or least used and cheap for its bytes",
    )
    kv_retention: str = Field("", max_length=8000, description="by collection, pin or seconds: handbook=pin,news=86400")
    kv_in_flight_bytes: int = Field(
        256 << 20,
        ge=1 << 20,
        le=1 << 40,
        description="bound on chunk KV that is being read from slower tiers at a time",
    )
    precompute: bool = Field(True, description="compute chunk KV ahead, after a document was indexed")
    database_url: str = Field("", description="catalogue; empty: SQLite in the data folder")

    max_waiting: int = Field(32, ge=1, le=10000, description="queries that may wait for the device; beyond that 429")
    max_running: int = Field(4, ge=1, le=256, description="queries that may be between first and last token at once")
    max_body_bytes: int = Field(50 << 20, ge=1024, le=2 * GIB, description="largest request body")
    drain_seconds: float = Field(20.0, ge=0.0, le=3600.0, description="how long open answers may run on after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="threshold of the log")

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str) -> str:
        if value and not value.startswith(_REDIS_SCHEMES):
            raise ValueError(f"must start with {', '.join(_REDIS_SCHEMES)}")
        return value

    @field_validator("kv_retention")
    @classmethod
    def _retention_rules(cls, value: str) -> str:
        if not value:
            return value
        from service.retention import parse_rules  # here, for it brings torch: seconds that most commands need not wait

        try:
            parse_rules(value)
        except InvalidInput as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def model_cache(self) -> Path:
        """The model cache folder with its default filled in."""
        return self.model_dir or self.data_dir / "models"

    @property
    def catalogue_url(self) -> str:
        """The database URL with its default filled in."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'catalogue.sqlite'}"

    def origins(self) -> dict[str, str]:
        """Where each effective value comes from."""
        file = _file_values()
        told = {}
        for name in type(self).model_fields:
            variable = PREFIX + name.upper()
            if variable in os.environ:
                told[name] = f"environment ({variable})"
            elif variable in file:
                told[name] = f"file ({_ENV_FILE})"
            else:
                told[name] = "default"
        return told

    def shown(self) -> dict[str, str]:
        """The effective values as text, secrets hidden."""
        values = {name: str(getattr(self, name)) for name in type(self).model_fields}
        values["model_dir"] = str(self.model_cache)
        for name in ("redis_url", "database_url"):
            values[name] = _without_password(values[name])
        return values


def load_settings(**overrides: object) -> Settings:
    """Reads the settings.

    Raises ConfigError for a value out of bounds, and for a PROPHETKV_ variable that does not exist.
    """
    known = {PREFIX + name.upper() for name in Settings.model_fields}
    unknown = sorted(
        name for name in (*os.environ, *_file_values()) if name.upper().startswith(PREFIX) and name.upper() not in known
    )
    if unknown:
        raise ConfigError(f"unknown setting {unknown[0]}; `prophetkv config` lists all that exist")
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        name = PREFIX + str(first["loc"][0]).upper() if first["loc"] else "settings"
        got = "" if name.endswith("_URL") else f" (got {first['input']!r})"  # a URL may hold a password
        raise ConfigError(f"{name}: {first['msg']}{got}") from None


def with_settings(**values: object) -> dict[str, str]:
    """This process's environment with these settings in it, for a server of one's own."""
    return os.environ | {PREFIX + name.upper(): str(value) for name, value in values.items()}


def _file_values() -> dict[str, str | None]:
    return dotenv_values(_ENV_FILE) if Path(_ENV_FILE).exists() else {}


def _without_password(url: str) -> str:
    password = urlsplit(url).password
    if password:
        url = url.replace(f":{password}@", ":***@")
    return re.sub(r"(?i)\b(password|sslpassword)=[^&]*", r"\1=***", url)
