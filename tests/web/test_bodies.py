"""All bodies that are held at once: one bound for their bytes."""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.errors import Overloaded
from mlxsrv.options import SettingsError
from mlxsrv.settings import Settings
from mlxsrv.web.bodies import Bodies
from tests.support.client import COMPLETIONS, RawClient, ask, chat, completion, refused
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving, wait_for

MOST = 400_000
LARGE = {"content": "a " * (MOST * 2 // 5)}  # 0.8 of a body's limit
MUCH = MOST * 7 // 10


@pytest.fixture(scope="module")
def bounded(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ["--max-body", str(MOST), "--max-bodies", str(2 * MOST), "--body-timeout", "60"]
    folder = tmp_path_factory.mktemp("bounded")
    with serving(folder, "--model", f"t={folders.endless}", *options) as server:
        yield server


@contextlib.contextmanager
def half_sent(server: Server, *framing: str) -> Iterator[socket.socket]:
    """A request whose body is under way."""
    head = ["POST /tokenize HTTP/1.1", "Host: localhost", *framing]
    with socket.create_connection(server.address) as raw:
        raw.sendall("\r\n".join([*head, "", ""]).encode())
        yield raw


def test_bodies_together_are_bounded_and_small_ones_get_in(bounded: Server) -> None:
    with bounded.client() as client:
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                framing = (f"Content-Length: {MOST}", "Expect: 100-continue")
                raw = stack.enter_context(half_sent(bounded, *framing))
                raw.settimeout(PATIENCE)
                assert raw.recv(999).startswith(b"HTTP/1.1 100 "), "there is room for it"
            error = refused(client.post("/tokenize", json=LARGE), 503, "overloaded")
            assert str(2 * MOST) in error["message"]
            assert int(client.post("/tokenize", json=LARGE).headers["retry-after"]) >= 1
            for _ in range(3):
                ask(client, chat(max_tokens=1))
            assert client.get("/health").status_code == 200
        wait_for(lambda: client.post("/tokenize", json=LARGE).is_success, why="there is room")


def test_bodies_of_unknown_length_count_as_they_come(bounded: Server) -> None:
    with bounded.client() as client, contextlib.ExitStack() as stack:
        chunked = "Transfer-Encoding: chunked"
        raws = [stack.enter_context(half_sent(bounded, chunked)) for _ in range(3)]
        for raw in raws:
            raw.sendall(b"%x\r\n" % MUCH + b"x" * MUCH)
        # One of them is refused: the bodies arrive at the same time, in any order.
        answered = select.select(raws, [], [], PATIENCE)[0]
        assert [raw.recv(999)[:13] for raw in answered] == [b"HTTP/1.1 503 "]
        wait_for(lambda: client.post("/tokenize", json=LARGE).status_code == 503, why="all came")
    with bounded.client() as client:
        wait_for(lambda: client.post("/tokenize", json=LARGE).is_success, why="there is room")


def test_a_prompt_that_is_tokens_has_given_its_room_back(bounded: Server) -> None:
    long = completion("a " * (MOST * 2 // 5), max_tokens=100_000, stream=True)
    with bounded.client() as client, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(RawClient(bounded, long, COMPLETIONS))
            wait_for(lambda: client.post("/tokenize", json=LARGE).is_success, why="there is room")


def test_room_is_taken_once_and_given_back_once() -> None:
    bodies = Bodies(1_000_000)
    one, two, small = bodies.share(), bodies.share(), bodies.share()
    one.grow(600_000)
    one.grow(500_000)
    assert bodies.held == 600_000
    with pytest.raises(Overloaded):
        two.grow(500_000)
    assert bodies.held == 600_000
    two.grow(400_000)
    small.grow(60_000)
    with pytest.raises(Overloaded):
        bodies.share().grow(65_500)
    for share in (one, one, two, small, small):
        share.release()
    assert bodies.held == 0


def test_who_finds_no_room_is_told_when_there_may_be_some() -> None:
    app = mlxsrv.create_app(Settings(max_body=100_000, max_bodies=100_000))
    with TestClient(app) as client:
        share = app.bodies.share()
        share.grow(100_000)
        app.bodies._turnover._begun -= 30  # nothing has come back since then
        response = client.post("/tokenize", json={"content": "a" * 70_000})
        assert response.json()["error"]["code"] == "overloaded"
        assert 30 <= int(response.headers["retry-after"]) < 60
        share.release()
        assert client.post("/tokenize", json={"content": "a" * 70_000}).status_code == 200


def test_a_bound_below_that_of_one_body_is_refused() -> None:
    with pytest.raises(SettingsError, match="max_bodies"):
        Settings(max_body=2048, max_bodies=2047)
    assert Settings(max_body=2048, max_bodies=2048).max_bodies == 2048
