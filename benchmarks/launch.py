"""A server of one's own, in its own process, for the demo and the measurements. Imports nothing heavy."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from service.client import Client
from service.settings import Settings, with_settings

_START_SECONDS = 600  # the first start may fetch and convert a model


@dataclass(frozen=True, slots=True)
class Running:
    """A server that is ready."""

    client: Client
    folder: Path
    pid: int

    def peak_memory(self) -> float:
        """GiB, as the kernel saw it."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1]) / (1 << 20)
        return 0.0


@contextmanager
def running_server(settings: Settings, **options: object) -> Iterator[Running]:
    """Starts a server with an empty data folder below the configured one; ends it in order, and checks the status."""
    folder = settings.data_dir / "scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    port = _free_port()
    environment = with_settings(
        host="127.0.0.1", port=port, data_dir=folder, model_dir=settings.model_cache, model=settings.model, **options
    )
    with (folder / "server.log").open("wb") as log:
        command = [sys.executable, "-m", "service.cli", "serve"]
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        with Client(f"http://127.0.0.1:{port}", timeout=3600) as client:
            client.wait_until_ready(_START_SECONDS)
            yield Running(client, folder, server.pid)
    finally:
        server.send_signal(signal.SIGTERM)
        status = server.wait(60)
    assert status == 0, f"the server ended with {status}; its log is {folder / 'server.log'}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
