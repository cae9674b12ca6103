from __future__ import annotations

import pytest

from benchmarks.quality.methods import DEFAULT, Method, parse_methods, split_specs
from errors import InvalidInput, UnknownStrategy


def names(text: str, ratios: tuple[float, ...] = (0.2,)) -> list[str]:
    return [method.name for method in parse_methods(split_specs(text), ratios, layers=4)]


def test_full_and_the_floors_are_always_there() -> None:
    assert names("") == ["full", "none", "random ratio=0.2"]
    assert names("naive", (0.1, 0.2)) == ["full", "none", "random ratio=0.1", "random ratio=0.2", "naive"]
    assert names("random:ratio=0.5,none,full") == ["full", "none", "random ratio=0.5"]


def test_ratios_go_to_those_that_name_none() -> None:
    found = names("prophetkv,prophetkv:ratio=0.1,smooth=7,prophetkv:smooth=7,epic:k=8,oracle:factor=phi", (0.2, 0.3))
    assert found[4:] == [
        "prophetkv ratio=0.2",
        "prophetkv ratio=0.3",
        "prophetkv ratio=0.1 smooth=7",
        "prophetkv ratio=0.2 smooth=7",
        "prophetkv ratio=0.3 smooth=7",
        "epic k=8",
        "oracle factor=phi ratio=0.2",
        "oracle factor=phi ratio=0.3",
    ]


def test_the_same_method_is_there_once_however_it_is_written() -> None:
    assert names("epic,epic:ratio=0.20,epic:ratio=2e-1") == ["full", "none", "random ratio=0.2", "epic ratio=0.2"]
    assert names("epic:ratio=1,epic:ratio=1.0")[3:] == ["epic ratio=1.0"]


def test_a_codec_is_an_option_of_what_reuses() -> None:
    assert names("naive:codec=int8,prophetkv:codec=int4")[3:] == ["naive codec=int8", "prophetkv codec=int4 ratio=0.2"]
    (method,) = parse_methods(["epic:codec=fp8"], [0.2], layers=4)[3:]
    assert (method.codec, method.build(4).name) == ("fp8", "epic")


def test_methods_become_strategies() -> None:
    built = [method.build(4) for method in parse_methods(DEFAULT, [0.3], layers=4)]
    assert [strategy.name for strategy in built] == [name if name != "none" else "full" for name in DEFAULT]
    smooth = Method("prophetkv", {"ratio": 0.1, "smooth": 7}).build(4)
    assert (smooth.ratio, getattr(smooth, "smooth", None)) == (0.1, 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("profet", "unknown strategy 'profet'; there are auto, full,"),
        ("prophetkv:ratio=2", r"strategy\.ratio"),
        ("prophetkv:smooth=2", "odd"),
        ("prophetkv:ratio", "'ratio' is not of the form option=value"),
        ("prophetkv:sharp=1", r"strategy\.sharp"),
        ("cacheblend:check_layer=9", "at most 3"),
        ("full:ratio=0.5", "full has no options"),
        ("none:ratio=0.5", "none has no options"),
        ("prophetkv:codec=int7", "one of raw, int8, fp8, int4"),
        ("full:codec=int8", "of a strategy that reuses KV"),
        ("none:codec=int8", "of a strategy that reuses KV"),
    ],
)
def test_bad_methods_are_named(text: str, message: str) -> None:
    with pytest.raises((InvalidInput, UnknownStrategy), match=message):
        names(text)


def test_no_ratio_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no ratio"):
        names("epic", ())
