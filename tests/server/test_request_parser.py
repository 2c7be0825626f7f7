"""Requests are read by RFC 9112: whole, byte by byte, and in turn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import HeadersTooLarge, InvalidHTTP
from mlxsrv.server.request_parser import RequestParser
from mlxsrv.web.security.headers import MOST_HEADER_BYTES
from tests.support.growth import assert_linear

GET = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: a\r\n"
NEXT = b"GET /next HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def read(*packets: bytes) -> list[str]:
    """The requests of these packets, each answered at once: their line, headers and body."""
    parser, found = RequestParser(), list[str]()
    for packet in packets:
        parser.receive_data(packet)
        while (event := parser.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            match event:
                case h11.Request():
                    fields = [b"%b: %b" % (name, bytes(value)) for name, value in event.headers]
                    line = b" ".join((event.method, event.target, event.http_version))
                    found.append(b"\n".join([line, *fields, b""]).decode("latin-1"))
                case h11.Data():
                    found[-1] += event.data.decode("latin-1")
                case h11.EndOfMessage():
                    parser.send(h11.Response(status_code=204, headers=[]))
                    parser.send(h11.EndOfMessage())
                    if parser.their_state is h11.MUST_CLOSE:
                        return found
                    parser.start_next_cycle()
    return found


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


FINE = {
    GET: "GET /health 1.1\nhost: a\n",
    b"\r\n\r\n" + GET: "GET /health 1.1\nhost: a\n",
    b"GET / HTTP/1.0\r\n\r\n": "GET / 1.0\n",
    b"OPTIONS * HTTP/1.1\r\nhost: [::1]:80\r\n\r\n": "OPTIONS * 1.1\nhost: [::1]:80\n",
    b"GET /a?b=c//d HTTP/1.1\r\nHOST:\t localhost:8000 \r\nX:\r\nY: \xe9\t\x80\r\n\r\n": (
        "GET /a?b=c//d 1.1\nhost: localhost:8000\nx: \ny: \xe9\t\x80\n"
    ),
    POST + b"Content-Length: 5\r\n\r\nhello": "POST / 1.1\nhost: a\ncontent-length: 5\nhello",
    POST + b"Content-Length: 5\r\nContent-Length: 5\r\n\r\nhello": (
        "POST / 1.1\nhost: a\ncontent-length: 5\nhello"
    ),
    POST + b"Content-Length: 16\r\n\r\n" + b"GET /\nnot: head\n": (
        "POST / 1.1\nhost: a\ncontent-length: 16\nGET /\nnot: head\n"
    ),
    CHUNKED.replace(b"ch", b"Ch") + b"5\r\nhello\r\n7\r\n\r\n0\r\n\r\n\r\n0\r\n\r\n": (
        "POST / 1.1\nhost: a\ntransfer-encoding: chunked\nhello\r\n0\r\n\r\n"
    ),
    # A URL is its path, and its host is Host.
    b"GET http://B:1/p?q HTTP/1.1\r\nA: b\r\nHost: a\r\nC: d\r\n\r\n": (
        "GET /p?q 1.1\nhost: B:1\na: b\nc: d\n"
    ),
    b"GET HTTPS://b?q HTTP/1.1\r\nHost: a\r\n\r\n": "GET /?q 1.1\nhost: b\n",
    # Upgrades are declined; trailers and extensions of chunks are dropped.
    b"GET / HTTP/1.1\r\nHost: a\r\nUPGRADE: h2c\r\nConnection: Upgrade\r\n\r\n": (
        "GET / 1.1\nhost: a\nconnection: Upgrade\n"
    ),
    CHUNKED + b'00A;x="y"\r\n0123456789\r\n0;z\r\nAuthorization: Bearer x\r\n\r\n': (
        "POST / 1.1\nhost: a\ntransfer-encoding: chunked\n0123456789"
    ),
}


@pytest.mark.parametrize("data", FINE)
def test_what_is_clear_is_read(data: bytes) -> None:
    then = [] if b"HTTP/1.0" in data else ["GET /next 1.1\nhost: a\n"]
    for packets in ([data + NEXT], bytewise(data + NEXT)):
        assert read(*packets) == [FINE[data], *then]


@pytest.mark.parametrize("connection", [b"close", b"x, Close ,y"])
def test_nothing_is_read_after_the_last_request(connection: bytes) -> None:
    last = POST + b"Connection: " + connection + b"\r\nContent-Length: 2\r\n\r\nab"
    for rest in (NEXT, b"\x00garbage"):
        assert len(read(last + rest)) == len(read(*bytewise(last + rest))) == 1


@given(data=st.sampled_from([*FINE]), cuts=st.lists(st.integers(0, 400)))
def test_packets_are_cut_anywhere(data: bytes, cuts: Sequence[int]) -> None:
    data += NEXT
    ends = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    assert read(*[data[start:end] for start, end in pairwise(ends)]) == read(data)


# What is refused.

REFUSED = [
    b"GET / HTTP/1.1\r\n\r\n",  # no Host
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.0\r\nHost: a\r\nhost: b\r\n\r\n",
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
            b"Content-Length: 5\r\nContent-Length: 0",
            b"Content-Length: 5, 6",
            b"Content-Length: +5",
            b"Content-Length: -0",
            b"Content-Length: 0x5",
            b"Content-Length: 5 5",
            b"Content-Length:",
            b"Content-Length: 999999999999999999999",
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
            b"5\nhello\r\n",
            b" 5\r\nhello\r\n",
            b"-5\r\n",
            b"0x5\r\nhello\r\n",
            b"111111111111111111111\r\n",
            b"5\r\nhello!",
            b"5\r\nhello\n\r",
            b"5\r\nhello\rx",
            b"5;a\nb\r\nhello\r\n",
            b"0\r\nA : b\r\n\r\n",
            b"0\r\nA: b\n\n",
            b"0\r\nA: b\nC: d\r\n\r\n",
            b"0\r\nA: b\r\n c\r\n\r\n",
            b"0\r\n\n",
        )
    ),
]


def test_what_is_in_doubt_is_refused() -> None:
    for data in REFUSED:
        for packets in ([data], bytewise(data), [GET + data], [*bytewise(GET), data + NEXT]):
            with pytest.raises(InvalidHTTP):
                print(packets, read(*packets))


def test_what_came_before_is_given() -> None:
    parser = RequestParser()
    parser.receive_data(GET + b"GET / HTTP/9.9\r\n\r\n")
    assert isinstance(parser.next_event(), h11.Request)
    assert isinstance(parser.next_event(), h11.EndOfMessage)
    assert parser.next_event() is h11.PAUSED
    parser.send(h11.Response(status_code=204, headers=[]))
    parser.send(h11.EndOfMessage())
    parser.start_next_cycle()
    with pytest.raises(InvalidHTTP):
        parser.next_event()


@pytest.mark.parametrize(
    ("start", "more"),
    [
        (b"GET /", b"a"),
        (GET[:-2] + b"X: ", b"x"),
        (GET[:-2], b"X: y\r\n"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"0\r\nX: ", b"x"),
        (CHUNKED + b"0\r\n", b"X: y\r\n"),
    ],
)
def test_a_head_has_an_end(start: bytes, more: bytes) -> None:
    long = start + more * (MOST_HEADER_BYTES // len(more) + 1)
    for packets in ([long], [long[i : i + 999] for i in range(0, len(long), 999)]):
        with pytest.raises(HeadersTooLarge):
            read(*packets)


@pytest.mark.parametrize("start", [GET[:-2], CHUNKED + b"0\r\n"])
def test_what_arrives_whole_has_the_same_end(start: bytes) -> None:
    with pytest.raises(HeadersTooLarge):
        read(start + b"X: " + b"x" * MOST_HEADER_BYTES + b"\r\n\r\n")


def test_hostile_bytes_cost_little() -> None:
    def read_fields(count: int) -> None:
        assert read(*bytewise(GET[:-2] + b"X: y\r\n" * count)) == []

    def read_chunks(count: int) -> None:
        assert len(read(CHUNKED + b"1\r\nx\r\n" * count)) == 1

    def read_spaces(count: int) -> None:
        assert len(read(GET[:-2] + b"X:" + b" " * count + b"y\r\n\r\n")) == 1

    assert_linear(read_fields, 300)
    assert_linear(read_chunks, 1500)
    assert_linear(read_spaces, 4_000)
