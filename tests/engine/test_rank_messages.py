"""A connection between ranks: its bounds, and how soon a host that vanishes is noticed."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from mlxsrv.engine.ranks.messages import RankConnection, ShutdownWish, Stop, encode_message

Pair = tuple[RankConnection, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connection, and the socket at its other end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = socket.create_connection(server.getsockname())
        connection = RankConnection(server.accept()[0])
    yield connection, end
    connection.close()
    end.close()


def test_a_message_that_comes_in_pieces_is_whole(pair: Pair) -> None:
    connection, end = pair
    for byte in encode_message(Stop()) + encode_message(ShutdownWish()):
        end.sendall(bytes([byte]))
    assert connection.receive(5) == Stop()
    assert connection.receive(5) == ShutdownWish()


def test_who_sends_nothing_too_much_or_half_a_message_is_noticed(pair: Pair) -> None:
    connection, end = pair
    with pytest.raises(TimeoutError):
        connection.receive(0.01)
    end.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(OSError, match="a message of 4294967295 bytes"):
        connection.receive(5, most=1024)
    end.sendall(encode_message(Stop())[:-1])
    end.close()
    with pytest.raises(ConnectionResetError, match="closed"):
        connection.receive(5)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other names for it")
def test_a_host_that_vanishes_is_noticed_in_seconds(pair: Pair) -> None:
    sock = pair[0]._socket
    assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, interval, probes, unsent = (
        sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
        for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
    )
    assert idle + interval * probes <= 10
    assert unsent <= 10_000, "milliseconds"
