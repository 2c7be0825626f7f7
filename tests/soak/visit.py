"""One connection of one client, by hand: it may send half, read a byte at a time, or just go."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import uuid
from types import TracebackType
from typing import Any, Literal

import msgspec

Body = dict[str, Any]
HangUp = Literal["fin", "rst"]

_HEAD_END = b"\r\n\r\n"
_CHUNKS_END = b"0\r\n\r\n"


class Strange(Exception):
    """The server has done what no server should; the message says what."""


class Heard(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes
    request: str
    """Its id."""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of the error that this answer is, in whatever shape."""
        text = self.body
        if self.headers["content-type"].startswith("text/event-stream"):
            text = text.removeprefix(b"data: ").partition(b"\n\n")[0]
        return str(json.loads(text)["error"]["code"])

    @property
    def chunks(self) -> list[Body]:
        """The chunks of a stream, which must have the form of one."""
        text = self.body.decode("utf-8")
        *events, done, rest = text.split("\n\n")
        if (done, rest) != ("data: [DONE]", ""):
            raise Strange(f"a stream ends with {text[-200:]!r}")
        return [json.loads(e.removeprefix("data: ")) for e in events if not e.startswith(":")]


class Visit:
    """A connection; `async with Visit(address) as visit`. It ends with FIN unless told how."""

    def __init__(self, address: tuple[str, int], *, buffer: int | None = None) -> None:
        self._address = address
        self._buffer = buffer
        self._data = b""
        self.request = ""

    async def __aenter__(self) -> Visit:
        self._socket = socket.socket()
        self._socket.setblocking(False)
        if self._buffer is not None:  # before connecting, for it bounds the window
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer)
        try:
            await asyncio.get_running_loop().sock_connect(self._socket, self._address)
        except BaseException:
            self._socket.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._socket.close()

    def leave(self, how: HangUp) -> None:
        if how == "rst":
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    # Speaking.

    def head(self, method: str, path: str, length: int | None = None, **headers: str) -> bytes:
        self.request = uuid.uuid4().hex
        lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"X-Request-ID: {self.request}"]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode()

    def written(self, method: str, path: str, body: Body | bytes | None = None) -> bytes:
        """A request whole, a body that is no bytes as JSON."""
        content = body if isinstance(body, bytes) else b"" if body is None else json_bytes(body)
        return self.head(method, path, None if body is None else len(content)) + content

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def ask(self, method: str, path: str, body: Body | bytes | None = None) -> Heard:
        """One of any number of requests on this connection."""
        await self.send(self.written(method, path, body))
        return await self.hear()

    # Listening.

    async def some(self, most: int = 65536) -> bytes:
        """The next bytes, one at least. Raises Strange at the connection's end."""
        data = await asyncio.get_running_loop().sock_recv(self._socket, most)
        if not data:
            raise Strange(f"the connection ends after {self._data[-200:]!r}")
        self._data += data
        return data

    @property
    def ended(self) -> bool:
        """Whether all of an answer in chunks has come."""
        return self._data.endswith(b"\r\n0\r\n\r\n")

    async def until(self, pattern: bytes, most: int = 65536) -> bytes:
        """All that has come once it has `pattern`."""
        while re.search(pattern, self._data) is None:
            await self.some(most)
        return self._data

    async def hear(self, most: int = 65536) -> Heard:
        """A whole answer, read at most so many bytes at a time."""
        while _HEAD_END not in self._data:
            await self.some(most)
        head, _, self._data = self._data.partition(_HEAD_END)
        status, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        body = await self._body(headers, most)
        return Heard(int(status.split()[1]), headers, body, headers["x-request-id"])

    async def _body(self, headers: dict[str, str], most: int) -> bytes:
        if "content-length" in headers:
            length = int(headers["content-length"])
            while len(self._data) < length:
                await self.some(most)
            body, self._data = self._data[:length], self._data[length:]
            return body
        # Frames are read to the last chunk: nothing is asked before it has come.
        while not (self._data.endswith(_CHUNKS_END) and self._is_whole):
            await self.some(most)
        data, self._data = self._data, b""
        return b"".join(unchunk(data))

    @property
    def _is_whole(self) -> bool:
        """Whether what looks like the last chunk is no text of another."""
        return self._data == _CHUNKS_END or self._data.endswith(b"\r\n" + _CHUNKS_END)


def unchunk(data: bytes) -> list[bytes]:
    parts = []
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size, 16)
        parts.append(data[:length])
        data = data[length + 2 :]
    return parts


def json_bytes(body: Body) -> bytes:
    return json.dumps(body).encode()
