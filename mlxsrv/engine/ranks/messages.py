"""Messages between rank 0 and the other ranks, over a TCP connection with each.

A message is its length, four bytes, and MessagePack. Rank 0 sends Round and Stop, the others send
Hello, Beat, WorkFailed and ShutdownWish.
"""

from __future__ import annotations

import socket
import struct
from time import monotonic
from typing import Any

import msgspec

from mlxsrv.engine.plans import RoundPlan

_SHORTEST = 0.001  # 0 would not wait at all
_LENGTH = struct.Struct("!I")
_IDLE, _INTERVAL, _PROBES = 3, 1, 4  # of TCP keep-alive, in seconds: a lost host is noticed in 7


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A rank's first message. `token` shows that it belongs to the ranks."""

    rank: int
    token: str


class Round(msgspec.Struct, frozen=True, tag=True):
    """Do the work items of this plan. The first round has number 1."""

    number: int
    plan: RoundPlan


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process: rank 0 has done its last round."""


WAITING = "waiting"
"""The state of a rank that has done all rounds which it was sent."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The rank has been at `what`, a work item of a round, for so many seconds. Sent about every
    second while it has work, and once when it has none: with WAITING."""

    round: int
    what: str
    seconds: float


class WorkFailed(msgspec.Struct, frozen=True, tag=True):
    """The work item of a round with this index failed."""

    round: int
    work: int
    reason: str


class ShutdownWish(msgspec.Struct, frozen=True, tag=True):
    """The rank was asked by a signal to end, and asks rank 0 to shut down."""


RankMessage = Hello | Round | Stop | Beat | WorkFailed | ShutdownWish


def encode_message(message: RankMessage) -> bytes:
    """Encode a message that several ranks are to have."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class RankConnection:
    """A connected socket that carries messages. One thread may send while another receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(RankMessage)
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        idle = getattr(socket, "TCP_KEEPIDLE", None) or getattr(socket, "TCP_KEEPALIVE", None)
        for option, value in (
            (idle, _IDLE),
            (getattr(socket, "TCP_KEEPINTVL", None), _INTERVAL),
            (getattr(socket, "TCP_KEEPCNT", None), _PROBES),
            # While data is on its way there is no keep-alive.
            (getattr(socket, "TCP_USER_TIMEOUT", None), 1000 * (_IDLE + _INTERVAL * _PROBES)),
        ):
            if option is not None:
                sock.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: RankMessage) -> None:
        """Raises OSError if the connection is lost."""
        self.send_encoded(encode_message(message))

    def send_encoded(self, message: bytes) -> None:
        """Send what `encode_message` returned. Raises OSError if the connection is lost."""
        self._socket.sendall(message)

    def receive(self, timeout: float | None = None, most: int | None = None) -> Any:
        """Wait for the next message.

        Args:
            timeout: seconds; None: no bound.
            most: bytes that it may have; None: no bound.

        Raises:
            OSError: the connection is lost, the time is over, or the message is too long.
            msgspec.DecodeError: the other side is not of this version.
        """
        deadline = None if timeout is None else monotonic() + timeout
        [length] = _LENGTH.unpack(self._read(_LENGTH.size, deadline))
        if most is not None and length > most:
            raise OSError(f"a message of {length} bytes")
        return self._decoder.decode(self._read(length, deadline))

    def _read(self, size: int, deadline: float | None) -> bytearray:
        data = bytearray(size)
        rest = memoryview(data)
        while rest:
            self._socket.settimeout(
                None if deadline is None else max(deadline - monotonic(), _SHORTEST)
            )
            count = self._socket.recv_into(rest)
            if not count:
                raise ConnectionResetError("the connection was closed")
            rest = rest[count:]
        return data

    def close(self) -> None:
        self._socket.close()
