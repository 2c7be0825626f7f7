"""Requests are framed by RFC 9112 where it is strict: whole, byte by byte and with what follows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import HeadersTooLarge, InvalidHTTP, MethodNotAllowed
from mlxsrv.server.framing import Framing
from tests.support.growth import assert_linear

MOST = 1000

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"


def read(*parts: bytes) -> bytes:
    """The bytes of these packets that a parser would see."""
    framing = Framing(MOST)
    return b"".join(piece for part in parts for piece in framing.pieces(part))


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


# What is read as it stands, and what is made of the rest.

FINE = [
    GET,
    b"GET / HTTP/1.0\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nhost: [::1]:80\r\n\r\n",
    b"GET /a?b=c//d HTTP/1.1\r\nHOST:\t localhost:8000 \r\nX:\r\nY: \xe9\t\x80\r\n\r\n",
    POST + b"Content-Length: 5\r\n\r\nhello",
    POST + b"Content-Length: 0\r\n\r\n",
    POST + b"Content-Length: 37\r\n\r\n" + b"GET / HTTP/9.9\nnot: a head\r\n\r\n" + b"x" * 7,
    POST
    + b"Transfer-Encoding: Chunked\r\n\r\n5\r\nhello\r\nc\r\n\r\n0\r\n\r\nx\ny\r\n\r\n0\r\n\r\n",
]


@pytest.mark.parametrize("data", FINE)
def test_what_is_clear_is_read_as_it_stands(data: bytes) -> None:
    closes = b"HTTP/1.0" in data
    for request in (data, data + NEXT, data + data):
        expected = data if closes else request
        assert read(request) == expected
        assert read(*bytewise(request)) == expected


MADE = [
    (b"\r\n\r\n" + GET, GET),
    (
        b"GET http://B:1/p?q HTTP/1.1\r\nA: b\r\nHost: a\r\nC: d\r\n\r\n",
        b"GET /p?q HTTP/1.1\r\nHost: B:1\r\nA: b\r\nC: d\r\n\r\n",
    ),
    (
        b"GET HTTPS://b?q HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /?q HTTP/1.1\r\nHost: b\r\n\r\n",
    ),
    (
        b"GET / HTTP/1.1\r\nHost: a\r\nUPGRADE: h2c\r\nConnection: Upgrade\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\n\r\n",
    ),
    (
        POST + b'Transfer-Encoding: chunked\r\n\r\n00A;x="y"\r\n0123456789\r\n0;z\r\n'
        b"Authorization: Bearer x\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\na\r\n0123456789\r\n0\r\n\r\n",
    ),
]


@pytest.mark.parametrize(("data", "made"), MADE)
def test_what_is_allowed_is_made_plain(data: bytes, made: bytes) -> None:
    assert read(data + NEXT) == made + NEXT
    assert read(*bytewise(data + NEXT)) == made + NEXT


@pytest.mark.parametrize("connection", [b"close", b"x, Close ,y"])
def test_nothing_is_read_after_the_last_request(connection: bytes) -> None:
    last = POST + b"Connection: " + connection + b"\r\nContent-Length: 2\r\n\r\nab"
    for rest in (NEXT, b"\x00garbage"):
        assert read(last + rest) == last
        assert read(*bytewise(last + rest)) == last


@given(data=st.sampled_from(FINE + [data for data, _ in MADE]), cuts=st.lists(st.integers(0, 400)))
def test_packets_are_cut_anywhere(data: bytes, cuts: Sequence[int]) -> None:
    data += NEXT
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    parts = [data[start:end] for start, end in pairwise(ends)]
    assert read(*parts) == read(data)


# What is refused.

HOSTS = ["a b", "a@b", "a/b", "a:b", "é", "[::1", "a,b c", "a\x00"]

REFUSED = [
    b"GET / HTTP/1.1\r\n\r\n",  # no Host
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n",
    *(b"GET / HTTP/1.1\r\nHost: " + host.encode() + b"\r\n\r\n" for host in HOSTS),
    # Lines.
    GET.replace(b"\r\n", b"\n"),
    b"GET / HTTP/1.1\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA: b\rC: d\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA: b\r\n c\r\n\r\n",
    b"GET / HTTP/1.1\r\n Host: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\tA: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA : b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA: \x00\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nA: \x7f\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n\xe9: b\r\n\r\n",
    # The first line.
    *(
        line + b"\r\nHost: a\r\n\r\n"
        for line in (
            b"GET / HTTP/3.9",
            b"GET / HTTP/2.0",
            b"GET / HTTP/1.2",
            b"GET / HTTP/0.9",
            b"GET / http/1.1",
            b"GET / HTTP/1.1 ",
            b"GET /",
            b"GET  / HTTP/1.1",
            b"GET\t/ HTTP/1.1",
            b"GET / x HTTP/1.1",
            b"GET /\xe9 HTTP/1.1",
            b"GET /#a HTTP/1.1",
            b"GET health HTTP/1.1",
            b"GET * HTTP/1.1",
            b"GET ftp://a/ HTTP/1.1",
            b"GET http:///p HTTP/1.1",
            b"GET http://u@b/p HTTP/1.1",
            b"GET http://b/p#f HTTP/1.1",
            b"CONNECT a:443 HTTP/1.1",
            b"/ GET HTTP/1.1",
        )
    ),
    b"\x16\x03\x01\x02",
    b"\nGET",
    # Bodies.
    *(
        POST + fields + b"\r\n\r\n"
        for fields in (
            b"Content-Length: 5\r\nContent-Length: 5",
            b"Content-Length: 5, 5",
            b"Content-Length: +5",
            b"Content-Length: -0",
            b"Content-Length: 0x5",
            b"Content-Length: 5 5",
            b"Content-Length:",
            b"Content-Length: 9999999999999999999",
            b"Content-Length: \xb2",
            b"Content-Length: 0\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
            b"Transfer-Encoding: gzip, chunked",
            b"Transfer-Encoding: identity",
            b"Transfer-Encoding:",
        )
    ),
    b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n",
    *(
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
        for chunks in (
            b"\r\n",
            b"x\r\n",
            b"5\nhello",
            b" 5\r\nhello\r\n",
            b"5 \r\nhello\r\n",
            b"-5\r\n",
            b"0x5\r\nhello\r\n",
            b"1111111111111111\r\n",
            b"5\r\nhello!",
            b"5\r\nhello\n\r",
            b"5\r\nhello\rx",
            b"5;a\nb\r\nhello\r\n",
            b"0\r\nA : b\r\n\r\n",
            b"0\r\nA: b\n\r\n",
            b"0\r\nA: b\r\n c\r\n\r\n",
        )
    ),
]


def test_what_is_in_doubt_is_refused() -> None:
    for data in REFUSED:
        for parts in ([data], bytewise(data), [GET + data], [*bytewise(GET), data + NEXT]):
            assert refusal(*parts), parts


def refusal(*parts: bytes) -> str:
    """Return the message of the refusal; empty if there is none."""
    try:
        read(*parts)
    except InvalidHTTP as error:
        return error.message
    return ""


@pytest.mark.parametrize("method", [b"FOO", b"get", b"PROPFIND", b"X" * 300])
def test_methods_that_are_none_are_refused_by_name(method: bytes) -> None:
    with pytest.raises(MethodNotAllowed):
        read(method + b" / HTTP/1.1\r\nHost: a\r\n\r\n")


def test_what_came_before_is_given() -> None:
    framing = Framing(MOST)
    pieces = framing.pieces(GET + b"GET / HTTP/9.9\r\n\r\n")
    assert next(pieces) == GET
    with pytest.raises(InvalidHTTP):
        next(pieces)


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("start", "more", "end"),
    [
        (b"GET /", b"a", b" HTTP/1.1\r\nHost: a\r\n\r\n"),
        (GET[:-2] + b"X: ", b"x", b"\r\n\r\n"),
        (GET[:-2], b"X: y\r\n", b"\r\n"),
        (CHUNKED + b"1;", b"x", b"\r\n"),
        (CHUNKED + b"0\r\nX: ", b"x", b"\r\n\r\n"),
        (CHUNKED + b"0\r\n", b"X: y\r\n", b"\r\n"),
    ],
)
def test_a_head_has_an_end(start: bytes, more: bytes, end: bytes) -> None:
    long = start + more * (MOST // len(more) + 1)
    for parts in ([long], bytewise(long), [long + end]):
        with pytest.raises(HeadersTooLarge):
            read(*parts)


def test_hostile_bytes_cost_little() -> None:
    most = 10**6

    def read_fields(count: int) -> None:
        framing = Framing(most)
        for part in bytewise(GET[:-2] + b"X: y\r\n" * count):
            assert list(framing.pieces(part)) == []

    def read_chunks(count: int) -> None:
        framing = Framing(most)
        assert len(list(framing.pieces(CHUNKED + b"1\r\nx\r\n" * count))) == 3 * count + 1

    def read_spaces(count: int) -> None:
        framing = Framing(most)
        assert list(framing.pieces(GET[:-2] + b"X:" + b" " * count + b"y\r\n\r\n"))

    assert_linear(read_fields, 300)
    assert_linear(read_chunks, 1500)
    assert_linear(read_spaces, 30_000)
