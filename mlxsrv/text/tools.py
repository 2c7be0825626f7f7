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
- A call that a limit cut is told as far as it came, whole or streamed: its name once that is
  complete, and the arguments as far as they were written; see `cut_calls` for other dialects than
  JSON. Before its name is complete nothing of it is told. `broken` says that there was such a call.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from typing import Any

import msgspec

from mlxsrv.text.cut_calls import read_cut
from mlxsrv.text.json_calls import JsonCall, as_object
from mlxsrv.text.scan import Scanner


class ToolDialect(msgspec.Struct, frozen=True):
    """How a family of models calls tools.

    `start` and `end` stand around a call; without an `end` (None or empty) it goes on to the end of
    the answer. `parse` makes of the text between them a dict with "name" and "arguments", or a list
    of such, and may raise anything. With `json` the text is one JSON object as a rule, and streamed
    if it is; where it is not, `parse` has it. `names` are those of the tools that may be called.
    """

    start: str
    end: str | None
    parse: Callable[[str], Any]
    json: bool = False
    names: tuple[str, ...] = ()


class ToolOpened(msgspec.Struct, frozen=True):
    """The model calls the tool `name`: the answer's call number `index`, from 0."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More of a call's arguments, which together are a JSON object as text. Never empty."""

    index: int
    text: str


ContentOrCall = str | ToolOpened | ToolArguments
"""What comes out: content, or something of a call."""

_ALPHANUMERICS = string.ascii_letters + string.digits

# What is dropped after a call; after one in JSON also brackets too many, as small models write.
_SPACE = string.whitespace
_LEFTOVERS = _SPACE + "}]"


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

    def __init__(self, dialect: ToolDialect, *, parallel: bool = True, bound: bool = False) -> None:
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
        self._json: JsonCall | None = None  # the call inside, if it may be streamed
        self._raw: list[str] = []  # text of the call that may have to be read once more
        self.calls = 0
        self.opened = False
        self.broken = False

    @property
    def done(self) -> bool:
        return not self._parallel and self.calls > 0 and not self.opened

    def feed(self, text: str) -> list[ContentOrCall]:
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
        parts: list[ContentOrCall] = []
        self._read(text, parts)
        return parts

    def flush(self, *, cut: bool) -> list[ContentOrCall]:
        """What still waited when the answer ended: by the model, or `cut` off by a limit."""
        parts: list[ContentOrCall] = []
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

    def _read(self, text: str, parts: list[ContentOrCall]) -> None:
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

    def _say(self, text: str, parts: list[ContentOrCall]) -> str:
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
            self._json = JsonCall() if self._dialect.json else None
        elif self._after:
            self._after = _SPACE
        return text[end:]

    def _collect(self, text: str, parts: list[ContentOrCall]) -> str:
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

    def _stream(self, call: JsonCall, text: str, parts: list[ContentOrCall]) -> str:
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

    def _doubt(self, call: JsonCall, text: str, parts: list[ContentOrCall]) -> str:
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

    def _break_off(self, cut: bool, parts: list[ContentOrCall]) -> str:
        """End the call that the answer ended in; the rest is text that has to be read again."""
        call = self._json
        held, self._held = self._held, ""
        if call is None:
            if cut and self._dialect.end:
                self._tell_cut(parts)
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

    def _settle(self, text: str, parts: list[ContentOrCall]) -> None:
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

    def _send(self, call: JsonCall, parts: list[ContentOrCall]) -> None:
        """Append what is new of a call in JSON, if its name is known."""
        if call.name is None:
            return
        if not self.opened:
            self._open(call.name, parts)
            self._raw.clear()
        if text := call.take():
            parts.append(ToolArguments(self.calls - 1, text))

    def _open(self, name: str, parts: list[ContentOrCall]) -> None:
        id = "".join(secrets.choice(_ALPHANUMERICS) for _ in range(24))
        parts.append(ToolOpened(self.calls, f"call_{id}", name))
        self.calls += 1
        self.opened = True

    def _end(
        self, call: JsonCall, text: str, at: int, after: str, parts: list[ContentOrCall]
    ) -> str:
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

    def _parse(self, marker: str, parts: list[ContentOrCall], *, drop: bool = False) -> None:
        """End a call that `marker` ends, by the parser; `drop` it if that cannot read it."""
        text = "".join(self._raw)
        uses = _parsed(self._dialect.parse, text)
        if not uses and drop:
            self._tell_cut(parts)
        elif not uses:
            parts.append("".join([*self._space, self._dialect.start, text, marker]))
        for name, arguments in uses if self._parallel else uses[:1]:
            self._open(name, parts)
            parts.append(ToolArguments(self.calls - 1, arguments))
        self._leave(_SPACE if uses or drop else "")

    def _tell_cut(self, parts: list[ContentOrCall]) -> None:
        """Tell of a call that a limit cut what can be told without the parser."""
        found = read_cut("".join(self._raw), self._dialect.names)
        if found is not None:
            name, arguments = found
            self._open(name, parts)
            if arguments:
                parts.append(ToolArguments(self.calls - 1, arguments))
            self.broken = True

    def _leave(self, after: str) -> None:
        self.inside = self.opened = False
        self._json = None
        self._raw.clear()
        self._space.clear()
        self._after = after


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
    return name, as_object(call.get("arguments", call.get("parameters")))
