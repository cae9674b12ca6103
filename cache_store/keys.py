"""Content-addressed names of chunk KV: everything that changes the numbers is in the name."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from cache_store.entry import VERSION


def digest_fields(*fields: bytes | str) -> str:
    """SHA-256 hex over length-prefixed fields: no two field lists share a preimage."""
    sha = hashlib.sha256()
    for value in fields:
        data = value.encode() if isinstance(value, str) else value
        sha.update(struct.pack("<Q", len(data)))
        sha.update(data)
    return sha.hexdigest()


def tokens_digest(token_ids: Sequence[int]) -> str:
    """SHA-256 hex of the token ids as little-endian int32."""
    return digest_fields("tokens", struct.pack(f"<{len(token_ids)}i", *token_ids))


def key_space(model_fingerprint: str, prefix_ids: Sequence[int], tenant: str, codec: str) -> str:
    """Everything that changes a chunk's numbers, except its own tokens (DESIGN: the key names everything)."""
    return digest_fields(
        "prophetkv key space", model_fingerprint, tokens_digest(prefix_ids), tenant, codec, str(VERSION)
    )


def chunk_key(space: str, tokens: str) -> str:
    """The key of the chunk whose `tokens_digest` is `tokens` in the key space `space`: 64 hex digits."""
    return digest_fields("prophetkv chunk", space, tokens)
