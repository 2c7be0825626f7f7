"""Reads strings and other texts in calls while they are written, and gives them as JSON."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence

import msgspec

from mlxsrv.text.call_formats.calls import CallFault, CallReader
from mlxsrv.text.call_formats.literal_texts import KEY, Lookahead, Scalars, unescape
from mlxsrv.text.call_formats.values import Argument, ArgumentTypes, escape
from mlxsrv.text.marks import Marks
from mlxsrv.text.scan import Scanner

_STRING_STOPS = {
    quote: re.compile(rf"[\\{quote[0]}\ufdd0-\ufdef]") for quote in ('"', "'", '"""', "'''")
}
_DOUBTED_STOPS = {
    quote: re.compile(rf"[\\{quote[0]}{chr(10) * (len(quote) == 1)}\ufdd0-\ufdef]")
    for quote in _STRING_STOPS
}
_MARK = re.compile(r"[\ufdd0-\ufdef]")
_NESTED = re.compile(r"[(\[{)\]},\ufdd0-\ufdef]")
_NEXT_QUOTE = re.compile(rf"[,\[{{]\s*(?:({KEY})\s*[:=]\s*)?$")


class LiteralSyntax(msgspec.Struct, frozen=True):
    """The syntax of calls of one family.

    Attributes:
        end: the marker behind a block, spelled; empty if there is none.
        quote: the marker at both sides of a string, spelled; empty if there is none.
        colons: a key ends with a colon and a call has braces: `call:f{k:v}`, not `f(k=v)`.
        echoed: calls may be repeated behind the end marker, with another end marker.
    """

    end: str = ""
    quote: str = ""
    colons: bool = False
    echoed: bool = False


class Level:
    """An open object, list, or list of a call's arguments.

    Attributes:
        closer: what ends it.
        keyed: its values have keys.
        outer: it has a call's arguments.
        members: the type of a value by its key.
        item: the type of the items of a list.
        count: how many values it has so far.
    """

    __slots__ = ("closer", "count", "item", "keyed", "keys", "members", "outer", "unnamed")

    def __init__(
        self,
        closer: str,
        members: Callable[[str], Argument] | None,
        item: Argument | None = None,
        *,
        outer: bool = False,
    ) -> None:
        self.closer = closer
        self.keyed = members is not None
        self.outer = outer
        self.members = members
        self.item = item
        self.keys: set[str] = set()
        self.count = 0
        self.unnamed = False  # the last value of a call had no key


