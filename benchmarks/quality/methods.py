"""What a run compares: strategies with their options, as `prophetkv:ratio=0.1,smooth=7` names them, and the floor."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.quality.results import Option, method_name
from cache_store.codec import CODECS
from engine.strategies import STRATEGIES, Strategy, make_strategy
from errors import InvalidInput, UnknownStrategy

FULL, NONE, RANDOM = "full", "none", "random"
CODEC = "codec"
# `prefix` is left out, as it is exact and costs a full prefill; `oracle`, as no service can have it. Both can be named.
DEFAULT = (FULL, NONE, RANDOM, "naive", "epic", "cacheblend", "kvshare", "prophetkv")
_WITHOUT_RATIO = {NONE, *(name for name, kind in STRATEGIES.items() if not kind.takes_ratio)}


@dataclass(frozen=True, slots=True)
class Method:
    """A strategy with the options that were asked for; `none` is no strategy but the prompt without its context.

    The option `codec`, of those that reuse KV, is how the chunks are written; without it they are as the run says.
    """

    strategy: str
    options: Mapping[str, Option] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """As in records and tables."""
        return method_name(self.strategy, self.options)

    def build(self, layers: int) -> Strategy:
        """For a model of `layers` layers. Raises UnknownStrategy, or InvalidInput that names the option.

        `none` is a full prefill too.
        """
        name = FULL if self.strategy == NONE else self.strategy
        options = {option: value for option, value in self.options.items() if option != CODEC}
        return make_strategy(name, options, layers, STRATEGIES)

    @property
    def codec(self) -> str | None:
        """The option, if it is there."""
        return str(self.options[CODEC]) if CODEC in self.options else None


def parse_methods(specs: Sequence[str], ratios: Sequence[float], layers: int) -> list[Method]:
    """The methods of a run, full prefill and the floors `none` and `random` among them whatever is asked for.

    specs: strategies with options; ratios: of those that have a ratio and name none. A method that is named twice is
    there once. Raises UnknownStrategy or InvalidInput.
    """
    if not ratios:
        raise InvalidInput("no ratio is given", field="ratios")
    wanted = [method for spec in specs for method in _parsed(spec, ratios, layers)]
    if RANDOM not in {method.strategy for method in wanted}:
        wanted = [*_parsed(RANDOM, ratios, layers), *wanted]
    methods = {method.name: method for method in (Method(FULL), Method(NONE), *wanted)}
    return list(methods.values())


def split_specs(text: str) -> list[str]:
    """The strategies in `naive,prophetkv:ratio=0.1,smooth=7,epic`: commas divide them, and their options too."""
    specs: list[str] = []
    for piece in text.split(","):
        if specs and "=" in piece and ":" not in piece:
            specs[-1] += f",{piece}"
        elif piece.strip():
            specs.append(piece.strip())
    return specs


def _parsed(spec: str, ratios: Sequence[float], layers: int) -> Iterator[Method]:
    name, _, text = spec.partition(":")
    if name != NONE and name not in STRATEGIES:
        raise UnknownStrategy(f"unknown strategy {name!r}; there are {', '.join((*STRATEGIES, NONE))}")
    options = dict(_option(spec, part) for part in text.split(",") if part)
    codec = {CODEC: options.pop(CODEC)} if CODEC in options else {}
    if codec and (name == NONE or not STRATEGIES[name].reuses or codec[CODEC] not in CODECS):
        raise InvalidInput(
            f"{spec}: a codec is of a strategy that reuses KV, and one of {', '.join(CODECS)}", field="strategies"
        )
    if name in _WITHOUT_RATIO and options:
        raise InvalidInput(f"{spec}: {name} has no options", field="strategies")
    if name in _WITHOUT_RATIO or "ratio" in options or "k" in options:
        variants = [options]
    else:
        variants = [{"ratio": ratio, **options} for ratio in ratios]
    for variant in variants:
        built = Method(name, variant).build(layers)
        yield Method(name, {option: getattr(built, option) for option in variant} | codec)


def _option(spec: str, part: str) -> tuple[str, Option]:
    name, equals, text = part.partition("=")
    if not equals:
        raise InvalidInput(f"{spec}: {part!r} is not of the form option=value", field="strategies")
    try:
        value: Option = json.loads(text)
    except ValueError:
        value = text
    return name, value
