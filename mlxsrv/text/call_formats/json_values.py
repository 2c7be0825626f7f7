"""Reads one JSON value while a model writes it."""

from __future__ import annotations

import re

# The longest text of a string that is as JSON has it, by the sign that ends the string.
_SOUND = {
    '"': re.compile(r'[^"\\\x00-\x1f]*(?:\\["\\/bfnrtu][^"\\\x00-\x1f]*)*'),
    "'": re.compile(r"""[^'"\\\x00-\x1f]*(?:\\["\\/bfnrtu][^'"\\\x00-\x1f]*)*"""),
}
_OUTSIDE = re.compile(r"""["'{}\[\],TFN]""")
_AFTER_SCALAR = re.compile(r"[\s,}]")
_AFTER_WORD = re.compile(r"[^A-Za-z]")
_NO_SPACE = re.compile(r"\S")

_ESCAPES = '"\\/bfnrtu'
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_AFTER_STRING = " \t\r\n,:}]"


class JsonValue:
    """Finds the end of a value that arrives in pieces, and writes its text as JSON.

    It only tells strings from brackets, and does not check that the rest is JSON. Some of what
    models write in place of JSON is clear, and given as JSON: strings in single quotes, line ends
    and wrong escapes in strings, `True`, `False` and `None`, and a comma before a closing bracket.

    Args:
        first: the value's first character, which is read again.
        out: its text as JSON is appended here.
        open: a value without quotes or brackets has no end.
        strict: line ends in a string refute it, and wrong escapes stay.

    Attributes:
        doubted: an end marker was found in this string; the doubt ends with the string.
        refuted: a string in doubt has a control character, which JSON does not allow: the string
            was never closed. Or it is strict.
        complete: the value has ended.
    """

    __slots__ = (
        "_apostrophe",
        "_comma",
        "_depth",
        "_escaped",
        "_open",
        "_out",
        "_quote",
        "_scalar",
        "_strict",
        "_word",
        "complete",
        "doubted",
        "first",
        "refuted",
    )

    def __init__(
        self, first: str, out: list[str], *, open: bool = False, strict: bool = False
    ) -> None:
        self.first = first
        self._out = out
        self._scalar = first not in "\"'{["
        self._open = open
        self._strict = strict
        self._depth = 0
        self._quote = ""  # the sign that ends the string that the text is in
        self._escaped = False  # a backslash was the last character
        self._apostrophe = False  # a single quote was, that may end the string
        self._comma = ""  # a comma and whitespace, which are dropped before a closing bracket
        self._word = ""
        self.doubted = False
        self.refuted = False
        self.complete = False

    @property
    def quoted(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._quote != ""

    def advance(self, text: str, at: int) -> int:
        """Read on from `at`; return the place after the value, or after a string in doubt."""
        if self._scalar:
            return self._read_scalar(text, at)
        size, doubted = len(text), self.doubted
        while at < size and not self.complete and not self.refuted:
            if self._quote:
                at = self._read_string(text, at)
                if doubted and not self.doubted:
                    break
            else:
                at = self._read_outside(text, at)
        return at

    def _read_scalar(self, text: str, at: int) -> int:
        found = None if self._open else _AFTER_SCALAR.search(text, at)
        end = found.start() if found else len(text)
        self._out.append(text[at:end])
        self.complete = found is not None
        return end

    def _read_string(self, text: str, at: int) -> int:
        """Read on in a string, up to the next sign in it; return the place behind."""
        if self._escaped:
            return self._escape(text, at)
        if self._apostrophe:
            return self._end_apostrophe(text, at)
        found = _SOUND[self._quote].match(text, at)
        end = at if found is None else found.end()
        if at < end:
            self._out.append(text[at:end])
        if end == len(text):
            return end
        sign = text[end]
        if sign == "\\":
            self._escaped = True
        elif sign == "'":
            self._apostrophe = True
        elif sign == '"':
            if self._quote == '"':
                self._end_string()
            else:
                self._out.append('\\"')
        elif self.doubted or self._strict:
            self.refuted = True
            return end
        else:
            self._out.append(_CONTROLS.get(sign) or f"\\u{ord(sign):04x}")
        return end + 1

    def _escape(self, text: str, at: int) -> int:
        self._escaped = False
        sign = text[at]
        if sign in _ESCAPES or self._strict:
            self._out.append("\\" + sign)
        elif sign == "'":
            self._out.append(sign)
        else:
            self._out.append("\\\\")
            return at
        return at + 1

    def _end_apostrophe(self, text: str, at: int) -> int:
        """Take a single quote for the end of the string if what follows could follow one."""
        self._apostrophe = False
        if text[at] in _AFTER_STRING:
            self._end_string()
        else:
            self._out.append("'")
        return at

    def _end_string(self) -> None:
        self._out.append('"')
        self._quote = ""
        self.doubted = False
        self.complete = self._depth == 0

    def _read_outside(self, text: str, at: int) -> int:
        """Read on outside strings, up to the next sign; return the place behind."""
        if self._word:
            return self._read_word(text, at)
        found = _OUTSIDE.search(text, at)
        end = found.start() if found else len(text)
        if at < end:
            self._append(text[at:end])
        if found is None:
            return end
        sign = found[0]
        if sign in "}]":
            self._out.append(self._comma[1:])
            self._comma = ""
            self._out.append(sign)
            self._depth -= 1
            self.complete = self._depth == 0
            return found.end()
        self._release_comma()
        if sign == ",":
            self._comma = sign
        elif sign in "{[":
            self._depth += 1
            self._out.append(sign)
        elif sign in "\"'":
            self._quote = sign
            self._out.append('"')
        else:
            self._word = sign
        return found.end()

    def _read_word(self, text: str, at: int) -> int:
        found = _AFTER_WORD.search(text, at)
        end = found.start() if found else len(text)
        self._word += text[at:end]
        if found is not None:
            self._out.append(_WORDS.get(self._word, self._word))
            self._word = ""
        return end

    def _append(self, text: str) -> None:
        if self._comma and _NO_SPACE.search(text) is None:
            self._comma += text
            return
        self._release_comma()
        self._out.append(text)

    def _release_comma(self) -> None:
        if self._comma:
            self._out.append(self._comma)
            self._comma = ""
