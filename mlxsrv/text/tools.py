"""Separates tool calls from content.

Each family of models writes calls in its own dialect, between markers. Most dialects are JSON:
then a call is sent while it is written, its name as soon as that is complete, and its arguments as
they come. Calls in other dialects are read by a parser once they are over.

Calls with errors:

- Before anything of a call is sent, the parser decides. If the parser cannot read it, or finds no
  name, it was no call. Then its text is content, with the markers and the whitespace before them.
- Once the name was sent it is a call, with the arguments as the model wrote them. A client must
  expect arguments that are not JSON, as it must with OpenAI. They are not repaired here: a command
  or a path that was cut and then closed looks right and does something else. Arguments that never
  began are `{}`.
- If a limit cuts a call off, the part that was written is sent: the name once it is complete, and
  the arguments so far (`_read_cut` reads dialects other than JSON). If the name is not complete,
  nothing is sent.
- `broken` says which of the calls that were sent are not complete, `fragment` has the text of one
  that the answer ended in, and `faults` say what was wrong, for the log.
- A call of a tool that the request does not have is a call: the client answers it with an error,
  from which the model learns. It is a fault for the log only.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from mlxsrv.generation.outputs import is_object
from mlxsrv.text.calls import CallFault
from mlxsrv.text.json_objects import JsonCall, as_object
from mlxsrv.text.reader import ToolArguments, ToolOpened
from mlxsrv.text.scan import Scanner
from mlxsrv.text.stage import Stage

# Right before a name stands one of: `call:f{`, `functions.f:0`, `name="f"`, `<function=f>`, `[f(`.
_BEFORE = r'(?:^\s*(?:call:)?|functions\.|["=\[])'
_AFTER = r'(?=[\s{:"<\[(>])'
# Mistral's and Kimi's arguments.
_JSON_ARGUMENTS = re.compile(
    r"(?::\d+)?\s*(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|<\|tool_call_argument_begin\|>)\s*(?={)"
)


class ToolDialect(msgspec.Struct, frozen=True):
    """The way in which a family of models calls tools.

    Attributes:
        start: the marker before a call.
        end: the marker after a call; without one (None or empty) a call goes on to the end of the
            answer.
        parse: turns the text between the markers into a dict with "name" and "arguments", or a list
            of such dicts. It may raise anything.
        json: the text is usually one JSON object, and streamed if it is; else `parse` reads it.
        names: those of the tools that may be called.
    """

    start: str
    end: str | None
    parse: Callable[[str], Any]
    json: bool = False
    names: tuple[str, ...] = ()


ContentOrCall = str | ToolOpened | ToolArguments
"""Content, or part of a call."""

_ALPHANUMERICS = string.ascii_letters + string.digits

# Characters that are dropped after a call. Small models write too many brackets after JSON.
_SPACE = string.whitespace
_LEFTOVERS = _SPACE + "}]"


class ToolCalls(Stage[str, list[ContentOrCall]]):
    """Splits content at the markers around calls, which are never given out, not even in part.

    - Whitespace before a call, between calls and after the last is dropped. It waits while a call
      may follow, and is given as it is if none does.
    - An end marker outside a call is dropped.
    - An end marker inside a string of a JSON call belongs to the string if the string is closed
      before its line ends. If it is not, the model forgot to close it and the marker ended the
      call.

    Args:
        parallel: more than one call may be made; else nothing is given after the first.
        bound: the answer follows a grammar. It begins with a call or has none, and what looks like
            a marker in it is text that the grammar asked for. Small models then repeat a call
            without end, so a call that is the same as an earlier one is not given and ends the
            answer. A call is held back as long as it may become one.

    Attributes:
        inside: the text so far ends inside a call.
        calls: how many calls were opened.
        opened: the last of them is still being written.
        broken: the numbers of opened calls that are over and not complete: they were cut off, never
            closed, or have arguments that are no JSON object.
        fragment: after a flush, all that was written of a call that the answer ended in, from its
            marker on, if it is broken or was not opened. Content does not have it.
        faults: what was wrong with calls, in order.
    """

    def __init__(self, dialect: ToolDialect, *, parallel: bool = True, bound: bool = False) -> None:
        ends = [dialect.end] if dialect.end else []
        self._dialect = dialect
        self._parallel = parallel
        self._bound = bound
        self._undecided = bound  # whether the answer begins with a call is not known yet
        self._markers = Scanner([dialect.start, *ends])
        self._ends = Scanner(ends)
        self._held = ""  # may be the beginning of a marker
        self._space: list[str] = []  # whitespace that is dropped if a call follows
        self._after = ""  # characters that are dropped because a call went before
        self.inside = False
        self._json: JsonCall | None = None  # the call that is read, if it may be streamed
        self._raw: list[str] = []  # text of the call that may have to be read again
        self._written: list[str] = []  # text of the call, and what follows it
        self._name = ""  # of the last call
        self._arguments: list[str] = []  # of the last call
        self._earlier: list[str] = []  # the text of each call that was given, if it may not repeat
        self._alike: list[str] = []  # those of them that the last call may be again
        self._compared = 0  # characters of it that are the same
        self._waiting: list[ToolOpened | ToolArguments] = []  # parts of it meanwhile
        self._repeated = False
        self.calls = 0
        self.opened = False
        self.broken: list[int] = []
        self.fragment = ""
        self.faults: list[CallFault] = []

    @property
    def done(self) -> bool:
        """Whether the only call that may be made is over, or an earlier one is made again, so that
        no more need be generated."""
        return self._repeated or (not self._parallel and self.calls > 0 and not self.opened)

    def feed(self, text: str) -> list[ContentOrCall]:
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
        if self.inside:
            self._written.append(text)
        parts: list[ContentOrCall] = []
        self._read(text, parts)
        return parts

    def flush(self, *, cut: bool = False) -> list[ContentOrCall]:
        parts: list[ContentOrCall] = []
        while self.inside and not self.done:
            self._read(self._end_unfinished(cut, parts), parts)
        ending = self._after and (self._dialect.end or "").startswith(self._held)
        # Drop an end marker right after a call, and a marker that the answer was cut off in.
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
                text = self._read_content(text, parts)
            elif self._json is None:
                text = self._read_for_parser(text, parts)
            elif self._json.doubted:
                text = self._read_doubted_string(self._json, text, parts)
            else:
                text = self._read_json(self._json, text, parts)

    # Each of these reads `text` up to where another one goes on, and returns the rest.

    def _read_content(self, text: str, parts: list[ContentOrCall]) -> str:
        """Read content, up to a marker."""
        found = self._markers.search(text)
        if found is None:
            settled = len(text) - self._markers.held(text)
            self._held = text[settled:]
            self._append_content(text[:settled], parts)
            return ""
        start, end = found
        self._append_content(text[:start], parts)
        if text[start:end] == self._dialect.start:
            self.inside = True
            self._written = [text[end:]]
            self._json = JsonCall() if self._dialect.json else None
        elif self._after:
            self._after = _SPACE
        return text[end:]

    def _read_for_parser(self, text: str, parts: list[ContentOrCall]) -> str:
        """Read a call for the parser, up to its end marker."""
        found = self._ends.search(text)
        if found is None:
            settled = len(text) - self._ends.held(text)
            self._raw.append(text[:settled])
            self._held = text[settled:]
            return ""
        start, end = found
        self._raw.append(text[:start])
        self._parse(text[start:end], parts)
        return text[end:]

    def _read_json(self, call: JsonCall, text: str, parts: list[ContentOrCall]) -> str:
        """Read a call in JSON, up to its end or an end marker."""
        found = self._ends.search(text)
        limit = found[0] if found else len(text) - self._ends.held(text)
        at = call.parse(text[:limit])
        self._append_json(call, parts)
        if call.over:
            return self._end_json(call, text, at, _LEFTOVERS, parts)
        if found and not call.quoted:
            return self._end_json(call, text, found[1], _SPACE, parts)
        if found:
            call.doubt()
            limit = found[1]
            call.parse(text[found[0] : limit])
        else:
            self._held = text[limit:]
        if not self.opened:
            self._raw.append(text[:limit])
        return text[limit:] if found else ""

    def _read_doubted_string(self, call: JsonCall, text: str, parts: list[ContentOrCall]) -> str:
        """Read a string with an end marker in it, until it is clear what the marker belongs to."""
        at = call.parse(text)
        if self.opened and not call.doubted:
            self._raw.clear()
        self._append_json(call, parts)
        if call.over:
            return self._end_json(call, text, 0 if call.doubted else at, _SPACE, parts)
        if call.doubted or not self.opened:
            self._raw.append(text[:at])
        return text[at:]

    def _end_unfinished(self, cut: bool, parts: list[ContentOrCall]) -> str:
        """End the call that the answer ended in; return text that has to be read again."""
        call = self._json
        held, self._held = self._held, ""
        if call is None:
            if cut and self._dialect.end:
                self._append_cut_call(parts)
                self._leave_call(_SPACE, parts)
            else:
                self._parse(held, parts, drop=cut)
            return ""
        if cut and not (self.opened and call.settled):
            self._keep_fragment("cut off by a limit")
            self._leave_call(_SPACE, parts)
            return ""
        if self.opened and not call.settled:
            self._keep_fragment("never closed")
        rest = self._end_json(call, "" if self.opened else held, 0, _SPACE, parts)
        return "" if cut else rest

    # Helpers of these.

    def _append_content(self, text: str, parts: list[ContentOrCall]) -> None:
        """Append content, which has no marker in it, except whitespace at its end."""
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

    def _append_json(self, call: JsonCall, parts: list[ContentOrCall]) -> None:
        """Append the new part of a call in JSON, if its name is known."""
        if call.name is None:
            return
        if not self.opened:
            self._append_opened(call.name, parts)
            self._raw.clear()
        if text := call.pop_arguments():
            self._append_arguments(text, parts)

    def _append_arguments(self, text: str, parts: list[ContentOrCall]) -> None:
        self._append_call(ToolArguments(self.calls - 1, text), text, parts)
        self._arguments.append(text)

    def _append_call(
        self, part: ToolOpened | ToolArguments, text: str, parts: list[ContentOrCall]
    ) -> None:
        """Append a part of a call; it waits if the call so far is the beginning of an earlier one.

        Args:
            text: of the part.
        """
        at, self._compared = self._compared, self._compared + len(text)
        self._alike = [each for each in self._alike if each.startswith(text, at)]
        self._waiting.append(part)
        if not self._alike:
            self._release(parts)

    def _release(self, parts: list[ContentOrCall]) -> None:
        parts += self._waiting
        self._waiting.clear()

    def _close_call(self, parts: list[ContentOrCall]) -> None:
        """Give the rest of an opened call, or drop it if it is the same as an earlier one."""
        self.opened = False
        call = "".join([self._name, "\n", *self._arguments])
        if call in self._alike and self.calls - 1 not in self.broken:
            self._repeated = True
            self._waiting.clear()
            self.calls -= 1
            return
        self._release(parts)
        if self._bound:
            self._earlier.append(call)

    def _append_opened(self, name: str, parts: list[ContentOrCall]) -> None:
        id = "".join(secrets.choice(_ALPHANUMERICS) for _ in range(24))
        self._name, self._alike, self._compared = name, self._earlier, 0
        self._arguments.clear()
        self._append_call(ToolOpened(self.calls, f"call_{id}", name), f"{name}\n", parts)
        self.calls += 1
        self.opened = True
        if self._dialect.names and name not in self._dialect.names:
            self.faults.append("the request has no tool of this name")

    def _end_json(
        self, call: JsonCall, text: str, at: int, after: str, parts: list[ContentOrCall]
    ) -> str:
        """End a call in JSON at a place in `text`; return it to the parser if it was not sent."""
        text = "".join(self._raw) + text
        self._raw.clear()
        if not self.opened:
            self._json = None
            return text
        if rest := call.pop_rest():
            self._append_arguments(rest, parts)
        if self.calls - 1 not in self.broken and not is_object("".join(self._arguments)):
            self._note_broken("its arguments are no JSON object")
        self._leave_call(after, parts)
        return text[at:]

    def _parse(self, marker: str, parts: list[ContentOrCall], *, drop: bool = False) -> None:
        """Parse a call that `marker` ended; `drop` it if the parser cannot read it."""
        text = "".join(self._raw)
        uses = _parsed(self._dialect.parse, text)
        if not uses and drop:
            self._append_cut_call(parts)
        elif not uses:
            self.faults.append("no call could be read, so it is content")
            parts.append("".join([*self._space, self._dialect.start, text, marker]))
        for name, arguments in uses if self._parallel else uses[:1]:
            self._append_opened(name, parts)
            self._append_arguments(arguments, parts)
            self._close_call(parts)
            if self._repeated:
                break
        self._leave_call(_SPACE if uses or drop else "", parts)

    def _append_cut_call(self, parts: list[ContentOrCall]) -> None:
        """Append what is known without the parser of a call that a limit cut off."""
        found = _read_cut("".join(self._raw), self._dialect.names)
        if found is not None:
            name, arguments = found
            self._append_opened(name, parts)
            if arguments:
                self._append_arguments(arguments, parts)
        self._keep_fragment("cut off by a limit")

    def _keep_fragment(self, fault: CallFault) -> None:
        """Note that the answer ends in a call that is not complete."""
        self.fragment = "".join([self._dialect.start, *self._written])
        if self.opened:
            self._note_broken(fault)
        else:
            self.faults.append(fault)

    def _note_broken(self, fault: CallFault) -> None:
        self.broken.append(self.calls - 1)
        self.faults.append(fault)

    def _leave_call(self, after: str, parts: list[ContentOrCall]) -> None:
        if self.opened:
            self._close_call(parts)
        self.inside = False
        self._json = None
        self._raw.clear()
        self._space.clear()
        self._after = after


def _parsed(parse: Callable[[str], Any], text: str) -> list[tuple[str, str]]:
    """Return names and arguments of the calls in `text`; none if one of them cannot be read."""
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


def _read_cut(text: str, names: Sequence[str]) -> tuple[str, str] | None:
    """Return the name of the call that `text` begins, and its arguments as far as they are known.

    From half a call some parsers make arguments that look right and are wrong, such as a path
    without its end, so none is asked. In every dialect the name stands before the arguments.
    Arguments are sent as far as they were written, if they are JSON text.

    Args:
        names: of the tools that may be called.

    Returns:
        None if the name is not complete. The arguments may be empty.
    """
    if not names:
        return None
    any_name = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    found = re.search(f"{_BEFORE}({any_name}){_AFTER}", text)
    if found is None:
        return None
    arguments = _JSON_ARGUMENTS.match(text, found.end())
    return found[1], _first_object(text[arguments.end() :]) if arguments else ""


def _first_object(text: str) -> str:
    """Return the JSON object that `text` begins with, or all of `text` if the object has no end."""
    try:
        return text[: json.JSONDecoder().raw_decode(text)[1]]
    except (ValueError, RecursionError):
        return text
