"""h11's parser, with checks of each request that h11 leaves to its caller."""

from __future__ import annotations

import re

import h11
from h11._receivebuffer import ReceiveBuffer

from mlxsrv.errors import HeadersTooLarge, InvalidHTTP
from mlxsrv.web.security.headers import MOST_HEADER_BYTES

_URL = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.I)


class RequestParser(h11.Connection):
    """The server's side of h11, stricter where a proxy in front may read a request otherwise.

    h11 itself refuses, among others, lengths that differ, any transfer coding but `chunked`, a
    missing or second Host, and spaces or control characters where they change the meaning.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MOST_HEADER_BYTES)
        self._buffer = self._receive_buffer = _Buffer()  # not a public interface of h11

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """As h11's, but a request has passed the checks: its target is a path, and it has no offer
        to upgrade.

        Raises:
            InvalidHTTP, HeadersTooLarge: nothing more can be read from this connection.
        """
        if self.their_state is h11.IDLE and not self._buffer.skip_empty_lines():
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            if error.error_status_hint == 431:
                raise _too_large() from None
            raise InvalidHTTP(f"the request is not valid HTTP: {error}"[:200]) from None
        return _checked(event) if isinstance(event, h11.Request) else event


class _Buffer(ReceiveBuffer):
    """The bytes not read yet. Heads and trailers are checked when they are read: h11 takes
    folded headers, and an LF for the end of a line, and shows neither; and it limits only what has
    not arrived whole."""

    def skip_empty_lines(self) -> bool:
        """Drop empty lines in front of a request, which some clients send behind a body (RFC 9112,
        2.2). Returns False if half of one is there."""
        while self._data[:2] == b"\r\n":
            self.maybe_extract_at_most(2)
        return bool(self._data != b"\r")

    def maybe_extract_lines(self) -> list[bytearray] | None:
        before = len(self)
        lines: list[bytearray] | None = super().maybe_extract_lines()
        if lines is None:
            return None
        size = before - len(self)
        if size > MOST_HEADER_BYTES:
            raise _too_large()
        in_crlf = sum(len(line) + 2 for line in lines) + 2  # with the empty line
        if size != in_crlf or any(line.startswith((b" ", b"\t")) for line in lines):
            raise InvalidHTTP("a header must be one line, and lines must end in CRLF")
        return lines


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(f"headers are larger than {MOST_HEADER_BYTES} bytes")


def _checked(request: h11.Request) -> h11.Request:
    """Return the request with a path as its target and without an offer to upgrade."""
    method, target, old = request.method, request.target, request.http_version == b"1.0"
    fields = dict(request.headers)
    if not old and request.http_version != b"1.1":
        raise InvalidHTTP("the version must be HTTP/1.1 or HTTP/1.0")
    if b"transfer-encoding" in fields and (old or b"content-length" in fields):
        raise InvalidHTTP(
            "Transfer-Encoding must not be in a request of HTTP/1.0, or beside Content-Length"
        )
    if method == b"CONNECT":
        raise InvalidHTTP("this server is not a proxy")
    url = _URL.fullmatch(target)  # of a client that takes this server for a proxy
    is_path = target.startswith(b"/") and b"#" not in target
    if url is None and not is_path and (method, target) != (b"OPTIONS", b"*"):
        raise InvalidHTTP("the target of a request must be a path")
    if url is None and b"upgrade" not in fields:
        return request
    headers = [(name, value) for name, value in request.headers if name != b"upgrade"]
    if url is not None:
        path = url[2] or b"/"
        target = path if path.startswith(b"/") else b"/" + path
        headers = [(b"host", url[1]), *(each for each in headers if each[0] != b"host")]
    return h11.Request(
        method=method, target=target, headers=headers, http_version=request.http_version
    )
