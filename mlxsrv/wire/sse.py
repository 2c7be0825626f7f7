"""Server-sent events, encoded by hand.

All chunks of a stream that carry text are alike but for the text. So a chunk is encoded once per
stream with a placeholder, cut there, and each token then costs only its own JSON string between
halves that are ready: `benchmarks/sse.py` says what that saves.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

DONE = b"data: [DONE]\n\n"
KEEPALIVE = b": keep-alive\n\n"

PLACEHOLDER = "\x00text\x00"
"""Where a chunk's text goes. No text that reaches a client holds a NUL as it stands in JSON."""

_encode = msgspec.json.Encoder().encode
_PLACEHOLDER_JSON = _encode(PLACEHOLDER)

# JSON lets these stand as they are, but clients that cut a stream with str.splitlines() (httpx's
# iter_lines among them) would break a frame there.
_LINE_BREAKS = (
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
    (b"\xc2\x85", b"\\u0085"),
)


def encode_json(value: object) -> bytes:
    """`value` as one line of JSON by anybody's idea of a line. UTF-8, else nothing escaped."""
    data = _encode(value)
    if data.isascii():
        return data
    for raw, escaped in _LINE_BREAKS:
        if raw in data:
            data = data.replace(raw, escaped)
    return data


def frame(value: object) -> bytes:
    """One event that carries `value` as JSON."""
    return b"data: " + encode_json(value) + b"\n\n"


def text_frames(chunk: object) -> Callable[[str], bytes]:
    """An encoder of frames that differ in one text only.

    A closure, since it runs once per token: finding a method and its attributes would cost as much
    again as encoding does.

    Args:
        chunk: the chunk as a Struct or dict, with PLACEHOLDER wherever the text goes.
    """
    around = tuple(frame(chunk).split(_PLACEHOLDER_JSON))
    if len(around) == 1:
        raise ValueError("the chunk has no placeholder")
    encode = _encode

    def encode_frame(text: str) -> bytes:
        return (encode(text) if text.isascii() else encode_json(text)).join(around)

    return encode_frame
