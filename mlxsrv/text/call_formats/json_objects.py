"""Reads a tool call in JSON while the model writes it."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec

from mlxsrv.text.call_formats.json_values import JsonValue

_Role = Literal["key", "name", "arguments", "call", "other"]
_Step = Literal["open", "key", "colon", "value"]
_T = TypeVar("_T")

_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")
_OTHER_KEYS = ("type", "id", "tool_call_id")

# Patterns for what to look for next, by state.
_NO_SPACE = re.compile(r"\S")
_NO_COMMA = re.compile(r"[^\s,]")


class JsonCall:
    """Reads one call: `{"name": ..., "arguments": {...}}`, with keys in any order.

    It accepts more than JSON where the meaning is clear: commas may be missing, other keys may have
    any value, "parameters" are arguments, and the call may be the value of "function". The first of
    two equal keys counts.

    Args:
        name: the tool's name, if it is known; then the text has only the arguments.
        single: `{"f": {...}}` is a call of `f`.
        wary: an object is no call if it has a key that calls do not have, before its name.

    Attributes:
        name: the tool's name, once it is complete.
        settled: the arguments are complete.
        over: the object has ended, or the text is no object. A text that cannot be a call, for
            example because its arguments are no object, is over without a name.
    """

    def __init__(
        self, name: str | None = None, *, single: bool = False, wary: bool = False
    ) -> None:
        self._single = single
        self._wary = wary
        self._only_arguments = name is not None
        self._step: _Step = "open" if name is None else "value"
        self._role: _Role = "key" if name is None else "arguments"  # of the value now or next
        self._value: JsonValue | None = None
        self._held: list[str] = []  # a value that is used once it is complete
        self._unsent: list[str] = []  # text of the arguments that was not taken
        self._begun = False  # whether the arguments have begun
        self._inner = False  # inside the value of "function"
        self.name = name
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
            doubted = value.doubted
            at = value.advance(text, at)
            if value.complete:
                self._finish(value)
            elif value.refuted:
                self.over = True
            if doubted and not value.doubted:
                break
        return at

    def pop_arguments(self) -> str:
        """Return the text of the arguments since the last call of this method."""
        if not self._unsent or self.doubted:
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
                self.over = not self._inner
                self._inner = False
            case "colon", ":" | "=":
                self._step = "value"
            case "value", "{" if self._role == "call":
                self._inner = True
                self._step = "key"
            case ("key", '"' | "'") | ("value", _):
                if self._step == "key":
                    self._role = "key"
                elif self._role == "call":  # {"type": "function", "function": "f", ...}
                    self._role = "name" if self.name is None else "other"
                self._value = self._begin_value(found[0])
                self._begun = self._begun or self._role == "arguments"
                return found.start()
            case _:
                self.over = True
                return found.start()
        return found.end()

    def _begin_value(self, first: str) -> JsonValue:
        """Begin a value, whose text goes where its role has it."""
        out: list[str] = []
        if self._role == "arguments" and first == "{":
            out = self._unsent
        elif self._role != "other":
            out = self._held
        named = self._role in ("key", "name")
        return JsonValue(first, out, open=self._only_arguments, strict=named)

    def _finish(self, value: JsonValue) -> None:
        self._value = None
        self._step = "key"
        match self._role:
            case "key":
                self._step = "colon"
                key = _decoded(self._release(), str)
                if key == "name=" and self.name is None:
                    self._begin_name()
                else:
                    self._role = self._role_of(key)
            case "name":
                name = _decoded(self._release(), str)
                # Arguments before the name have not been sent, so they can be checked as a whole.
                sound = not self.settled or _decoded("".join(self._unsent), dict) is not None
                self.name = name if name and sound else None
                self.over = self.name is None
            case "arguments" if value.first == "{":
                self.settled = True
                self.over = self._only_arguments
            case "arguments":
                self._settle()
                self.over = self._only_arguments

    def _role_of(self, key: str | None) -> _Role:
        self.over = key is None
        if key in _NAME_KEYS and self.name is None:
            return "name"
        if key in _ARGUMENTS_KEYS and not self._begun:
            return "arguments"
        if key == "function" and not self._inner:
            return "call"
        if self._single and key and self.name is None and not self._begun:
            self.name = key
            return "arguments"
        if self._wary and self.name is None and key not in _OTHER_KEYS:
            self.over = True
        return "other"

    def _begin_name(self) -> None:
        """Take the end of a key for the beginning of its value, as in `{"name="f"`."""
        self._role = "name"
        self._value = self._begin_value('"')
        self._value.advance('"', 0)

    def _settle(self) -> None:
        """Give the held arguments: the object inside a string, or the text as written."""
        text = self._release().rstrip() or "null"
        with suppress(ValueError, RecursionError):
            inner = msgspec.json.decode(text)
            text = as_object(_repaired(inner) if isinstance(inner, str) else inner)
        self._unsent.append(text)
        self.settled = True

    def _release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text


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


def _repaired(text: str) -> str:
    """Return a text with the JSON that is meant, if it is an object."""
    text = text.strip()
    out: list[str] = []
    whole = text.startswith("{") and JsonValue("{", out).advance(text, 0) == len(text)
    return "".join(out) if whole else text


def _decoded(text: str, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (ValueError, RecursionError):
        return None
