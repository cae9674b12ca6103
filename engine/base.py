"""The engine's contract: plain requests in, plain events out. No tensors, no text, durations but never timestamps."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from cache_store.base import Chunk

if TYPE_CHECKING:
    from engine.strategies import Strategy


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Temperature 0 is greedy; `seed` makes a draw repeatable."""

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk and the glue before it: separator and source label, which belong to no chunk."""

    glue: tuple[int, ...]
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Prefix, parts and suffix in prompt order, each tokenised on its own.

    question: where the user's own words stand within the suffix, [start, stop); empty when nobody knows.
    """

    id: str
    prefix: tuple[int, ...]
    parts: tuple[Part, ...]
    suffix: tuple[int, ...]
    strategy: Strategy
    sampling: Sampling = Sampling()
    question: tuple[int, int] = (0, 0)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the whole prompt."""
        return len(self.prefix) + len(self.suffix) + sum(len(p.glue) + len(p.chunk.token_ids) for p in self.parts)


@dataclass(frozen=True, slots=True)
class EncodeRequest:
    """Compute the chunks that no tier holds, whenever no query wants the device."""

    id: str
    chunks: tuple[Chunk, ...]


@dataclass(slots=True)
class Work:
    """What passes through the model did, summed over layers: rows, and query-key pairs that attention visited.

    kv_rows: rows of which a layer computed K and V only. causal: those of `pairs` that one causal run of rows from
    position 0 visited. scored: pairs whose weights were summed by column. calls: times a layer ran. turned: bytes of
    chunk KV that were turned to a position, or back.
    """

    rows: int = 0
    kv_rows: int = 0
    pairs: int = 0
    causal: int = 0
    scored: int = 0
    calls: int = 0
    turned: int = 0

    def add(self, rows: int, pairs: int, causal: bool = False, layers: int = 1) -> None:
        """`rows` went through as many layers; their attention visited `pairs` in each."""
        self.rows += layers * rows
        self.pairs += layers * pairs
        self.causal += layers * pairs if causal else 0
        self.calls += layers

    def add_kv(self, rows: int, pairs: int = 0) -> None:
        """`rows` left a layer early, with their K and V alone, or having visited `pairs` too."""
        self.kv_rows += rows
        self.pairs += pairs
        self.calls += 1


@dataclass(frozen=True, slots=True)
class Decision:
    """What `auto` chose, and what it expected, in milliseconds from the chunks' loading to the first token's logits.

    loaded, computed: how many chunks reuse has from a tier, and how many it computes because that is faster or no tier
    holds them. missing: the chunks that no tier holds, to be encoded afterwards when a full prefill ran. trial: the way
    that looked slower was chosen, to learn what it takes.
    """

    strategy: str
    predicted_ms: dict[str, float]
    loaded: int
    computed: int
    missing: tuple[Chunk, ...]
    trial: bool


@dataclass(slots=True)
class Usage:
    """What a prefill used.

    recomputed_tokens: context tokens whose KV was computed anew (those that entered layer 0 in Stage II).
    bytes_copied: of chunk KV into the slots. fallback_reason: why another strategy than the named one answered.
    decision: of the strategy `auto`; `strategy` is then what it chose.
    """

    prompt_tokens: int = 0
    context_tokens: int = 0
    recomputed_tokens: int = 0
    hits: dict[str, int] = field(default_factory=lambda: dict.fromkeys(("memory", "disk", "redis", "computed"), 0))
    bytes_loaded: int = 0
    bytes_copied: int = 0
    work: Work = field(default_factory=Work)
    strategy: str = ""
    ratio: float = 0.0
    fallback_reason: str | None = None
    decision: Decision | None = None
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The prefill is done; `timings` are milliseconds by phase."""

    usage: Usage
    timings: dict[str, float]
    predicted_full_prefill_ms: float

    @property
    def prefill_ms(self) -> float:
        """From the chunks' loading to the first token's logits."""
        return sum(value for phase, value in self.timings.items() if phase != "queue")


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token."""

    id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Ends a good generation: `stop` (an end-of-text token) or `length` (max_tokens)."""

    reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One chunk of an EncodeRequest is in the store, or was there already (`tier`)."""

    tier: str


Request = GenerateRequest | EncodeRequest
Event = Prefilled | Token | Finished | Encoded


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot: queries running and waiting, background encodings, and how long ago the device thread took a step."""

    alive: bool
    running: int
    waiting: int
    background: int
    seconds_since_step: float


class Loader(Protocol):
    """Loads ahead, on behalf of requests: cache_store's Prefetcher."""

    def begin(self, owner: str, chunks: Sequence[Chunk], choosy: bool) -> None:
        """Begins to load, only what is worth it if `choosy`; returns at once."""

    def end(self, owner: str) -> None:
        """Drops what was begun for the owner alone. Unknown owners are fine."""


class EngineClient(Protocol):
    """How the service reaches an engine, wherever it runs."""

    def prefetch(self, request_id: str, chunks: Sequence[Chunk], strategy: Strategy) -> None:
        """Begins to load what a request to come will need. `abort` ends it, and so does the request's own end."""

    def submit(self, request: Request) -> AsyncGenerator[Event]:
        """Queues the request at once; closing the iterator aborts it.

        Raises QueueFull or NotReady immediately, and from the iterator Cancelled or whatever failed.
        """

    def abort(self, request_id: str) -> None:
        """Stops the request within one step: a layer, or a decoded token. Unknown ids are fine."""

    def stats(self) -> EngineStats:
        """Never blocks."""
