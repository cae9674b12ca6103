"""Runs the application under uvicorn with an orderly end:

on SIGTERM open answers finish or get an error event, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterator

import uvicorn

from service.app import create_app
from service.runtime import Runtime
from service.settings import Settings

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 5  # for connections that are still open after their answers have ended


class Server(uvicorn.Server):
    """uvicorn closes its listeners, waits for all connections, and only then tells the application. We drain first."""

    def __init__(self, config: uvicorn.Config, runtime: Runtime, drain_seconds: float) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._drain_seconds = drain_seconds
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which cut streams and raise the signal again at the end."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self._draining is None:
            log.info("draining: open answers have %.0f s", self._drain_seconds)
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._drain_seconds))
        else:  # the second signal: do not wait
            self._draining.cancel()
            self._draining = asyncio.get_running_loop().create_task(self._drain(0.0))

    async def _drain(self, seconds: float) -> None:
        if self._runtime.started:
            pipeline = self._runtime.pipeline
            pipeline.draining = True
            try:
                await asyncio.wait_for(pipeline.wait_for_active(), seconds)
            except TimeoutError:
                pipeline.abort_active()
                await pipeline.wait_for_active()
        self.should_exit = True


def serve(settings: Settings) -> int:
    """Serves until a signal comes. Returns the exit status: 0 after an orderly end, 1 when starting failed."""
    app = create_app(settings)
    runtime: Runtime = app.state.runtime
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = Server(config, runtime, settings.drain_seconds)

    def stop() -> None:
        server.should_exit = True

    app.state.on_failure = stop
    server.run()
    return 1 if runtime.failure is not None or not server.started else 0
