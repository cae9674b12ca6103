"""Runs the application under uvicorn with an orderly end:

on SIGTERM open answers finish or get an error event, exit 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
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
        self.runtime = runtime
        self._drain_seconds = drain_seconds
        self.loop: asyncio.AbstractEventLoop
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Replaces uvicorn's handlers, which cut streams and raise the signal again at the end."""
        self.loop = loop = asyncio.get_running_loop()
        if threading.current_thread() is not threading.main_thread():
            yield  # signals reach the main thread only; whoever runs a server in another one calls `drain` on its loop
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.drain)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Ends the server without draining."""
        self.should_exit = True

    def drain(self) -> None:
        """What a signal does: ends the server in order. Called a second time, at once. On the server's event loop."""
        if self._draining is None:
            log.info("draining: open answers have %.0f s", self._drain_seconds)
            self._draining = asyncio.get_running_loop().create_task(self._drain(self._drain_seconds))
        else:  # the second signal: do not wait
            self._draining.cancel()
            self._draining = asyncio.get_running_loop().create_task(self._drain(0.0))

    async def _drain(self, seconds: float) -> None:
        if self.runtime.started:
            pipeline = self.runtime.pipeline
            pipeline.draining = True
            try:
                await asyncio.wait_for(pipeline.wait_for_active(), seconds)
            except TimeoutError:
                pipeline.abort_active()
                with contextlib.suppress(TimeoutError):  # a client that does not read keeps its answer from ending
                    await asyncio.wait_for(pipeline.wait_for_active(), _CLOSE_SECONDS)
        self.should_exit = True


def make_server(settings: Settings) -> Server:
    """A server that is not yet running."""
    app = create_app(settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_CLOSE_SECONDS,
    )
    server = Server(config, app.state.runtime, settings.drain_seconds)
    app.state.on_failure = server.stop
    return server


def serve(settings: Settings) -> int:
    """Serves until a signal comes. Returns the exit status: 0 after an orderly end, 1 when starting failed."""
    server = make_server(settings)
    server.run()
    status = 0 if server.started and server.runtime.failure is None else 1
    if server.runtime.loading():
        # Nothing can end that thread, and Python's own end would abort in the middle of native code that it runs.
        logging.shutdown()
        os._exit(status)
    return status
