"""The free text that a model gives a custom tool, read out of the call's arguments.

The model writes `{"input": "..."}`. The text is given out while it is written, without its JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

_OPENING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAYBE_OPENING = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?', re.DOTALL)
_COMPLETE = re.compile(r'(?:[^"\\]|\\(?:[^u]|u[0-9a-fA-F]{4}))*', re.DOTALL)
"""Characters and escapes that are complete, up to the end of the string."""

_decode = msgspec.json.Decoder(dict[str, Any] | str).decode


class CustomInput:
    """Reads the text of one call."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._waiting = ""  # was not given out yet
        self._half = ""  # the first half of a character that JSON writes as two escapes
        self._inside = False  # the text has begun
        self._closed = False
        self._other = False  # the arguments begin with something else

    def feed(self, arguments: str) -> str:
        """Return the text that is certain."""
        self._raw.append(arguments)
        if self._closed or self._other:
            return ""
        self._waiting += arguments
        if not self._inside and not self._enter():
            return ""
        complete = _COMPLETE.match(self._waiting)
        assert complete is not None  # it matches the empty text
        self._waiting = self._waiting[complete.end() :]
        self._closed = self._waiting.startswith('"')
        return self._unescape(complete[0])

    def _enter(self) -> bool:
        opening = _OPENING.match(self._waiting)
        if opening is not None:
            self._waiting = self._waiting[opening.end() :]
            self._inside = True
        elif _MAYBE_OPENING.fullmatch(self._waiting) is None:
            self._other = True
        return self._inside

    def _unescape(self, text: str) -> str:
        if "\\" in text:
            try:  # not strict: models write line ends as they are
                text = json.loads(f'"{text}"', strict=False)
            except ValueError:  # an escape that JSON does not have
                return self._half + text
        text = self._half + text
        split = not self._closed and "\ud800" <= text[-1:] <= "\udbff"
        self._half = text[-1:] if split else ""
        whole = text[:-1] if split else text
        return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def finish(self) -> tuple[str, bool]:
        """Return the rest of the text, and whether the arguments are complete.

        Arguments of another form are given out now: the only text in them, or all as it is.
        """
        arguments = "".join(self._raw)
        if self._inside:
            return "", self._closed
        try:
            given = _decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return arguments, False
        if isinstance(given, str):
            return given, True
        texts = [value for value in given.values() if isinstance(value, str)]
        text = given.get("input", texts[0] if len(texts) == 1 else None)
        return (text, True) if isinstance(text, str) else (arguments, False)
