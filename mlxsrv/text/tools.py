"""Separates the tools that a model calls from what it says.

Families of models write calls in dialects of their own, each between markers. Where the call is
JSON, as most have it, it is sent while it is written: its name as soon as that is complete, then
its arguments as they come. Other dialects are read by a parser once the call is over.

A call that is not what it should be:

- As long as nothing of it was sent, the parser decides. What the parser cannot read, or gives no
  name for, was no call: its text, markers and the whitespace before them included, is content.
- Once its name was sent it is a call, with the arguments as the model wrote them. A client must
  expect arguments that are no JSON, as it must of OpenAI's: they are not mended here, since a
  command or a path that was cut and then closed looks right and does something else. Arguments
  that never began are `{}`.
- What a cut answer left incomplete is not sent; of what was sent, `broken` tells.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, TypeVar

import msgspec

from mlxsrv.text.scan import Scanner


class Dialect(msgspec.Struct, frozen=True):
    """How a family of models calls tools.

    `start` and `end` stand around a call; without an `end` (None or empty) it goes on to the end of
    the answer. `parse` makes of the text between them a dict with "name" and "arguments", or a list
    of such, and may raise anything. With `json` the text is one JSON object as a rule, and streamed
    if it is; where it is not, `parse` has it.
    """

    start: str
    end: str | None
    parse: Callable[[str], Any]
    json: bool = False


class ToolOpened(msgspec.Struct, frozen=True):
    """The model calls the tool `name`: the answer's call number `index`, from 0."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, which together are a JSON object as text. Never empty."""

    index: int
    text: str


Part = str | ToolOpened | ToolArguments
"""What comes out: content, or something of a call."""

_Role = Literal["key", "name", "arguments", "other"]
_Step = Literal["open", "key", "colon", "value"]
_T = TypeVar("_T")

_ALPHANUMERICS = string.ascii_letters + string.digits

# What is dropped after a call; after one in JSON also brackets too many, as small models write.
_SPACE = string.whitespace
_LEFTOVERS = _SPACE + "}]"

# What the JSON reader looks for next.
_NO_SPACE = re.compile(r"\S")
_NO_COMMA = re.compile(r"[^\s,]")
_IN_STRING = re.compile(r'["\\]')
_IN_DOUBT = re.compile(r'["\\\x00-\x1f]')
_IN_BRACKETS = re.compile(r'["{}\[\]]')
_AFTER_SCALAR = re.compile(r"[\s,}]")


