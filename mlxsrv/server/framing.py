"""Framing of HTTP/1: where each request on a connection begins and ends, checked before any parser.

uvicorn parses with httptools or with h11, which read some requests in different ways. So doubtful
requests are refused before either parser sees them, as RFC 9112 says where it is strict:

- A line ends in CRLF and is not folded. No space follows a header's name, and no control character
  is in its value. The version is HTTP/1.1 or HTTP/1.0.
- There is exactly one Host; HTTP/1.0 may leave it out.
- The target is a path. A client that takes this server for a proxy sends a URL; its host replaces
  the Host header.
- A body has one Content-Length of digits, or `Transfer-Encoding: chunked` and no other coding.
- An offer to upgrade is declined: it is removed before the parser sees it.
- Trailers and extensions of chunks are removed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum, auto

from mlxsrv.errors import HeadersTooLarge, InvalidHTTP, MethodNotAllowed

_METHODS = frozenset(b"GET HEAD POST PUT PATCH DELETE OPTIONS TRACE".split())

_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_VALUE = rb"[\t -~\x80-\xff]*"
_FIELDS = rb"(?:" + _TOKEN + rb":" + _VALUE + rb"\r\n)*"
_HEAD = re.compile(rb"(" + _TOKEN + rb") ([!-~]+) (HTTP/1\.[01])\r\n(" + _FIELDS + rb")\r\n")
_TRAILERS = re.compile(_FIELDS + rb"\r\n")
_CHUNK = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;" + _VALUE + rb")?")
_FRAMING_FIELD = re.compile(
    rb"\r\n(host|connection|content-length|transfer-encoding|upgrade):([^\r]*)", re.I
)
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_URL = re.compile(rb"https?://([^/?#]+)([/?][^#]*)?", re.I)
_HOST_FIELD = re.compile(rb"^host:[^\r]*\r\n", re.I | re.M)
_UPGRADE_FIELD = re.compile(rb"^upgrade:[^\r]*\r\n", re.I | re.M)
_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")  # a CR or an LF without the other
_FIRST_LINE = re.compile(_TOKEN + rb" [!-~]+ HTTP/1\.[01]\r\n.*", re.S)


class _Phase(Enum):
    HEAD = auto()
    BODY = auto()
    CHUNK_LINE = auto()
    CHUNK = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    CLOSED = auto()  # the last request is complete; what follows is not read


class Framing:
    """The framing of one connection: takes its bytes, gives those that the parser may read.

    Args:
        most: bytes that a head, the line before a chunk, or the trailers may have.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = b""  # the beginning of a head, a line or trailers; they are read whole
        self._phase = _Phase.HEAD
        self._left = 0  # bytes of the body or of the chunk
        self._last = False  # the connection ends after this request

    @property
    def at_rest(self) -> bool:
        """Whether no request is in the middle of its bytes."""
        return self._phase is _Phase.CLOSED or (self._phase is _Phase.HEAD and not self._held)

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield what the parser may read now: heads when they are whole, bodies as they come.

        Raises:
            InvalidHTTP, MethodNotAllowed, HeadersTooLarge: the connection cannot go on. The pieces
                that were yielded before are good.
        """
        # No end can be before `seen`: the bytes there have been searched already.
        at, seen = 0, max(len(self._held) - 3, 0)
        data, self._held = self._held + data, b""
        while at < len(data) and self._phase is not _Phase.CLOSED:
            if self._phase in (_Phase.BODY, _Phase.CHUNK):
                piece = data[at : at + self._left]
                at += len(piece)
                yield self._take(piece)
                continue
            end = self._end(data, at, max(at, seen))
            if not end:
                self._held = data[at:]
                return
            whole, at = data[at:end], end
            if piece := self._read(whole):
                yield piece

    def _take(self, piece: bytes) -> bytes:
        self._left -= len(piece)
        if not self._left:
            in_chunk = self._phase is _Phase.CHUNK
            self._phase = _Phase.CHUNK_END if in_chunk else self._next
        return piece

    @property
    def _next(self) -> _Phase:
        """The phase after the end of a request."""
        return _Phase.CLOSED if self._last else _Phase.HEAD

    def _end(self, data: bytes, at: int, seen: int) -> int:
        """Find the end of the head, line or trailers at `at`; 0 if it has not arrived yet.

        Args:
            seen: the end cannot be before this index.
        """
        if self._phase is _Phase.CHUNK_END or data.startswith(b"\r\n", at):
            return 0 if data[at:] == b"\r" else min(len(data), at + 2)
        stop = b"\r\n" if self._phase is _Phase.CHUNK_LINE else b"\r\n\r\n"
        start = data.find(stop, seen)
        end = 0 if start < 0 else start + len(stop)
        if (end or len(data)) - at > self._most:
            raise HeadersTooLarge(f"headers are larger than {self._most} bytes")
        if not end:
            self._check_beginning(data[at:], seen - at)
        return end

    def _check_beginning(self, data: bytes, seen: int) -> None:
        """Refuse bytes that cannot become a request: their sender may wait for an answer."""
        is_method = data[:1].isalpha() or data == b"\r"
        if _BARE.search(data, seen) or (self._phase is _Phase.HEAD and not is_method):
            raise InvalidHTTP(_why(data))

    def _read(self, whole: bytes) -> bytes:
        """Read a head, line or trailers; return what the parser may see of them."""
        match self._phase:
            case _Phase.HEAD if whole == b"\r\n":  # some clients send it after a body
                return b""
            case _Phase.HEAD:
                return self._read_head(whole)
            case _Phase.CHUNK_LINE:
                return self._read_chunk_line(whole)
            case _Phase.CHUNK_END if whole == b"\r\n":
                self._phase = _Phase.CHUNK_LINE
                return whole
            case _Phase.TRAILERS if _TRAILERS.fullmatch(whole):
                self._phase = self._next
                return b"0\r\n\r\n"
        raise InvalidHTTP("a chunk is longer than its size says, or a trailer is not a header")

    def _read_chunk_line(self, line: bytes) -> bytes:
        found = _CHUNK.fullmatch(line, 0, len(line) - 2)
        if found is None:
            raise InvalidHTTP("the size of a chunk is not a number")
        self._left = int(found[1], 16)
        self._phase = _Phase.CHUNK if self._left else _Phase.TRAILERS
        return b"%x\r\n" % self._left if self._left else b""

    def _read_head(self, head: bytes) -> bytes:
        found = _HEAD.fullmatch(head)
        if found is None:
            raise InvalidHTTP(_why(head))
        method, target, version, fields = found.groups()
        _check_method(method)
        values: dict[bytes, list[bytes]] = {}
        for name, value in _FRAMING_FIELD.findall(head, found.end(3)):
            values.setdefault(name.lower(), []).append(value.strip(b" \t"))
        old = version == b"HTTP/1.0"
        self._last = old or _says_close(values.get(b"connection", []))
        _check_host(values.get(b"host", []), old=old)
        self._frame_body(
            values.get(b"content-length", []), values.get(b"transfer-encoding", []), old=old
        )
        if b"upgrade" in values:
            fields = _UPGRADE_FIELD.sub(b"", fields)
        elif target.startswith(b"/") and b"#" not in target:
            return head
        target, fields = _as_path(method, target, fields)
        return method + b" " + target + b" " + version + b"\r\n" + fields + b"\r\n"

    def _frame_body(self, lengths: list[bytes], codings: list[bytes], *, old: bool) -> None:
        if lengths and codings:
            raise InvalidHTTP("a request must not have both Content-Length and Transfer-Encoding")
        if codings:
            if old or [coding.lower() for coding in codings] != [b"chunked"]:
                raise InvalidHTTP("Transfer-Encoding must be chunked, and only HTTP/1.1 has it")
            self._phase = _Phase.CHUNK_LINE
            return
        if lengths and not (len(lengths) == 1 and lengths[0].isdigit() and len(lengths[0]) < 19):
            raise InvalidHTTP("Content-Length must be one number")
        self._left = int(lengths[0]) if lengths else 0
        self._phase = _Phase.BODY if self._left else self._next


def _check_method(method: bytes) -> None:
    if method == b"CONNECT":
        raise InvalidHTTP("this server is not a proxy")
    if method not in _METHODS:
        raise MethodNotAllowed(f"there is no method {method.decode()[:20]} here")


def _check_host(hosts: list[bytes], *, old: bool) -> None:
    if len(hosts) > 1 or not (hosts or old):
        raise InvalidHTTP("a request must have exactly one Host")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise InvalidHTTP("Host must be a name or an address, with or without a port")


def _says_close(connections: list[bytes]) -> bool:
    return any(
        option.strip().lower() == b"close"
        for connection in connections
        for option in connection.split(b",")
    )


def _as_path(method: bytes, target: bytes, fields: bytes) -> tuple[bytes, bytes]:
    """Return the target as a path, and the fields; the host of a target that is a URL replaces
    Host."""
    is_path = target.startswith(b"/") and b"#" not in target
    if is_path or (method, target) == (b"OPTIONS", b"*"):
        return target, fields
    url = _URL.fullmatch(target)
    if url is None or not _HOST.fullmatch(url[1]):
        raise InvalidHTTP("the target of a request must be a path")
    host, path = url[1], url[2] or b"/"
    fields = b"Host: " + host + b"\r\n" + _HOST_FIELD.sub(b"", fields)
    return path if path.startswith(b"/") else b"/" + path, fields


def _why(head: bytes) -> str:
    if _BARE.search(head):
        return "the lines of a request must end in CRLF, and have no other CR or LF"
    if not _FIRST_LINE.fullmatch(head):
        return "a request must begin with a line such as GET /v1/models HTTP/1.1"
    if b"\r\n " in head or b"\r\n\t" in head:
        return "a header must be one line"
    return "a header must be a name, a colon and a value without control characters"
