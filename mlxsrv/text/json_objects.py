"""Reads a tool call in JSON while the model writes it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec

_Role = Literal["key", "name", "arguments", "other"]
_Step = Literal["open", "key", "colon", "value"]
_T = TypeVar("_T")

_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")

# Patterns for what to look for next, by state.
_NO_SPACE = re.compile(r"\S")
_NO_COMMA = re.compile(r"[^\s,]")
_IN_STRING = re.compile(r'["\\]')
_IN_DOUBT = re.compile(r'["\\\x00-\x1f]')
_IN_BRACKETS = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,}]")


class JsonCall:
    """Reads one call: `{"name": ..., "arguments": {...}}`, with keys in any order.

    It accepts more than JSON where the meaning is clear: commas may be missing, other keys may have
    any value, and "parameters" are arguments. The first of two equal keys counts.

    Args:
        single: `{"f": {...}}` is a call of `f`.

    Attributes:
        name: the tool's name, once it is complete.
        settled: the arguments are complete.
        over: the object has ended, or the text is no object. A text that cannot be a call, for
            example because its arguments are no object, is over without a name.
    """

    def __init__(self, *, single: bool = False) -> None:
        self._single = single
        self._step: _Step = "open"
        self._role: _Role = "key"  # of the value that is read now or next
        self._value: _Value | None = None
        self._held: list[str] = []  # a value that is used once it is complete
        self._unsent: list[str] = []  # text of the arguments that was not taken
        self._begun = False  # whether the arguments have begun
        self.name: str | None = None
        self.settled = False
        self.over = False

    @property
    def quoted(self) -> bool:
        """Whether the text so far ends inside a string."""
        return self._value is not None and self._value.quoted

    @property
    def doubted(self) -> bool:
        """Whether the text so far ends inside a string with an end marker in it."""
        return self._value is not None and self._value.doubted

    def doubt(self) -> None:
        """Give nothing until the string ends. If its line ends before, the call is over."""
        if self._value is not None:
            self._value.doubted = True

    def parse(self, text: str) -> int:
        """Read up to the end of the call, or of a string in doubt; return the place in `text`."""
        at = 0
        while at < len(text) and not self.over:
            value = self._value
            if value is None:
                at = self._begin(text, at)
                continue
            start, doubted = at, value.doubted
            at = value.advance(text, at)
            self._keep(text[start:at])
            if value.complete:
                self._finish(value)
            elif value.refuted:
                self.over = True
            if doubted and not value.doubted:
                break
        return at

    def pop_arguments(self) -> str:
        """Return the text of the arguments since the last call of this method."""
        if self.doubted:
            return ""
        text = "".join(self._unsent)
        self._unsent.clear()
        return text

    def pop_rest(self) -> str:
        """Return the rest of the arguments of a call that is over."""
        if not self._begun:
            return "{}"
        if self._held and self._role == "arguments":
            self._settle()
        return self.pop_arguments()

    def _begin(self, text: str, at: int) -> int:
        """Skip whitespace and one sign, or begin a value there; return the place after."""
        found = (_NO_COMMA if self._step == "key" else _NO_SPACE).search(text, at)
        if found is None:
            return len(text)
        match self._step, found[0]:
            case "open", "{":
                self._step = "key"
            case "key", "}":
                self.over = True
            case "colon", ":":
                self._step = "value"
            case ("key", '"') | ("value", _):
                if self._step == "key":
                    self._role = "key"
                self._value = _Value(found[0])
                self._begun = self._begun or self._role == "arguments"
                return found.start()
            case _:
                self.over = True
                return found.start()
        return found.end()

    def _keep(self, text: str) -> None:
        if self._role == "arguments" and self._value is not None and self._value.first == "{":
            self._unsent.append(text)
        elif self._role != "other":
            self._held.append(text)

    def _finish(self, value: _Value) -> None:
        self._value = None
        self._step = "key"
        match self._role:
            case "key":
                self._step = "colon"
                self._role = self._role_of(_decoded(self._release(), str))
            case "name":
                name = _decoded(self._release(), str)
                # Arguments before the name have not been sent, so they can be checked as a whole.
                sound = not self.settled or _decoded("".join(self._unsent), dict) is not None
                self.name = name if name and sound else None
                self.over = self.name is None
            case "arguments" if value.first == "{":
                self.settled = True
            case "arguments":
                self._settle()

    def _role_of(self, key: str | None) -> _Role:
        self.over = key is None
        if key in _NAME_KEYS and self.name is None:
            return "name"
        if key in _ARGUMENTS_KEYS and not self._begun:
            return "arguments"
        if self._single and key and self.name is None and not self._begun:
            self.name = key
            return "arguments"
        return "other"

    def _settle(self) -> None:
        """Give the held arguments: the object inside a string, or the text as written."""
        text = self._release() or "null"
        with suppress(ValueError, RecursionError):
            text = as_object(msgspec.json.decode(text))
        self._unsent.append(text)
        self.settled = True

    def _release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text


class _Value:
    """Finds the end of a JSON value that arrives in pieces.

    It only distinguishes strings from brackets, and does not check that the rest is JSON.

    Attributes:
        first: the value's first character.
        quoted: the text so far ends inside a string.
        doubted: an end marker was found in this string; the doubt ends with the string.
        refuted: a string in doubt has a control character, which JSON does not allow: the string
            was never closed.
        complete: the value has ended.
    """

    __slots__ = ("_depth", "_escaped", "complete", "doubted", "first", "quoted", "refuted")

    def __init__(self, first: str) -> None:
        self.first = first
        self._depth = 0
        self._escaped = False
        self.quoted = False
        self.doubted = False
        self.refuted = False
        self.complete = False

    def advance(self, text: str, at: int) -> int:
        """Read on from `at`; return the place after the value, or after a string in doubt."""
        if self.first not in '"{[':
            end = _AFTER_SCALAR.search(text, at)
            self.complete = end is not None
            return end.start() if end else len(text)
        while at < len(text) and not self.complete:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = self._signs().search(text, at)
            if found is None:
                return len(text)
            if self.quoted and found[0] not in '"\\':
                self.refuted = True
                return found.start()
            at = found.end()
            doubted = self.doubted
            self._cross(found[0])
            if doubted and not self.doubted:
                break
        return at

    def _signs(self) -> re.Pattern[str]:
        if not self.quoted:
            return _IN_BRACKETS
        return _IN_DOUBT if self.doubted else _IN_STRING

    def _cross(self, sign: str) -> None:
        if sign == "\\":
            self._escaped = True
        elif sign == '"':
            self.quoted = not self.quoted
            self.doubted = False
        else:
            self._depth += 1 if sign in "{[" else -1
        self.complete = not self.quoted and self._depth == 0


def as_object(arguments: Any) -> str:
    """Return arguments, or a text of them, as a JSON object.

    Numbers that JSON lacks, such as infinity, become null.

    Raises:
        ValueError: they are no object.
    """
    if arguments is None:
        return "{}"
    if isinstance(arguments, str):
        text = arguments.strip() or "{}"
        msgspec.json.decode(text, type=dict)
        return text
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    return msgspec.json.encode(arguments).decode()


def _decoded(text: str, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError):
        return None
