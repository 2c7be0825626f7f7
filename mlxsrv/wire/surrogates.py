"""Halves of surrogate pairs in JSON, which are no characters."""

from __future__ import annotations

import re

_HALF = rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
# Possessive, so that a body of 30 MB is gone through once. A backslash takes what is escaped along.
_SOUND = re.compile(rb"(?:[^\\]++|" + _PAIR + rb"|(?!" + _HALF + rb")\\.)*+", re.DOTALL)
_BROKEN = re.compile(_HALF)


def mend_surrogates(body: bytes) -> bytes:
    """Return JSON with U+FFFD in place of each half of a surrogate pair.

    A program that cuts text in the middle of a character escapes one half of it. In a client's
    history it would come back with each request.
    """
    parts: list[bytes] = []
    at = 0
    while at < len(body):
        sound = _SOUND.match(body, at)
        assert sound is not None  # the pattern matches nothing, too
        half = _BROKEN.match(body, sound.end())
        parts += [sound[0], b"\\ufffd" if half else body[sound.end() :]]
        at = half.end() if half else len(body)
    return b"".join(parts)
