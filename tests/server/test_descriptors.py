"""Clients that use up all descriptors: connected clients are served, new ones get a 503, and when
they have left, all is as before."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support.client import CHAT, answer, ask, chat, stream
from tests.support.effort import often
from tests.support.fixtures import Folders
from tests.support.serving import PATIENCE, Server, serving, wait_for

LIMIT = 128
CROWD = 300


@contextmanager
def crowd(server: Server) -> Iterator[list[socket.socket]]:
    """Very many clients that have connected and say nothing."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(server.address, PATIENCE))
            for _ in range(CROWD)
        ]


def turned_away(clients: list[socket.socket]) -> list[bytes]:
    """The last bytes that the server sent to each client whose connection it has closed."""
    told = []
    for client in clients:
        client.setblocking(False)
        try:
            told.append(client.recv(65536))
        except BlockingIOError:
            continue
        except ConnectionResetError:
            told.append(b"")
    return told


@pytest.fixture(params=often(["uvloop", "asyncio"], ["uvloop"]))
def cramped(request: pytest.FixtureRequest, folders: Folders, tmp_path: Path) -> Iterator[Server]:
    """A server with few descriptors, on each of uvicorn's event loops."""
    variables = {}
    if request.param == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError\n")
        variables["PYTHONPATH"] = str(tmp_path)
    model = ("--model", f"t={folders.plain}")
    with serving(tmp_path, *model, variables=variables, descriptors=LIMIT) as server:
        yield server


def check_quiet(server: Server) -> None:
    log = server.log_text()
    for bad in ("Traceback", "Too many open files", "out of system resource", '"event":"bug"'):
        assert bad not in log


def test_who_is_there_is_served_and_who_comes_is_told(cramped: Server) -> None:
    with cramped.client() as client:
        expected = answer(ask(client, chat()))
        with crowd(cramped) as clients:
            refusal, *_ = wait_for(
                lambda: [told for told in turned_away(clients) if told], why="some are turned away"
            )
            assert refusal.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1\r\n" in refusal
            assert b'"code":"overloaded"' in refusal
            # This connection is kept; what has never been asked for needs no descriptor either.
            assert answer(ask(client, chat())) == expected
            assert answer(ask(client, chat(response_format={"type": "json_object"})))
            assert stream(client, chat()).content == expected
            for path, body in {
                "/v1/embeddings": {"input": "a"},
                "/tokenize": {"content": "a"},
                "/v1/rerank": {"query": "a", "documents": ["b"]},
            }.items():
                assert client.post(path, json=body).status_code < 500, path
            for path in ("/v1/models", "/health?verbose=1", "/openapi.json", "/api/profiles"):
                assert client.get(path).status_code < 500, path
    with cramped.client() as client:
        assert answer(ask(client, chat())) == expected
    check_quiet(cramped)


def test_a_crowd_at_start_does_not_keep_the_model_from_loading(cramped: Server) -> None:
    with crowd(cramped):
        cramped.logged("model loaded", model="t")
    with cramped.client() as client:
        assert answer(ask(client, chat()))
        assert ask(client, chat(response_format={"type": "json_object"}))
    check_quiet(cramped)


def test_a_crowd_that_stays_is_left_in_time(folders: Folders, tmp_path: Path) -> None:
    options = ("--model", f"t={folders.plain}", "--body-timeout", "1")
    with serving(tmp_path, *options, descriptors=LIMIT) as server, crowd(server):

        def served() -> bool:
            with server.client() as client:
                try:
                    return client.post(CHAT, json=chat()).status_code == 200
                except httpx.TransportError:
                    return False

        wait_for(served, why="those who said nothing are gone")


def test_the_limit_is_raised_to_what_the_process_may_have() -> None:
    code = """
import resource
from mlxsrv.server import descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
assert descriptors.most_connections() == 50
descriptors.raise_limit()
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, 300)
assert descriptors.most_connections() == 236
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_than_mlx_lm_allows_are_served_at_once(folders: Folders, tmp_path: Path) -> None:
    """mlx-lm would lower the limit to 2,048."""
    many = 2_300
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < many + 300:
        pytest.skip(f"a process may open {hard} files here")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (many + 300, hard))
    try:
        with (
            serving(tmp_path, "--model", f"t={folders.plain}", cold=True) as server,
            ExitStack() as stack,
        ):
            server.logged("model loaded", model="t")
            clients = [
                stack.enter_context(socket.create_connection(server.address, PATIENCE))
                for _ in range(many)
            ]
            with server.client() as client:
                assert answer(ask(client, chat()))
            assert turned_away(clients) == []
            check_quiet(server)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
