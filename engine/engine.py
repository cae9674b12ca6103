"""The local engine: one thread owns the device and takes requests one step at a time.

Every request is a generator (see generate.py). Scheduling is choosing whose next step to run:

    1. the oldest request without a first token     prefills go first come, first served, before anything else
    2. decoding requests in turn                    one token each
    3. background encodings                         only when no query has anything to do

Who waits for a tier is passed over until what it waits for is there, or nobody else has anything to do. So a query
waits for at most one step (a layer, or a token) of background work, and an abort takes effect at the next step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress

import torch

from cache_store.base import Chunk, Waiting
from engine.base import EngineStats, Event, Finished, GenerateRequest, Loader, Prefilled, Request, Token
from engine.decode import EventSteps
from engine.strategies.base import Strategy
from errors import Cancelled, NotReady, QueueFull

log = logging.getLogger(__name__)

_RETRY_SECONDS_FLOOR = 1.0


class Engine:
    """An EngineClient whose device thread lives in this process."""

    def __init__(
        self,
        steps: Callable[[Request], EventSteps],
        max_waiting: int = 32,
        max_running: int = 4,
        loader: Loader | None = None,
    ) -> None:
        """`steps` makes the generator of a request. `loader`: loads for requests ahead.

        Beyond `max_running` started and `max_waiting` queued queries, QueueFull.
        """
        self._steps = steps
        self._loader = loader
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._waiting: deque[_Task] = deque()
        self._running: deque[_Task] = deque()  # in order of admission until decoding, then in turn
        self._background: deque[_Task] = deque()
        self._tasks: dict[str, _Task] = {}
        self._wake = threading.Condition()
        self._closing = False
        self._last_step = time.monotonic()
        self._mean_seconds = _RETRY_SECONDS_FLOOR  # running mean of a query's time on the device
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)
        self._thread.start()

    def prefetch(self, request_id: str, chunks: Sequence[Chunk], strategy: Strategy) -> None:
        """See EngineClient.prefetch."""
        if self._loader is not None and strategy.reuses:
            self._loader.begin(request_id, chunks, strategy.chooses)

    def submit(self, request: Request) -> AsyncGenerator[Event]:
        """See EngineClient.submit. Must be called from a running event loop."""
        task = _Task(request, asyncio.get_running_loop())
        with self._wake:
            if self._closing or not self._thread.is_alive():
                raise NotReady("the engine is shutting down or dead")
            assert request.id not in self._tasks, "request ids are unique"
            if isinstance(request, GenerateRequest):
                if len(self._waiting) >= self._max_waiting:
                    wait = self._mean_seconds * len(self._waiting)
                    raise QueueFull(
                        f"{len(self._waiting)} requests are waiting already; try again in about {wait:.0f} s",
                        retry_after=max(_RETRY_SECONDS_FLOOR, wait),
                    )
                self._waiting.append(task)
            else:
                self._background.append(task)
            self._tasks[request.id] = task
            self._wake.notify()
        return self._events(task)

    def abort(self, request_id: str) -> None:
        """See EngineClient.abort."""
        self._forget(request_id)
        with self._wake:
            task = self._tasks.get(request_id)
            if task is not None:
                task.aborted = True
                self._wake.notify()

    def stats(self) -> EngineStats:
        """See EngineClient.stats."""
        with self._wake:
            idle = not (self._waiting or self._running or self._background)
            return EngineStats(
                alive=self._thread.is_alive(),
                running=len(self._running),
                waiting=len(self._waiting),
                background=len(self._background),
                seconds_since_step=0.0 if idle else time.monotonic() - self._last_step,
            )

    def close(self) -> None:
        """Aborts everything and ends the device thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    async def _events(self, task: _Task) -> AsyncGenerator[Event]:
        try:
            while True:
                item = await task.events.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    return
                yield item
        finally:
            self.abort(task.request.id)

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                while (task := self._await_task()) is not None:
                    self._step(task)
        finally:  # also when something worse than an Exception ends the thread: nobody may wait for it
            with self._wake:
                self._closing = True
                for task in self._tasks.values():
                    task.send(NotReady("the device thread has ended"))

    def _await_task(self) -> _Task | None:
        """Blocks until some task has a step to take; None when the engine was closed and all tasks have ended."""
        with self._wake:
            while (task := self._next()) is None:
                if self._closing:
                    return None
                self._wake.wait()
            self._last_step = time.monotonic()
            if self._closing:
                task.aborted = True
            return task

    def _next(self) -> _Task | None:
        """Whose step is next; None when there is nothing to do. Also drops what was aborted while it waited."""
        for queue in (self._waiting, self._running, self._background):
            for task in queue:
                if task.aborted:
                    return task
        prefilling = [task for task in self._running if not task.decoding]
        able = next((task for task in prefilling if task.able()), None)
        if able is not None:
            return able
        if self._waiting and len(self._running) < self._max_running:
            self._running.append(self._waiting.popleft())
            return self._running[-1]
        decoding = next((task for task in self._running if task.decoding), None)
        if decoding is not None:
            self._running.remove(decoding)
            self._running.append(decoding)
            return decoding
        able = next((task for task in self._background if task.able()), None)
        # Who cannot go on waits for a moment in its own step, so this is no busy loop.
        return able or next(iter((*prefilling, *self._background)), None)

    def _step(self, task: _Task) -> None:
        """Takes one step of the task: up to its next event, layer or chunk."""
        try:
            if task.aborted:
                raise Cancelled("the request was aborted")
            if task.steps is None:
                task.steps = self._steps(task.request)
                task.started = time.monotonic()
            event = next(task.steps)
        except StopIteration:
            self._end(task, None)
        except Exception as error:
            if not isinstance(error, Cancelled):
                log.exception("request %s failed", task.request.id)
            self._end(task, error)
        else:
            task.waiting = event if isinstance(event, Waiting) else None
            if isinstance(event, Prefilled):
                self._forget(task.request.id)
                queued = (task.started - task.submitted) * 1000
                event.timings["queue"] = event.timings.get("queue", 0.0) + queued
            if event is not None and not isinstance(event, Waiting):
                task.decoding = task.decoding or isinstance(event, Token | Finished)
                task.send(event)

    def _forget(self, request_id: str) -> None:
        """Nothing that was loaded ahead for the request is needed any more."""
        if self._loader is not None:
            self._loader.end(request_id)

    def _end(self, task: _Task, last: Exception | None) -> None:
        self._forget(task.request.id)
        if task.steps is not None:
            task.steps.close()
        with self._wake:
            for queue in (self._waiting, self._running, self._background):
                if task in queue:
                    queue.remove(task)
            del self._tasks[task.request.id]
            if task.decoding:
                self._mean_seconds = 0.8 * self._mean_seconds + 0.2 * (time.monotonic() - task.started)
        task.send(last)


class _Task:
    """A request on its way: its generator, and the channel to the event loop that submitted it."""

    def __init__(self, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self.request = request
        self.events: asyncio.Queue[Event | Exception | None] = asyncio.Queue()
        self.steps: EventSteps | None = None
        self.submitted = time.monotonic()
        self.started = 0.0
        self.waiting: Waiting | None = None
        self.decoding = False
        self.aborted = False
        self._loop = loop

    def able(self) -> bool:
        """Its next step does not begin with waiting."""
        return self.waiting is None or self.waiting.over

    def send(self, item: Event | Exception | None) -> None:
        """Hands an event to the submitter; an exception or None ends the stream."""
        with suppress(RuntimeError):  # the loop is closed, perhaps this moment: nobody listens any more
            self._loop.call_soon_threadsafe(self.events.put_nowait, item)
