"""Text of literals: keys, numbers, words, escapes, and where a value may end."""

from __future__ import annotations

import json
import re

from mlxsrv.text.call_formats.values import Argument, ArgumentTypes

KEY = r"[^\s:=,(){}\[\]\"'<>\ufdd0-\ufdef]{1,256}"
KEY_END = re.compile(rf"({KEY})\s{{0,64}}([:=])")

_KEY_BEGUN = re.compile(rf"(?:{KEY})?\s{{0,64}}$")
_NEXT_KEY = re.compile(rf"\s{{0,64}}(?:{KEY}\s{{0,64}}[:=]|[)\]}}]|[\"'\ufdd0-\ufdef])")
_NEXT_KEY_BEGUN = re.compile(rf"\s{{0,64}}(?:{KEY})?\s{{0,64}}$")
_SPACES = re.compile(r"\s{0,256}")
_WORD = re.compile(r"[-+\w.]*\s*")
_ZEROS = re.compile(r"^([-+]?)0+(?=[0-9])")
_WORDS = {"true": "true", "false": "false", "True": "true", "False": "false"}
_NULLS = ("null", "None")
_NUMBER = ArgumentTypes({}).typed({"type": "number"})
_ANY = ArgumentTypes({}).argument("")

_ESCAPES = {
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "\n": "",
}
_ESCAPED = re.compile(
    r"\\(u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)",
    re.DOTALL,
)
_SIZES = {"x": 4, "u": 6, "U": 10, **dict.fromkeys("01234567", 4)}
_BEGUN = re.compile(
    r"\\(?:x[0-9a-fA-F]{0,2}|u[0-9a-fA-F]{0,4}|U[0-9a-fA-F]{0,8}|[0-7]{1,3}|.)", re.DOTALL
)
_HIGH = re.compile(r"\\u[dD][89abAB]")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


def unescape(text: str, *, slashes: bool = False) -> str:
    """Return a text with its escapes read, as Python has them.

    Args:
        slashes: an escaped slash is a slash, as in JSON.
    """
    if "\\" not in text:
        return text

    def read(found: re.Match[str]) -> str:
        code = found[1]
        if code == "/" and slashes:
            return "/"
        if len(code) == 1 and code not in "01234567":
            return _ESCAPES.get(code, found[0])
        if len(code) == 11:
            return json.loads(f'"{found[0]}"')  # type: ignore[no-any-return]
        number = int(code, 8) if code[0] in "01234567" else int(code[1:], 16)
        fits = number < 0x110000 and not 0xD800 <= number < 0xE000
        return chr(number) if fits else "\ufffd"

    return _ESCAPED.sub(read, text)


class Scalars:
    """Numbers and words."""

    @staticmethod
    def word(text: str) -> int:
        """Return how much at the front of a text may be a number or a word, with what is behind."""
        found = _WORD.match(text)
        return found.end() if found else 0

    @staticmethod
    def read(body: str, type: Argument) -> str | None:
        """Return JSON of a number, a boolean or null as its schema takes it, or None."""
        if body in _NULLS:
            return "null"
        literal = _WORDS.get(body) or _NUMBER.json(_ZEROS.sub(r"\1", body))
        if literal[0] == '"':
            return None
        if type.kind == "other" or type.types == _ANY.types:
            return literal
        return type.json(body)


class Lookahead:
    """Tells from what follows whether a value ends.

    Args:
        end: the marker behind a block, as it is shown; empty if there is none.
    """

    def __init__(self, end: str) -> None:
        self._end = end

    @staticmethod
    def key_begun(text: str) -> bool:
        """Whether a text may become a key."""
        return _KEY_BEGUN.match(text) is not None

    @staticmethod
    def escape(text: str, start: int) -> int:
        """Return the size of the escape at `start`, which may reach behind the text."""
        if start + 1 == len(text):
            return 2
        whole = _SIZES.get(text[start + 1], 2)
        begun = _BEGUN.match(text, start)
        end = begun.end() if begun else start + 2
        if end - start < whole:
            if end == len(text):
                return whole
            return end - start if text[start + 1] in "01234567" else 2
        if whole == 6 and _HIGH.match(text, start) and text[end : end + 2] in ("", "\\", "\\u"):
            return 12 if len(text) < start + 12 or _PAIR.match(text, start) else 6
        return end - start

    def value_ends(
        self, text: str, at: int, *, free: bool, outer: bool, final: bool
    ) -> bool | None:
        """Whether a value ends at `at`; None while that is not certain.

        Args:
            free: a value follows a comma, without a key.
            outer: it is an argument of the call.
            final: nothing follows the text.
        """
        at = self._skip(text, at)
        if at == len(text):
            return True if final else None
        sign = text[at]
        if sign in ")]}":
            return self._call_ends(text, at + 1, final=final) if outer else True
        if sign == ",":
            if free or _NEXT_KEY.match(text, at + 1):
                return True
            begun = _NEXT_KEY_BEGUN.match(text, at + 1)
            return None if begun and not final else False
        if not outer and sign == ":":
            return True
        return self._is_end(text, at, final=final)

    def _call_ends(self, text: str, at: int, *, final: bool) -> bool | None:
        """Whether a call may end at `at`, behind a closing bracket."""
        behind = self._skip(text, at)
        if behind == len(text):
            return True if final or "\n" in text[at:] else None
        if "\n" in text[at:behind] or text[behind] in ",;)]}":
            return True
        return self._is_end(text, behind, final=final)

    def _is_end(self, text: str, at: int, *, final: bool) -> bool | None:
        if "\ufdd0" <= text[at] <= "\ufdef":
            return True
        if not self._end:
            return False
        if text.startswith(self._end, at):
            return True
        begun = self._end.startswith(text[at:])
        return None if begun and not final else False

    @staticmethod
    def _skip(text: str, at: int) -> int:
        found = _SPACES.match(text, at)
        return found.end() if found else at