class ToolCalls:
    """Cuts content at the markers around calls, which never come out, not even in part.

    - Whitespace before a call, between calls and after the last is dropped. It waits where a call
      may follow, and comes out as it is where none does.
    - An end marker outside a call is dropped.
    - In a call in JSON an end marker within a string belongs to the string if that closes before
      its line ends. If it does not, the model forgot to close it and the marker ended the call.
    - Without `parallel` nothing comes out after the first call.
    - An answer that is `bound` by a grammar begins with a call or has none: what looks like a
      marker in it, the grammar asked for.

    `inside` tells whether the text fed so far ends inside a call. `calls` counts those opened, and
    `opened` tells whether the last of them is still being written. `done` tells that the one call
    of an answer without `parallel` is over, so that no more need be generated. `broken` tells,
    after a flush, that the last call was cut off.
    """

    def __init__(self, dialect: Dialect, *, parallel: bool = True, bound: bool = False) -> None:
        ends = [dialect.end] if dialect.end else []
        self._dialect = dialect
        self._parallel = parallel
        self._undecided = bound  # whether it begins with a call
        self._markers = Scanner([dialect.start, *ends])
        self._ends = Scanner(ends)
        self._held = ""  # may be the beginning of a marker
        self._space: list[str] = []  # whitespace that is dropped if a call follows
        self._after = ""  # characters that are dropped because a call went before
        self.inside = False
        self._json: _JsonCall | None = None  # the call inside, if it may be streamed
        self._raw: list[str] = []  # text of the call that may have to be read once more
        self.calls = 0
        self.opened = False
        self.broken = False

    @property
    def done(self) -> bool:
        return not self._parallel and self.calls > 0 and not self.opened

    def feed(self, text: str) -> list[Part]:
        """The parts that are settled, in order."""
        if not text:
            return []
        if self._undecided:
            text = self._held + text
            start = self._dialect.start
            if len(text) < len(start) and start.startswith(text):
                self._held = text
                return []
            self._held = ""
            self._undecided = False
            if not text.startswith(start):
                self._markers = Scanner([])
        waiting = self._held or self._space or self._after or self.inside
        if not waiting and not self._markers.start(text) and not text[-1].isspace():
            return [text]
        parts: list[Part] = []
        self._read(text, parts)
        return parts

    def flush(self, *, cut: bool) -> list[Part]:
        """What still waited when the answer ended: by the model, or `cut` off by a limit."""
        parts: list[Part] = []
        while self.inside and not self.done:
            self._read(self._break_off(cut, parts), parts)
        ending = self._after and (self._dialect.end or "").startswith(self._held)
        # The end marker right after a call, or a marker that the answer was cut off within.
        held = "" if ending or (cut and len(self._held) > 1) else self._held
        if not self.done and (rest := "".join([*self._space, held])):
            parts.append(rest)
        self._held = ""
        self._space.clear()
        return parts

    def _read(self, text: str, parts: list[Part]) -> None:
        text, self._held = self._held + text, ""
        while text and not self.done:
            if not self.inside:
                text = self._say(text, parts)
            elif self._json is None:
                text = self._collect(text, parts)
            elif self._json.doubted:
                text = self._doubt(self._json, text, parts)
            else:
                text = self._stream(self._json, text, parts)

    # Each of these reads `text` up to where the next has its turn, and returns the rest.

    def _say(self, text: str, parts: list[Part]) -> str:
        """Content, up to a marker."""
        found = self._markers.find(text)
        if found is None:
            settled = len(text) - self._markers.held(text)
            self._held = text[settled:]
            self._settle(text[:settled], parts)
            return ""
        start, end = found
        self._settle(text[:start], parts)
        if text[start:end] == self._dialect.start:
            self.inside = True
            self._json = _JsonCall() if self._dialect.json else None
        elif self._after:
            self._after = _SPACE
        return text[end:]

    def _collect(self, text: str, parts: list[Part]) -> str:
        """A call for the parser, up to its end marker."""
        found = self._ends.find(text)
        if found is None:
            settled = len(text) - self._ends.held(text)
            self._raw.append(text[:settled])
            self._held = text[settled:]
            return ""
        start, end = found
        self._raw.append(text[:start])
        self._parse(text[start:end], parts)
        return text[end:]

    def _stream(self, call: _JsonCall, text: str, parts: list[Part]) -> str:
        """A call in JSON, up to its end or an end marker."""
        found = self._ends.find(text)
        limit = found[0] if found else len(text) - self._ends.held(text)
        at = call.feed(text[:limit])
        self._send(call, parts)
        if call.over:
            return self._end(call, text, at, _LEFTOVERS, parts)
        if found and not call.quoted:
            return self._end(call, text, found[1], _SPACE, parts)
        if found:
            call.doubt()
            limit = found[1]
            call.feed(text[found[0] : limit])
        else:
            self._held = text[limit:]
        if not self.opened:
            self._raw.append(text[:limit])
        return text[limit:] if found else ""

    def _doubt(self, call: _JsonCall, text: str, parts: list[Part]) -> str:
        """A string with an end marker in it, up to where it is clear whose the marker is."""
        at = call.feed(text)
        if self.opened and not call.doubted:
            self._raw.clear()
        self._send(call, parts)
        if call.over:
            return self._end(call, text, 0 if call.doubted else at, _SPACE, parts)
        if call.doubted or not self.opened:
            self._raw.append(text[:at])
        return text[at:]

    def _break_off(self, cut: bool, parts: list[Part]) -> str:
        """End the call that the answer ended in; the rest is text that has to be read again."""
        call = self._json
        held, self._held = self._held, ""
        if call is None:
            if cut and self._dialect.end:
                self._leave(_SPACE)
            else:
                self._parse(held, parts, drop=cut)
            return ""
        if cut and not (self.opened and call.settled):
            self.broken = self.opened
            self._leave(_SPACE)
            return ""
        rest = self._end(call, "" if self.opened else held, 0, _SPACE, parts)
        return "" if cut else rest

    # What the turns share.

    def _settle(self, text: str, parts: list[Part]) -> None:
        """Append content, which has no marker in it, but for whitespace at its end."""
        text = text.lstrip(self._after)
        if not text:
            return
        self._after = ""
        body = text.rstrip()
        if body:
            parts.append("".join([*self._space, body]))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _send(self, call: _JsonCall, parts: list[Part]) -> None:
        """Append what is new of a call in JSON, if its name is known."""
        if call.name is None:
            return
        if not self.opened:
            self._open(call.name, parts)
            self._raw.clear()
        if text := call.take():
            parts.append(ToolArguments(self.calls - 1, text))

    def _open(self, name: str, parts: list[Part]) -> None:
        id = "".join(secrets.choice(_ALPHANUMERICS) for _ in range(24))
        parts.append(ToolOpened(self.calls, f"call_{id}", name))
        self.calls += 1
        self.opened = True

    def _end(self, call: _JsonCall, text: str, at: int, after: str, parts: list[Part]) -> str:
        """End a call in JSON at a place in `text`, or let the parser have it if it was not sent."""
        text = "".join(self._raw) + text
        self._raw.clear()
        if not self.opened:
            self._json = None
            return text
        if rest := call.close():
            parts.append(ToolArguments(self.calls - 1, rest))
        self._leave(after)
        return text[at:]

    def _parse(self, marker: str, parts: list[Part], *, drop: bool = False) -> None:
        """End a call that `marker` ends, by the parser; `drop` it if that cannot read it."""
        text = "".join(self._raw)
        uses = _parsed(self._dialect.parse, text)
        if not uses and not drop:
            parts.append("".join([*self._space, self._dialect.start, text, marker]))
        for name, arguments in uses if self._parallel else uses[:1]:
            self._open(name, parts)
            parts.append(ToolArguments(self.calls - 1, arguments))
        self._leave(_SPACE if uses or drop else "")

    def _leave(self, after: str) -> None:
        self.inside = self.opened = False
        self._json = None
        self._raw.clear()
        self._space.clear()
        self._after = after


