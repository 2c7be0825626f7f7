"""Halves of surrogate pairs in JSON, which are no characters."""

from __future__ import annotations

import re

_HALF = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# A sound part, and the half behind it. Possessive, so that a body of 30 MB is gone through once. A
# backslash takes what is escaped along.
_PART = re.compile(
    rb"((?:[^\\]++|" + _PAIR + rb"|(?!" + _HALF + rb")\\.)*+)(" + _HALF + rb")?", re.DOTALL
)


def mend_surrogates(body: bytes) -> bytes:
    """Return JSON with U+FFFD in place of each half of a surrogate pair.

    A program that cuts text in the middle of a character escapes one half of it. In a client's
    history it would come back with each request.
    """
    return _PART.sub(lambda part: part[1] + b"\\ufffd" if part[2] else part[1], body)
