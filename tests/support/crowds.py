"""Requests that stream from one server at the same time."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import httpx

from tests.support.client import Body, Streamed, chat, stream
from tests.support.serving import Server, wait_for


class Crowd:
    """Requests that are asked at once, each over a connection of its own, told apart by their
    ids."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._client = server.client()  # made once: it takes as long as 50 tokens
        self._threads = ThreadPoolExecutor(8)

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()
        self._client.close()

    def stream(self, request: str, model: str, max_tokens: int) -> Future[Streamed]:
        def work() -> Streamed:
            body = chat(model=model, max_tokens=max_tokens)
            return stream(self._client, body, **{"X-Request-ID": request})

        return self._threads.submit(work)

    def waiting(self, model: str) -> None:
        """Wait until the model waits for room."""
        self._until(model, state="waiting for room")

    def asked(self, model: str, requests: int) -> None:
        """Wait until so many requests for the model are there."""
        self._until(model, requests=requests)

    def _until(self, model: str, **wanted: object) -> None:
        def told() -> bool:
            return wanted.items() <= _states(self._client).get(model, {}).items()

        wait_for(told, why=f"{model} is at {wanted}")

    def order(self, *requests: str) -> list[str]:
        started = [line["request"] for line in self._server.log("stream start")]
        return sorted(requests, key=started.index)


def states(server: Server) -> dict[str, Body]:
    with server.client() as client:
        return _states(client)


def _states(client: httpx.Client) -> dict[str, Body]:
    told = client.get("/health", params={"verbose": "1"}).json()
    return {model["id"]: model for model in told.get("models", [])}