class _JsonCall:
    """A call in JSON, read as it comes: `{"name": ..., "arguments": {...}}`, keys in any order.

    It is lenient where nothing can be mistaken: commas may be missing, other keys have any value,
    and "parameters" are arguments. The first of two equal keys holds.

    It is `over` where the object ends, or where it can be none. Before its name that is also where
    it can be no call, by arguments that are no object say, and it is over without a name then.
    `settled` tells that the arguments are complete.
    """

    def __init__(self) -> None:
        self._step: _Step = "open"
        self._role: _Role = "key"  # what the value is that is being read or comes next
        self._value: _Value | None = None
        self._held: list[str] = []  # a value that is of use only once it is complete
        self._unsent: list[str] = []  # text of the arguments that was not taken
        self._begun = False  # the arguments
        self.name: str | None = None
        self.settled = False
        self.over = False

    @property
    def quoted(self) -> bool:
        """Whether the text fed so far ends within a string."""
        return self._value is not None and self._value.quoted

    @property
    def doubted(self) -> bool:
        """Whether it ends within a string that an end marker was found in."""
        return self._value is not None and self._value.doubted

    def doubt(self) -> None:
        """From here on to the end of the string nothing is given, and a line end breaks it."""
        if self._value is not None:
            self._value.doubted = True

    def feed(self, text: str) -> int:
        """Read up to the end of the call, or of a string in doubt; the place in `text`."""
        at = 0
        while at < len(text) and not self.over:
            value = self._value
            if value is None:
                at = self._begin(text, at)
                continue
            start, doubted = at, value.doubted
            at = value.feed(text, at)
            self._keep(text[start:at])
            if value.complete:
                self._finish(value)
            elif value.refuted:
                self.over = True
            if doubted and not value.doubted:
                break
        return at

    def take(self) -> str:
        """The text of the arguments since the last time."""
        if self.doubted:
            return ""
        text = "".join(self._unsent)
        self._unsent.clear()
        return text

    def close(self) -> str:
        """The last of the arguments of a call that is over."""
        if not self._begun:
            return "{}"
        if self._held and self._role == "arguments":
            self._settle()
        return self.take()

    def _begin(self, text: str, at: int) -> int:
        """Pass over whitespace and one sign, or begin a value there."""
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
                # Arguments that went before the name can still be looked at as a whole.
                sound = not self.settled or _decoded("".join(self._unsent), dict) is not None
                self.name = name if name and sound else None
                self.over = self.name is None
            case "arguments" if value.first == "{":
                self.settled = True
            case "arguments":
                self._settle()

    def _role_of(self, key: str | None) -> _Role:
        self.over = key is None
        if key == "name" and self.name is None:
            return "name"
        if key in ("arguments", "parameters") and not self._begun:
            return "arguments"
        return "other"

    def _settle(self) -> None:
        """Give arguments that were held: the object that a string has in it, or as written."""
        text = self._release() or "null"
        with suppress(ValueError, RecursionError):
            text = _object(msgspec.json.decode(text))
        self._unsent.append(text)
        self.settled = True

    def _release(self) -> str:
        text = "".join(self._held)
        self._held.clear()
        return text


class _Value:
    """Finds the end of a JSON value that begins with `first`, however it is cut.

    It tells strings from brackets, no more: whether what is between them is JSON is for others to
    say. Within a string that is `doubted` a control character, which JSON has none of there, makes
    it `refuted`; where the string ends the doubt does.
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

    def feed(self, text: str, at: int) -> int:
        """The place after what `text` has of the value from `at` on, or of a string in doubt."""
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


def _parsed(parse: Callable[[str], Any], text: str) -> list[tuple[str, str]]:
    """The names and arguments of the calls in `text`; none if not all of them can be read."""
    try:
        parsed = parse(text.strip())
        return [_use(call) for call in (parsed if isinstance(parsed, list) else [parsed])]
    except Exception:  # parsers are many, and what they raise is not agreed on
        return []


def _use(call: dict[str, Any]) -> tuple[str, str]:
    name = call["name"]
    if not isinstance(name, str) or not name:
        raise ValueError("a call without a name")
    return name, _object(call.get("arguments", call.get("parameters")))


def _object(arguments: Any) -> str:
    """Arguments, or a text of them, as a JSON object; ValueError if they are none. Numbers that
    JSON lacks, such as infinity, are null there."""
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
