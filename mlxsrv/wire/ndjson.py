"""Newline-delimited JSON: one object a line. Texts are encoded as in `sse.py`."""

from __future__ import annotations

from collections.abc import Callable

from mlxsrv.wire.sse import encode_json, text_encoder

MEDIA_TYPE = "application/x-ndjson"


def line(value: object) -> bytes:
    """Return `value` as JSON on a line of its own."""
    return encode_json(value) + b"\n"


def text_lines(value: object) -> Callable[[str], bytes]:
    """Return an encoder of lines that differ only in one text.

    Args:
        value: a Struct or dict, with PLACEHOLDER in place of the text.

    Raises:
        ValueError: the value has no placeholder.
    """
    return text_encoder(line(value))
