"""A client of a server's own HTTP API, for commands of the terminal."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlsplit

from mlxsrv.connect.url import KEY_VARIABLE, server_url
from mlxsrv.errors import ServeError
from mlxsrv.settings import Settings
from mlxsrv.terminal.processes import listening_process

_FIRST_PATIENCE = 5.0
"""Seconds without a byte, as long as nothing has answered: `/health` waits for nothing."""

_PATIENCE = 30.0
"""The same for a server that has answered before, and may have much to do."""

_LONGEST_PATIENCE = 3600.0
"""The same for a stream, which has a sign of life every `--keepalive` seconds."""

_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")
_HEALTH_STATES = ("ok", "loading", "draining", "failed", "stalled")


class RequestFailed(ServeError):
    """A request to a running server did not succeed; the message says why."""


class NoServer(RequestFailed):
    """Nothing listens at the address."""


class ServerClient:
    """Asks one server.

    Args:
        url: without `/v1`.
        key: the server's, if it wants one.
        known: it is a server of this kind, though it may take its time to answer at first.
    """

    def __init__(self, url: str, key: str | None = None, *, known: bool = False) -> None:
        self.url = url
        self.key = key
        self._patience = _PATIENCE if known else _FIRST_PATIENCE

    def is_there(self) -> bool:
        """Whether a server of this kind answers at the address."""
        try:
            self.health()
        except RequestFailed:
            return False
        return True

    def is_taken(self) -> bool:
        """Whether any program listens at the address."""
        place = urlsplit(self.url)
        try:
            socket.create_connection((place.hostname, place.port), _FIRST_PATIENCE).close()
        except OSError:
            return False
        return True

    def health(self, *, verbose: bool = False) -> dict[str, Any]:
        """The answer of `/health`, whatever its status. Raises RequestFailed."""
        with self._answer("GET", "/health?verbose=1" if verbose else "/health") as answer:
            if answer.status not in (200, 503):
                raise self._refusal(answer)
            state = self._object(answer)
        if state.get("status") not in _HEALTH_STATES:
            raise self._foreign()
        return state

    def model(self, name: str = "default") -> dict[str, Any]:
        """One of the server's models, as `/v1/models/NAME` describes it. Raises RequestFailed."""
        if not name.strip("/"):  # the path would be that of the list
            raise RequestFailed(f"{name!r} is no model's name", param="model")
        return self.get(f"/v1/models/{quote(name)}")

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path. Raises RequestFailed."""
        with self._answer("GET", path) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            return self._object(answer)

    @contextmanager
    def chat(self, body: Mapping[str, Any]) -> Iterator[ChatStream]:
        """Send a chat; leaving the context before the stream's end stops the answer.

        Raises RequestFailed.
        """
        sent = {**body, "stream": True}
        with self._answer("POST", "/v1/chat/completions", sent, _LONGEST_PATIENCE) as answer:
            if answer.status != 200:
                raise self._refusal(answer)
            yield ChatStream(answer)

    @contextmanager
    def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        patience: float | None = None,
    ) -> Iterator[HTTPResponse]:
        place = urlsplit(self.url)
        kind = HTTPSConnection if place.scheme == "https" else HTTPConnection
        patience = patience or self._patience
        connection = kind(place.netloc, timeout=patience)
        headers = {"Content-Type": "application/json"}
        if self.key is not None:
            headers["Authorization"] = f"Bearer {self.key}"
        answer = None
        try:
            connection.request(
                method, place.path + path, None if body is None else json.dumps(body), headers
            )
            answer = connection.getresponse()
            self._patience = _PATIENCE
            yield answer
        except (OSError, HTTPException) as error:
            if answer is not None and isinstance(error, BrokenPipeError):
                raise  # an answer is only read: whoever reads this command's output has gone
            if isinstance(error, ConnectionRefusedError):
                raise NoServer(f"no server runs at {self.url}; start one: mlxsrv") from None
            if isinstance(error, TimeoutError):
                silence = f"no answer from {self.url} within {patience:g} s"
                raise RequestFailed(silence + self._listener()) from None
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise RequestFailed(f"no answer from {self.url}: {reason}") from None
        finally:
            connection.close()

    def _object(self, answer: HTTPResponse) -> dict[str, Any]:
        try:
            read = json.loads(answer.read())
        except ValueError:
            read = None
        if not isinstance(read, dict):
            raise self._foreign()
        return read

    def _foreign(self) -> RequestFailed:
        return RequestFailed(f"what answers at {self.url} is no mlxsrv{self._listener()}")

    def _listener(self) -> str:
        """The program that has the port, in parentheses; "" if it is not known here."""
        place = urlsplit(self.url)
        here = place.hostname in _THIS_MACHINE
        process = listening_process(place.port) if place.port and here else None
        return f" ({process})" if process else ""

    def _refusal(self, answer: HTTPResponse) -> RequestFailed:
        if answer.status == 401:
            return RequestFailed(
                f"{self.url} wants an API key: set {KEY_VARIABLE} to one of the server's keys"
            )
        told = self._object(answer).get("error")
        error = told if isinstance(told, dict) else {}
        message = error.get("message") or f"{self.url} answered with status {answer.status}"
        return RequestFailed(message, param=error.get("param"))


def client_of(settings: Settings, url: str | None) -> ServerClient:
    """A client of the server with these settings, or of the one at `url`. Raises SettingsError."""
    return ServerClient(
        server_url(settings, url), settings.api_key[0] if settings.api_key else None
    )


class ChatStream:
    """The pieces of one answer, as they come.

    Attributes:
        ignored: names of the request's fields that the server does not know.
        ending: why the answer ended; None until it has.
    """

    def __init__(self, answer: HTTPResponse) -> None:
        self.ignored = answer.headers.get("X-Ignored-Params", "")
        self.ending: str | None = None
        self._answer = answer

    def __iter__(self) -> Iterator[tuple[str, str]]:
        """Pieces of thoughts and of text: the first, then the second, is empty.

        Raises RequestFailed if the answer breaks off.
        """
        for line in self._answer:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RequestFailed(chunk["error"]["message"])
            for choice in chunk["choices"]:
                self.ending = choice["finish_reason"] or self.ending
                delta = choice["delta"]
                yield delta.get("reasoning_content") or "", delta.get("content") or ""
        if self.ending is None:
            raise RequestFailed("the answer broke off: the server has gone")
