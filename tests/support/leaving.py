"""Requests that outlast a test, and the clients that leave them."""

from __future__ import annotations

from tests.support.client import Body, RawClient, chat
from tests.support.serving import Server

FOR_EVER = 500_000
"""More tokens than are made while the tests run."""

LONG = [{"role": "user", "content": "ä" * 40_000}]
"""A prompt that takes longer to read than a test may wait."""


def endless(**fields: object) -> Body:
    return chat(**{"max_tokens": FOR_EVER, "stream": True, **fields})


def left(server: Server, client: RawClient) -> bool:
    """Whether the server has noticed that the client left; waits until its request ended."""
    return bool(server.logged("stream end", request=client.request)["finish"] == "disconnected")


def ended_unread(server: Server, client: RawClient) -> bool:
    """Whether the request of a client that left ended before its prompt was read; waits until it
    ended."""
    return (
        left(server, client) and not server.logged("stream end", request=client.request)["tokens"]
    )


def queued(server: Server, model: str = "t") -> int:
    """Requests that wait for a row of the model."""
    # A connection of its own: what came before on other ones has been heard.
    with server.client() as client:
        models = client.get("/health?verbose=1").json()["models"]
    return sum(each["waiting_for_row"] for each in models if each["id"] == model)


def started(server: Server, *clients: RawClient) -> list[str]:
    """The requests of `clients` that got a row, in the order in which they did."""
    mine = {client.request for client in clients}
    return [line["request"] for line in server.log("stream start") if line["request"] in mine]
