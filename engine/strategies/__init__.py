"""How the context's KV is had before the first token. A new strategy is one file here and one line in the table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine.strategies.auto import Auto
from engine.strategies.base import Strategy
from engine.strategies.cacheblend import CacheBlend
from engine.strategies.epic import Epic
from engine.strategies.full import Full
from engine.strategies.kvshare import KVShare
from engine.strategies.naive import Naive
from engine.strategies.oracle import Oracle
from engine.strategies.prefix import Prefix
from engine.strategies.prophetkv import ProphetKV
from engine.strategies.random import Random
from errors import InvalidInput, UnknownStrategy

STRATEGIES: dict[str, type[Strategy]] = {
    kind.name: kind for kind in (Auto, Full, Prefix, Naive, Epic, CacheBlend, KVShare, ProphetKV, Random, Oracle)
}
SERVED = {name: kind for name, kind in STRATEGIES.items() if kind.served}

__all__ = ["SERVED", "STRATEGIES", "Strategy", "make_strategy"]


def make_strategy(
    name: str, options: Mapping[str, Any], layers: int, known: Mapping[str, type[Strategy]] = SERVED
) -> Strategy:
    """A strategy that a request asks for, checked against a model of `layers` layers; `known`: which may be named.

    Raises UnknownStrategy, or InvalidInput that names the option.
    """
    if name not in known:
        raise UnknownStrategy(f"unknown strategy {name!r}; there are {', '.join(known)}")
    try:
        strategy = known[name].model_validate(dict(options))
        strategy.check(layers)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(("strategy", *(str(part) for part in first["loc"])))
        raise InvalidInput(f"{field}: {first['msg']} (strategy {name!r})", field=field) from error
    except ValueError as error:
        raise InvalidInput(str(error), field="strategy") from error
    return strategy
