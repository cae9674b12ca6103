from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.tiny import FAMILIES, Bench, tiny_model


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=sorted(FAMILIES))
def bench(request: pytest.FixtureRequest) -> Bench:
    """The same prompt on each family."""
    return Bench(tiny_model(FAMILIES[request.param]))


@pytest.fixture
def llama() -> Bench:
    return Bench(tiny_model(FAMILIES["llama"]))
