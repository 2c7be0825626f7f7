"""A client that sends all of a large body before it reads sees why the body is refused."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Iterator
from typing import cast

import openai
import pytest
import uvloop

from mlxsrv.server.lingering import LingeringTransport
from tests.support.fixtures import Folders
from tests.support.jumping_clock import run
from tests.support.serving import PATIENCE, Server, serving
from tests.web.test_limits import Answer, head

MUCH = 16 * 1024 * 1024  # bytes, more than sockets hold
PIECE = b"x" * 65536
LENGTH = f"Content-Length: {MUCH}"
KEY = "Authorization: Bearer k"
CLOSE = "Connection: close"

REFUSED = {
    "too long": (413, (KEY, LENGTH, CLOSE)),
    "too long as it comes": (413, (KEY, "Transfer-Encoding: chunked", CLOSE)),
    "without a key": (401, (LENGTH, CLOSE)),
    "of two lengths": (400, (KEY, LENGTH, "Content-Length: 3")),
}


@pytest.fixture(scope="module")
def small(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("small")
    options = ["--model", f"t={folders.plain}", "--max-body", "400000", "--api-key", "k"]
    with serving(folder, *options) as server:
        yield server


def begin(server: Server, *lines: str) -> socket.socket:
    connection = socket.create_connection(server.address, PATIENCE)
    connection.sendall(head(*lines))
    if "Transfer-Encoding: chunked" in lines:
        connection.sendall(b"%x\r\n" % MUCH)
    return connection


@pytest.mark.parametrize("case", REFUSED)
def test_who_sends_it_all_reads_the_answer(small: Server, case: str) -> None:
    status, lines = REFUSED[case]
    with begin(small, *lines) as connection:
        for _ in range(MUCH // len(PIECE)):
            connection.sendall(PIECE)
        received = b""
        while part := connection.recv(65536):
            received += part
    answer = Answer(received)
    assert answer.statuses == [status]
    assert answer.error()["message"]


def test_who_sends_for_ever_is_cut_off(small: Server) -> None:
    with begin(small, KEY, "Content-Length: 999999999999", CLOSE) as connection:
        sent = 0
        with pytest.raises(OSError, match=r"reset|[Bb]roken pipe"):  # noqa: PT012 - any send may fail
            while True:
                connection.sendall(PIECE)
                sent += len(PIECE)
    assert sent > MUCH


@pytest.mark.parametrize("name", ["waits", "refuses"])
def test_an_app_that_still_answers_what_is_refused_writes_nothing(small: Server, name: str) -> None:
    lines = [f"X-Request-ID: {name}", "Transfer-Encoding: chunked"]
    if name == "waits":  # for the rest of the body
        lines.append(KEY)
    with socket.create_connection(small.address, PATIENCE) as connection:
        connection.sendall(head(*lines) + b"1\r\n{\r\nzz\r\n")
        received = b""
        while part := connection.recv(65536):
            received += part
        assert Answer(received).statuses == [400]
        # The app has been told, though the connection is still open for what the client sends.
        small.logged("request", request=name)
    assert not small.log("bug")


def test_the_sdk_says_what_is_wrong(small: Server) -> None:
    url = f"{small.url}/v1"
    closing = {"Connection": "close"}
    with (
        openai.OpenAI(base_url=url, api_key="k", max_retries=0, default_headers=closing) as sdk,
        pytest.raises(openai.APIStatusError, match="400000") as refused,
    ):
        sdk.completions.create(model="t", prompt="x" * MUCH)
    assert refused.value.status_code == 413


@pytest.mark.parametrize("kind", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_who_has_reset_the_connection_is_not_waited_for(
    kind: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        made, lost = asyncio.Event(), asyncio.Event()

        class Accepting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                stream = cast(asyncio.Transport, transport)  # uvloop's is no subclass
                stream.pause_reading()  # so the loop does not see the reset
                self.end = LingeringTransport(stream, lambda: True, 30)
                made.set()

            def connection_lost(self, error: Exception | None) -> None:
                lost.set()

        protocol = Accepting()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: protocol, "127.0.0.1", 0)
        async with asyncio.timeout(PATIENCE):
            with socket.create_connection(server.sockets[0].getsockname()) as client:
                await made.wait()
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            protocol.end.close()
            await lost.wait()
        protocol.end.stop_waiting()
        server.close()

    with asyncio.Runner(loop_factory=kind) as runner:
        runner.run(test())


class Transport(asyncio.Transport):
    """Notes what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[str] = []

    def write_eof(self) -> None:
        self.done.append("write_eof")

    def resume_reading(self) -> None:
        self.done.append("resume_reading")

    def close(self) -> None:
        self.done.append("close")

    def is_closing(self) -> bool:
        return "close" in self.done


def test_who_is_quiet_is_not_waited_for_long() -> None:
    async def test(bytes_sent: int, seconds: float) -> float:
        transport = Transport()
        lingering = LingeringTransport(transport, lambda: True, seconds)
        lingering.close()
        assert transport.done == ["write_eof", "resume_reading"]
        assert lingering.is_closing()
        loop = asyncio.get_running_loop()
        while not transport.is_closing():
            if bytes_sent:
                bytes_sent -= 1
                assert lingering.discards(b"x")
            await asyncio.sleep(1)
        return loop.time()

    assert run(lambda: test(0, 30)) <= 3
    assert 9 <= run(lambda: test(9, 30)) <= 12
    assert run(lambda: test(10**6, 30)) == pytest.approx(30, abs=1)


def test_a_second_close_ends_at_once_and_so_does_one_without_more_to_come() -> None:
    async def test() -> None:
        answers: list[tuple[Callable[[], bool], int]] = [(lambda: True, 2), (lambda: False, 1)]
        for may_send, closes in answers:
            transport = Transport()
            lingering = LingeringTransport(transport, may_send, 30)
            assert not lingering.discards(b"x")
            for _ in range(closes):
                assert not transport.is_closing()
                lingering.close()
            assert transport.done[-1] == "close"
            lingering.stop_waiting()

    run(test)