class StringReader(CallReader):
    """The part of a reader of calls that reads strings. A subclass reads what they stand in.

    Args:
        syntax: that of the family.
        marks: how markers are shown.
    """

    def __init__(self, syntax: LiteralSyntax, marks: Marks) -> None:
        super().__init__()
        self._marks = marks
        self._syntax = syntax
        self._end_marker = marks.show(syntax.end)
        self._quote = marks.show(syntax.quote)
        self._ahead = Lookahead(self._end_marker)
        self._markers = Scanner([each for each in (self._quote, self._end_marker) if each])
        self._quotes = Scanner([self._quote] if syntax.quote else [])
        self._state: Callable[[], bool]
        self._final = False  # nothing follows
        self._levels: list[Level] = []
        self._names: Sequence[str] = ()  # of the tool's arguments, in their order
        self._muted = 0  # the level at which a key was repeated, counted from 1
        self._type = ArgumentTypes({}).argument("")  # of the value that is read
        self._delimiter = ""  # of the string that is read
        self._kept: list[str] = []  # a text without quotes so far
        self._depth = 0  # of brackets in it
        self._doubted: list[str] | None = None  # text from an end marker in a string on
        self._doubtful: list[str] = []  # what was read there

    @abstractmethod
    def _read_after(self) -> bool:
        """Read what follows a value."""

    @abstractmethod
    def _finish(self, fault: CallFault | None = None) -> None:
        """Close what is open of a call, with which it is over."""

    def _begin_string(self, delimiter: str, state: Callable[[], bool]) -> bool:
        self._take(len(delimiter))
        self._delimiter = delimiter
        self._put('"')
        self._state = state
        return True

    def _give_value(self, value: str) -> bool:
        if self._doubted is not None:
            self._doubted = None
            self._put("".join(self._doubtful))
            self._doubtful.clear()
        self._put(value)
        self._state = self._read_after
        return True

    def _read_marked(self) -> bool:
        """Read a string between markers, in which nothing else has a meaning."""
        text = self._text
        if text.isalnum():
            return self._pass(text, len(text), text)
        found = self._quotes.search(text)
        limit = found[0] if found else len(text) - self._quotes.held(text) * (not self._final)
        for mark in _MARK.finditer(text, 0, limit):
            if self._doubted is not None and mark[0] != self._end_marker:
                return self._end_unclosed()
            if self._doubted is None and mark[0] == self._end_marker:
                return self._doubt(mark.start(), text[: mark.start()])
        self._pass(text, limit, text[:limit])
        if found:
            self._take(len(self._quote))
            return self._give_value('"')
        return self._final and self._doubted is not None and self._end_unclosed()

    def _read_quoted(self) -> bool:
        """Read a string between quotes. A quote that nothing fitting follows belongs to it."""
        text, quote = self._text, self._delimiter
        stops = _STRING_STOPS if self._doubted is None else _DOUBTED_STOPS
        search = stops[quote].search
        pieces: list[str] = []
        given = at = 0
        limit = len(text)
        ended = False
        while stop := search(text, at):
            start = stop.start()
            sign = text[start]
            if sign == "\\":
                size = Lookahead.escape(text, start)
                if start + size > len(text) and not self._final:
                    limit = start
                    break
                inner = self._syntax.colons or not self._levels[-1].outer
                escaped = unescape(text[start : start + size], slashes=inner and quote == '"')
                pieces += (text[given:start], escaped)
                given = at = start + size
                continue
            if sign == quote[0]:
                ends = self._quote_ends(text, start)
                if ends or ends is None:
                    limit, ended = start, bool(ends)
                    break
            elif self._doubted is not None and sign != self._end_marker:
                return self._end_unclosed()
            elif sign == self._end_marker and self._doubted is None:
                return self._doubt(start, "".join([*pieces, text[given:start]]))
            at = start + 1
        pieces.append(text[given:limit])
        self._pass(text, limit, "".join(pieces))
        if ended:
            self._take(len(quote))
            return self._give_value('"')
        return self._final and self._doubted is not None and self._end_unclosed()

    def _pass(self, text: str, limit: int, read: str) -> bool:
        """Give what was read of a string, which was written up to a limit; wait for more."""
        if self._doubted is not None:
            self._doubted.append(text[:limit])
        self._put_text(read)
        self._text = text[limit:]
        return False

    # An end marker in a string belongs to it if the string is closed before another call begins,
    # or its line ends. If it is not, the model forgot to close it and the marker ended the call.

    def _doubt(self, start: int, read: str) -> bool:
        """Hold back what follows an end marker in a string."""
        self._put_text(read)
        self._take(start)
        self._doubted = [self._take(1)]
        self._put_text(self._doubted[0])
        return True

    def _end_unclosed(self) -> bool:
        """End the call at an end marker in a string."""
        self._text = "".join([*(self._doubted or ()), self._text])
        self._doubted = None
        self._doubtful.clear()
        self._finish("never closed")
        return True

    def _quote_ends(self, text: str, start: int) -> bool | None:
        """Whether the quote at `start` ends the string; None while that is not certain."""
        quote = self._delimiter
        if len(quote) == 3:
            if text.startswith(quote, start):
                return True
            begun = quote.startswith(text[start:])
            return None if begun and not self._final else False
        return self._value_ends(text, start + 1)

    def _value_ends(self, text: str, at: int) -> bool | None:
        level = self._levels[-1]
        free = not level.keyed or level.unnamed
        return self._ahead.value_ends(text, at, free=free, outer=level.outer, final=self._final)

    def _read_bare_marked(self) -> bool:
        """Read a text without its opening quote, or without quotes, up to the next marker."""
        found = self._markers.search(self._text)
        held = 0 if found or self._final else self._markers.held(self._text)
        limit = found[0] if found else len(self._text) - held
        self._kept.append(self._take(limit))
        if found is None and not self._final:
            return False
        body = "".join(self._kept)
        if found and self._text.startswith(self._quote):
            begins = self._begins_next(body, self._text[len(self._quote) :])
            if begins is None:
                return False
            if not begins:
                self._take(len(self._quote))
                return self._give_value(json.dumps(self._marks.spell(body), ensure_ascii=False))
        self._kept.clear()
        self._text = body + self._text
        return self._split_bare(len(body), ended=True)

    def _begins_next(self, body: str, behind: str) -> bool | None:
        """Whether the quote behind a text opens another string; None while that is not certain.

        Args:
            behind: what follows the quote.
        """
        found = _NEXT_QUOTE.search(body)
        if found is None:
            return False
        if found[1] is None:
            return not self._levels[-1].keyed
        if found[1] in self._names:
            return True
        behind = behind.lstrip()
        if not behind and not self._final:
            return None
        return bool(behind) and behind[0] not in ",}])" and not self._ends_here(behind)

    def _read_bare(self) -> bool:
        """Read a text without quotes."""
        found = self._markers.search(self._text)
        held = 0 if found or self._final else self._markers.held(self._text)
        limit = found[0] if found else len(self._text) - held
        return self._split_bare(limit, ended=bool(found) or self._final)

    def _split_bare(self, limit: int, *, ended: bool) -> bool:
        """Take a text without quotes, up to a comma or bracket behind which the call goes on.

        Args:
            limit: where the text ends at the latest, if it has `ended`.
        """
        text = self._text
        for found in _NESTED.finditer(text, 0, limit):
            start, sign = found.start(), found[0]
            if sign in "([{":
                self._depth += 1
            elif sign in ")]}" and self._depth:
                self._depth -= 1
            elif sign == "," and (self._depth or not (ends := self._value_ends(text, start))):
                if not self._depth and ends is None:
                    self._kept.append(self._take(start))
                    return False
            else:
                self._kept.append(self._take(start))
                return self._give_bare()
        self._kept.append(self._take(limit))
        return ended and self._give_bare()

    def _give_bare(self) -> bool:
        body = self._marks.spell("".join(self._kept)).strip()
        value = Scalars.read(body, self._type)
        return self._give_value(json.dumps(body, ensure_ascii=False) if value is None else value)

    # Output.

    def _put(self, text: str) -> None:
        """Give JSON, unless it belongs to a key that was repeated."""
        if self._muted or not text:
            return
        if self._doubted is not None:
            self._doubtful.append(text)
        elif self._parts and isinstance(last := self._parts[-1], str):
            self._parts[-1] = last + text
        else:
            self._parts.append(text)

    def _put_text(self, text: str) -> None:
        """Give text of a string."""
        if text:
            self._put(escape(text if text.isascii() else self._marks.spell(text)))

    def _ends_here(self, text: str) -> bool:
        return bool(self._end_marker) and text.startswith(self._end_marker)

    def _may_be(self, text: str, whole: str) -> bool:
        """Whether a text may become another one, when more of it is there."""
        return not self._final and len(text) < len(whole) and whole.startswith(text)
