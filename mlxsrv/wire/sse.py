"""Server-sent events, encoded by hand.

All text chunks of a stream differ only in their text. So a chunk is encoded once a stream, with a
placeholder, and split there. Each token then costs only its own JSON string between the two halves:
`benchmarks/sse.py` measures what that saves.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, count

import msgspec

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"

PLACEHOLDER = "\x00text\x00"
"""Stands for the text of a chunk. JSON escapes NUL, so no other part of a chunk looks like it."""

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER_JSON = _encode(PLACEHOLDER)

# JSON does not escape these, but clients that split a stream with str.splitlines(), such as httpx's
# iter_lines, would break a frame there.
_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def encode_json(value: object) -> bytes:
    """`value` as JSON in UTF-8, without any character that some client takes for a line break."""
    data = _encode(value)
    if data.isascii():
        return data
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def frame(value: object) -> bytes:
    """One event with `value` as JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


def named_frame(event: str, value: object) -> bytes:
    """One event of this name with `value` as JSON."""
    return b"event: " + event.encode() + b"\n" + frame(value)


def text_frames(chunk: object) -> Callable[[str], bytes]:
    """Return an encoder of frames that differ only in one text.

    Args:
        chunk: a Struct or dict, with PLACEHOLDER in place of the text.

    Raises:
        ValueError: the chunk has no placeholder.
    """
    return text_encoder(frame(chunk))


def text_encoder(template: bytes) -> Callable[[str], bytes]:
    """Return what puts a text, as JSON, in the place of a template's placeholder.

    It is a closure because it runs once a token: looking up a method and its attributes would cost
    as much again as the encoding.

    Raises:
        ValueError: the template has no placeholder.
    """
    around = tuple(template.split(_PLACEHOLDER_JSON))
    if len(around) == 1:
        raise ValueError("the chunk has no placeholder")
    encode = _encode

    def encode_text(text: str) -> bytes:
        return (encode(text) if text.isascii() else encode_json(text)).join(around)

    return encode_text


_FIRST_NUMBERS = tuple(map(_encode, range(1000)))


class EventNumbers:
    """Counts the events of a stream, from 0."""

    def __init__(self) -> None:
        # It runs once a token: most streams need only numbers that are there.
        self.next_json = chain(_FIRST_NUMBERS, map(_encode, count(len(_FIRST_NUMBERS)))).__next__

    def next(self) -> int:
        return int(self.next_json())


def numbered_frames(
    name: str, event: object, field: str, numbers: EventNumbers, texts: list[str]
) -> Callable[[str], bytes]:
    """Return an encoder of named frames that differ in one text and in a number.

    Args:
        event: a Struct or dict, with PLACEHOLDER in place of the text, and -1 as the number.
        field: the name of the number's field, which stands before the text.
        texts: each text that is encoded is appended.
    """
    head, mark, rest = named_frame(name, event).partition(b'"%s":-1' % field.encode())
    between, tail = rest.split(_PLACEHOLDER_JSON)
    head += mark.removesuffix(b"-1")
    encode, number, note = _encode, numbers.next_json, texts.append

    def encode_frame(text: str) -> bytes:
        note(text)
        json = encode(text) if text.isascii() else encode_json(text)
        return b"".join((head, number(), between, json, tail))

    return encode_frame
