from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.tiny import FAMILIES, Bench, tiny_model


@pytest.fixture(autouse=True)
def _tiny_work() -> Iterator[None]:
    """No gradients, and one thread: on tiny tensors more of them only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(params=sorted(FAMILIES))
def bench(request: pytest.FixtureRequest) -> Bench:
    """The same prompt on each family."""
    return Bench(tiny_model(FAMILIES[request.param]))


@pytest.fixture
def llama() -> Bench:
    return Bench(tiny_model(FAMILIES["llama"]))
