"""Clients of any dialect that leave: the row, or the place in the queue, is free at once."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import msgspec
import pytest

from tests.support.client import FIRST_CONTENT, RawClient, answer, ask, chat
from tests.support.leaving import LONG, ended_unread, left, started
from tests.support.serving import Server, wait_for
from tests.web.dialects.asking import DIALECTS
from tests.web.dialects.spoken import Asked, Spoken, asking

TEXT = {
    "chat": FIRST_CONTENT,
    "messages": rb"text_delta",
    "responses": rb"output_text\.delta",
    "ollama": FIRST_CONTENT,
}
ENDLESS = asking("Tell me of the sea.", model="t", limit=500_000)
READING = msgspec.structs.replace(ENDLESS, turns=asking(LONG[0]["content"]).turns)


@pytest.fixture(params=DIALECTS.values(), ids=[*DIALECTS])
def spoken(request: pytest.FixtureRequest) -> Spoken:
    spoken: Spoken = request.param
    return spoken


@pytest.fixture
def client(narrow: Server) -> Iterator[httpx.Client]:
    with narrow.client() as client:
        yield client


def leaving(server: Server, spoken: Spoken, asked: Asked, *, stream: bool = True) -> RawClient:
    return RawClient(server, spoken.body(asked) | {"stream": stream}, spoken.path)


def check_freed(server: Server, client: httpx.Client, leaver: RawClient) -> None:
    """Fails unless the server's only row is free, which it would not be by itself."""
    assert left(server, leaver)
    assert answer(ask(client, chat()))


def test_mid_stream(narrow: Server, client: httpx.Client, spoken: Spoken) -> None:
    with leaving(narrow, spoken, ENDLESS) as leaver:
        leaver.until(TEXT[spoken.name])
        leaver.hang_up()
    check_freed(narrow, client, leaver)


@pytest.mark.parametrize("stream", [False, True])
def test_mid_prefill(narrow: Server, client: httpx.Client, spoken: Spoken, stream: bool) -> None:
    with leaving(narrow, spoken, READING, stream=stream) as leaver:
        wait_for(lambda: started(narrow, leaver), why="the prompt is read")
        if stream:
            leaver.until(spoken.keepalive if spoken.name != "chat" else b'"role":"assistant"')
        leaver.hang_up("rst")
    assert ended_unread(narrow, leaver)
    check_freed(narrow, client, leaver)


def test_in_the_queue(narrow: Server, client: httpx.Client, spoken: Spoken) -> None:
    with leaving(narrow, DIALECTS["chat"], ENDLESS) as running:
        running.until(FIRST_CONTENT)  # it has the row
        with leaving(narrow, spoken, ENDLESS) as leaver:
            leaver.until(spoken.keepalive)
            leaver.hang_up()
            assert left(narrow, leaver)
        assert started(narrow, running, leaver) == [running.request]
        running.hang_up()
    check_freed(narrow, client, running)
