"""A small HTTP client of the service, for the command line, the demo and the benchmarks."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from httpx_sse import connect_sse

from errors import ProphetKVError


class ClientError(ProphetKVError):
    """The server answered with an error, or does not answer. `status` is 0 in that case."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Blocking; one connection pool to `url`."""

    def __init__(self, url: str, timeout: float = 600.0) -> None:
        self._url = url
        self._http = httpx.Client(base_url=url, timeout=httpx.Timeout(timeout, connect=5.0))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def put_file(self, path: Path, document: str, collection: str = "default", wait: float = 0.0) -> dict[str, Any]:
        """Creates or replaces the document with that id."""
        with path.open("rb") as file:
            return self._call(
                "PUT",
                f"/documents/{document}",
                params={"collection": collection, "wait": wait},
                files={"file": (path.name, file)},
            )

    def delete(self, document: str, collection: str = "default") -> None:
        """Removes a document."""
        self._call("DELETE", f"/documents/{document}", params={"collection": collection})

    def job(self, job: str) -> dict[str, Any]:
        """One job."""
        return self._call("GET", f"/jobs/{job}")

    def ask(self, question: str, **options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        """Streams an answer: pairs of event name and data. An `error` event is raised as ClientError."""
        body = {"question": question, "stream": True, **options}
        try:
            with connect_sse(self._http, "POST", "/query", json=body) as source:
                if source.response.status_code != 200:
                    source.response.read()
                    raise _error(source.response)
                for event in source.iter_sse():
                    data = json.loads(event.data)
                    if event.event == "error":
                        raise ClientError(data["detail"], data["status"])
                    yield event.event, data
        except httpx.HTTPError as error:
            raise ClientError(f"no answer from {self._url}: {error}") from error

    def wait_until_ready(self, seconds: float) -> None:
        """Returns when the server serves queries. Raises ClientError after `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                self._call("GET", "/health/ready")
            except ClientError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def _call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, path, **options)
        except httpx.HTTPError as error:
            raise ClientError(f"no answer from {self._url}: {error}") from error
        if answer.is_error:
            raise _error(answer)
        return answer.json() if answer.content else {}


def _error(answer: httpx.Response) -> ClientError:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        detail = answer.text[:500]
    return ClientError(f"{answer.status_code}: {detail}", answer.status_code)
