"""Real parts for all tests: a redis-server, the weights of the manifest, tiny random models for exactness."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

# Set before transformers is imported: no test may ask the hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
for _name in [name for name in os.environ if name.startswith("PROPHETKV_")]:
    del os.environ[_name]

import redis
import torch

if not torch.cuda.is_available():  # set before triton is imported: its kernels run in its interpreter then
    os.environ["TRITON_INTERPRET"] = "1"

from service.models import resolve_embedder, resolve_language_model
from tests.tiny import save_tiny_gpt2, save_tiny_model

ROOT = Path(__file__).parent.parent
MODEL_CACHE = ROOT / ".data" / "models"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in _unexpected_skips(terminalreporter):
        terminalreporter.write_line(f"SKIPPED although only gpu tests may be: {report.nodeid}", red=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and _unexpected_skips(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _unexpected_skips(reporter: pytest.TerminalReporter) -> list[pytest.TestReport]:
    return [report for report in reporter.stats.get("skipped", []) if "gpu" not in getattr(report, "keywords", {})]


class RedisServer:
    """A redis-server of the tests' own, on a unix socket."""

    def __init__(self, folder: Path) -> None:
        self.socket = folder / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        binary = shutil.which("redis-server")
        assert binary is not None, "redis-server is not installed; `make test` installs it as root"
        command = [binary, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=self.socket.parent)
        deadline = time.monotonic() + 10
        while True:
            try:
                with redis.Redis.from_url(self.url) as client:
                    client.ping()
                return
            except redis.ConnectionError:
                assert time.monotonic() < deadline, "redis-server does not come up"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    """An empty Redis that the test leaves running."""
    with redis.Redis.from_url(shared_redis.url) as client:
        client.flushall()
    return shared_redis


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A Redis that the test may stop and start."""
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def smollm() -> Path:
    """Real weights: SmolLM2-135M-Instruct in fp32."""
    return resolve_language_model("smollm2-135m-instruct", MODEL_CACHE, "cpu", "float32")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The real embedder."""
    return resolve_embedder("all-minilm-l6-v2", MODEL_CACHE)


@pytest.fixture(scope="session")
def tiny_folder(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model with a real tokenizer and chat template, for tests of the service."""
    return save_tiny_model(smollm, tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def small_folder(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, wide enough for its operations to outweigh what a call costs."""
    folder = tmp_path_factory.mktemp("small")
    return save_tiny_model(smollm, folder, hidden_size=192, intermediate_size=1024, num_hidden_layers=6)


@pytest.fixture(scope="session")
def gpt2_folder(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of a family for which reuse is not proven."""
    return save_tiny_gpt2(smollm, tmp_path_factory.mktemp("gpt2"))
