"""May a codec be used with a model? Measured on the loaded weights, once, and remembered in the data folder.

On a few prompts of plain English, chunks as the codec gives them back are held against the chunks themselves, both on
the path that is served: does Stage I choose the same tokens, and how far do the logits of the question's rows go apart?
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cache_store.base import Chunk, ChunkKV, HeldChunks
from engine.base import GenerateRequest, Part, Sampling
from engine.encode import PrefixCache, encode_chunk
from engine.forward import run_steps
from engine.model import Model, text_encoder
from engine.prefill import Prefill
from engine.strategies import STRATEGIES
from engine.strategies.base import recompute_budget, top_tokens
from errors import ConfigError

log = logging.getLogger(__name__)

# Nats a row, mean. Where 0.0049 was measured RULER's score fell by 3 points, at 0.0018 by none that 72 prompts show.
MAX_KL = 0.003
MIN_OVERLAP = 0.9  # of the tokens that Stage I chooses
_FILE = "certificates.json"
_METHOD = "1"  # names what is measured and how; what another method found does not count
_PROMPTS, _CHUNKS, _CHUNK_TOKENS, _QUESTION_TOKENS, _RATIO = 2, 4, 128, 32, 0.2


@dataclass(frozen=True, slots=True)
class Certificate:
    """kl: mean over rows of KL(raw || codec) of the logits, in nats. overlap: share of selected tokens in common."""

    codec: str
    kl: float
    overlap: float

    @property
    def passed(self) -> bool:
        """Good enough to serve."""
        return self.kl <= MAX_KL and self.overlap >= MIN_OVERLAP

    def __str__(self) -> str:
        """For people."""
        found = f"logits differ by {self.kl:.2g} nats, Stage I agrees on {self.overlap:.1%} of its tokens"
        return f"{found} (at most {MAX_KL:g}, at least {MIN_OVERLAP:.0%})"


def require_certified(model: Model, codec: str, folder: Path) -> None:
    """Raises ConfigError unless the codec is good enough for the model. Measures that if it is not known yet."""
    if codec == "raw":
        return
    certificate = _remembered(model, codec, folder)
    if certificate is None:
        log.info("testing the codec %s on the model, once", codec)
        certificate = certify(model, [codec])[0]
        _remember(model, certificate, folder)
    if not certificate.passed:
        raise ConfigError(
            f"PROPHETKV_KV_CODEC={codec} is not good enough for this model: {certificate}; use raw or another codec"
        )


@torch.inference_mode()
def certify(model: Model, codecs: Sequence[str]) -> list[Certificate]:
    """Measures codecs on a model with a tokenizer; the more of them at once, the cheaper each."""
    sums = {codec: torch.zeros(2, dtype=torch.float64) for codec in codecs}
    for number in range(_PROMPTS):
        request = _request(model, number)
        prefixes = PrefixCache(model)
        chunks = {part.chunk.key: run_steps(encode_chunk(model, prefixes, (), part.chunk)) for part in request.parts}
        chosen, logits = _measured(model, prefixes, request, chunks)
        for codec, total in sums.items():
            packed = {key: kv.recoded(codec) for key, kv in chunks.items()}
            theirs, other = _measured(model, prefixes, request, packed)
            kl = functional.kl_div(
                other.log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="batchmean"
            )
            overlap = len(set(chosen.tolist()) & set(theirs.tolist())) / len(chosen)
            # Rounding may bring it below 0. What is no number stays none, and does not pass.
            total += torch.tensor([float(kl.clamp(min=0.0)), overlap], dtype=torch.float64)
    return [Certificate(codec, *(total / _PROMPTS).tolist()) for codec, total in sums.items()]


def _measured(
    model: Model, prefixes: PrefixCache, request: GenerateRequest, chunks: dict[str, ChunkKV]
) -> tuple[Tensor, Tensor]:
    """The tokens that Stage I chooses, and fp32 [suffix, vocab] logits behind Stage II."""
    prefill = Prefill(model, HeldChunks(chunks), prefixes, request)
    run_steps(prefill.assemble())
    scores = run_steps(prefill.probe(range(model.layout.layers), prefill.layout.suffix))
    chosen = top_tokens(scores, recompute_budget(_RATIO, len(prefill.layout.context)))
    rows = torch.cat((prefill.layout.context[chosen], prefill.layout.fresh)).sort().values
    return chosen, run_steps(prefill.start(rows).finish_all())[-_QUESTION_TOKENS:]


def _request(model: Model, number: int) -> GenerateRequest:
    ids = _sample(model)
    size = _CHUNKS * _CHUNK_TOKENS + _QUESTION_TOKENS
    ids = ids[number * size : (number + 1) * size]
    starts = range(0, _CHUNKS * _CHUNK_TOKENS, _CHUNK_TOKENS)
    parts = [Part((), Chunk(f"{start:064x}", ids[start : start + _CHUNK_TOKENS])) for start in starts]
    suffix, strategy = ids[-_QUESTION_TOKENS:], STRATEGIES["prophetkv"](ratio=_RATIO)
    return GenerateRequest("certificate", (), tuple(parts), suffix, strategy, Sampling(max_tokens=1))


@lru_cache(maxsize=1)
def _sample(model: Model) -> tuple[int, ...]:
    """Token ids of plain English: the manual of Python, which every Python carries."""
    encode = text_encoder(model.tokenizer)
    wanted = _PROMPTS * (_CHUNKS * _CHUNK_TOKENS + _QUESTION_TOKENS)
    ids: list[int] = []
    for name in sorted(topics):
        ids += encode(topics[name])[0]
        if len(ids) >= wanted:
            break
    return tuple(ids)


def _remembered(model: Model, codec: str, folder: Path) -> Certificate | None:
    found: Any = _known(folder).get(_name(model, codec))
    try:
        return Certificate(codec, float(found["kl"]), float(found["overlap"]))
    except (KeyError, TypeError, ValueError):
        return None


def _remember(model: Model, certificate: Certificate, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    known = _known(folder) | {_name(model, certificate.codec): asdict(certificate)}
    temporary = folder / f"{_FILE}.tmp"
    temporary.write_text(json.dumps(known, indent=1))
    temporary.replace(folder / _FILE)


def _known(folder: Path) -> dict[str, Any]:
    """What was measured before. What is malformed is as good as nothing: everything can be measured again."""
    try:
        found = json.loads((folder / _FILE).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _name(model: Model, codec: str) -> str:
    return f"{model.fingerprint} {codec} {_METHOD}"
