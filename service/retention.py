"""How long chunk KV is kept beyond what the budgets decide: `pin`, or seconds to live, by document or by collection.

A document says it in its metadata under `kv_retention`, a collection in PROPHETKV_KV_RETENTION; the document's word
comes first. A chunk that several documents share is kept as the most careful of them wants.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cache_store.base import KEEP, Retention
from errors import InvalidInput
from retriever.catalogue import Holder

FIELD = "kv_retention"
_LONGEST_SECONDS = 10 * 365 * 86400


def parse_retention(value: object) -> Retention:
    """`pin`, or a number of seconds. Raises InvalidInput."""
    if value == "pin":
        return Retention(pinned=True)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _LONGEST_SECONDS:
        return Retention(seconds=float(value))
    raise InvalidInput(f"{FIELD} must be 'pin' or a number of seconds to live, not {value!r}", field="metadata")


def parse_rules(text: str) -> dict[str, Retention]:
    """`collection=pin,other=86400` by collection. Raises InvalidInput."""
    rules = {}
    for rule in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = rule.partition("=")
        rules[name.strip()] = parse_retention(float(value) if value.replace(".", "", 1).isdigit() else value.strip())
    return rules


class RetentionRules:
    """What documents and collections ask for."""

    def __init__(self, rules: dict[str, Retention]) -> None:
        """`rules`: by collection."""
        self._rules = rules

    def of(self, collection: str, metadata: dict[str, Any]) -> Retention:
        """Of one document. What is no retention is metadata that was there before the field had a meaning."""
        try:
            return parse_retention(metadata[FIELD])
        except (KeyError, InvalidInput):
            return self._rules.get(collection, KEEP)

    def of_chunks(self, holders: Iterable[Holder]) -> dict[str, Retention]:
        """By tokens digest. `holders`: once for each document that has the chunk."""
        wanted: dict[str, Retention] = {}
        for digest, collection, metadata in holders:
            asked = self.of(collection, metadata)
            wanted[digest] = _longer(wanted[digest], asked) if digest in wanted else asked
        return wanted


def _longer(one: Retention, other: Retention) -> Retention:
    if one.pinned or other.pinned:
        return Retention(pinned=True)
    if one.seconds is None or other.seconds is None:
        return KEEP
    return Retention(seconds=max(one.seconds, other.seconds))
