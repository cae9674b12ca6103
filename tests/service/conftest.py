"""The real server as its own process, on a tiny model with a real tokenizer and the real embedder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import Client, ClientError
from service.runtime import Runtime
from service.server import make_server as make_uvicorn_server
from service.settings import load_settings
from tests.conftest import MODEL_CACHE, ROOT


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """The service under uvicorn on a port of its own, in a thread of the test process. It can be started again."""

    def __init__(self, data: Path, model: Path, **settings: object) -> None:
        self.data = data
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.settings: dict[str, object] = {
            "port": self.port,
            "data_dir": data,
            "model_dir": MODEL_CACHE,
            "model": str(model),
            "dtype": "float32",
            "device": "cpu",
            "chunk_tokens": 64,
            "strategy": "prophetkv",  # what `auto` does depends on the machine's speed
            **settings,
        }
        self._thread: threading.Thread | None = None

    def launch(self) -> None:
        """Starts the server and does not wait."""
        self._server = make_uvicorn_server(load_settings(**self.settings))
        self._thread = threading.Thread(target=self._server.run, name=f"server {self.port}")
        self._thread.start()

    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> Server:
        self.launch()
        deadline = time.monotonic() + 90
        with Client(self.url) as client:
            while True:
                try:
                    client.wait_until_ready(0.5)
                    return self
                except ClientError:
                    if not self.alive() or time.monotonic() > deadline:
                        raise

    def stop(self) -> None:
        """The orderly end, as SIGTERM asks for it."""
        self.drain()
        self.join()

    def drain(self) -> None:
        self._server.loop.call_soon_threadsafe(self._server.drain)

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(60)
        assert not self.alive(), "the server did not end"
        self._thread = None

    @property
    def runtime(self) -> Runtime:
        """The parts of the running service, to look at."""
        return self._server.runtime

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)


class ServerProcess(Server):
    """`prophetkv serve` as its own process, for signals, kills and exit statuses."""

    process: subprocess.Popen[bytes]

    def launch(self) -> None:
        told = {f"PROPHETKV_{name.upper()}": str(value) for name, value in self.settings.items()}
        self.log = self.data.parent / f"{self.data.name}.log"
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "service.cli", "serve"]
            self.process = subprocess.Popen(command, env=os.environ | told, cwd=ROOT, stdout=log, stderr=log)

    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(60) == 0, self.log.read_text()[-3000:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


MakeServer = Callable[..., Server]
MakeProcess = Callable[..., ServerProcess]


@pytest.fixture
def make_server(tmp_path: Path, tiny_folder: Path) -> Iterator[MakeServer]:
    """Makes servers of the test's own; ends what still runs."""
    made: list[Server] = []

    def make(model: Path = tiny_folder, **settings: object) -> Server:
        made.append(Server(tmp_path / "data", model, **settings))
        return made[-1]

    yield make
    for server in made:
        if server.alive():
            server.stop()


@pytest.fixture
def make_process(tmp_path: Path, tiny_folder: Path) -> Iterator[MakeProcess]:
    """The same as processes; kills what still runs."""
    made: list[ServerProcess] = []

    def make(model: str | Path = tiny_folder, **settings: object) -> ServerProcess:
        made.append(ServerProcess(tmp_path / "data", Path(model), **settings))
        return made[-1]

    yield make
    for server in made:
        if server.alive():
            server.kill()


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Iterator[ServerProcess]:
    """One process for all tests that leave it as they found it; they use collections of their own."""
    folder = tmp_path_factory.mktemp("server")
    made = ServerProcess(folder / "data", tiny_folder, max_body_bytes=200_000, max_context_tokens=4000)
    made.start()
    yield made
    made.stop()
    log = made.log.read_text()
    assert "Traceback" not in log, log[-3000:]


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.url) as made:
        yield made
