"""Reads calls with JSON arguments while they are written: the part that all formats have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

from mlxsrv.text.call_formats.calls import CallPart, CallReader, Tools
from mlxsrv.text.call_formats.json_objects import JsonCall
from mlxsrv.text.marks import Marks
from mlxsrv.text.scan import Scanner

SPACE = " \t\r\n"
_OBJECTS = "{[`"  # JSON begins so, or a code block with it
# Dropped behind an object. Small models write too many brackets.
LEFTOVERS = SPACE + ",;}"

_FUNCTION, _END_FUNCTION = "<function>", "</function>"
_LONGEST = 256  # characters of a name


class JsonReader(CallReader):
    """Reads a block of calls. A subclass reads what stands between them, and begins each.

    An end marker inside a string of a call belongs to the string if the string is closed before its
    line ends. If it is not, the model forgot to close it and the marker ended the call.

    Args:
        ends: markers that end a call, spelled.
        marks: how markers are shown.
        tools: those that may be called.
        bare: the text looks like other text, so calls are only those of these tools.
    """

    def __init__(
        self, ends: Sequence[str], marks: Marks, tools: Tools, *, bare: bool = False
    ) -> None:
        super().__init__()
        self._tools = tools
        self._bare = bare
        self._marks = marks
        self._ends = Scanner([marks.show(end) for end in ends])
        self._call: JsonCall | None = None  # the call that is read
        self._behind: list[str] = []  # from an end marker in a string on, while it is in doubt

    @abstractmethod
    def _between(self) -> bool:
        """Take text between calls, or begin one, as `_step` does."""

    @abstractmethod
    def _end_between(self, cut: bool) -> None:
        """Read what is left between calls when the answer ends."""

    def _step(self) -> bool:
        call = self._call
        if call is None:
            return self._between()
        return self._read_doubted(call) if call.doubted else self._read(call)

    def _end(self, cut: bool) -> None:
        call = self._call
        if call is None:
            self._end_between(cut)
            return
        held, self._text = self._text, "" if cut else "".join(self._behind)
        if not cut and not call.doubted:  # else it may be the beginning of an end marker
            call.parse(held)
            self._tell(call)
        if not self.is_open:
            self.refused = True
        elif call.settled:
            self._leave(call)
        elif not cut:
            self._give_spelled(call.pop_rest())

    def _read(self, call: JsonCall) -> bool:
        """Read a call, up to its end or an end marker."""
        text, found, limit = self._text, None, len(self._text)
        if self._ends.start(text):
            found = self._ends.search(text)
            limit = found[0] if found else limit - self._ends.held(text)
        at = call.parse(text[:limit])
        self._text = text[at:]
        self._tell(call)
        if call.over or (found and not call.quoted):
            return self._leave(call)
        if found:
            call.doubt()
            limit = found[1]
            self._behind.append(text[found[0] : limit])
            call.parse(self._behind[0])
        self._text = text[limit:]
        return found is not None

    def _read_doubted(self, call: JsonCall) -> bool:
        """Read a string with an end marker in it, until it is clear what the marker belongs to."""
        text = self._text
        at = call.parse(text)
        if call.over and call.doubted:
            self._text = "".join(self._behind) + text
        elif call.doubted:
            self._behind.append(text)
            self._text = ""
            return False
        else:
            self._text = text[at:]
        self._behind.clear()
        self._tell(call)
        return self._leave(call) if call.over else True

    def _tell(self, call: JsonCall) -> None:
        """Give the new part of a call, if its name is known."""
        if call.name is None:
            return
        if not self.is_open and (self.refused or not self._name(call.name)):
            return
        self._give_spelled(call.pop_arguments())

    def _name(self, name: str) -> bool:
        """Open a call of this name, if it may be called."""
        name = self._marks.spell(name)
        name = self._tools.meant(name) or name
        self.refused = self._bare and name not in self._tools
        if not self.refused:
            self._open(name)
        return not self.refused

    def _leave(self, call: JsonCall) -> bool:
        self._call = None
        if not self.is_open:
            self.refused = True
            return False
        self._give_spelled(call.pop_rest())
        self._close()
        return True

    def _give_spelled(self, arguments: str) -> None:
        self._give(arguments if arguments.isascii() else self._marks.spell(arguments))


class ObjectsReader(JsonReader):
    """Reads objects, with or without a list around them, up to an end marker.

    Args:
        ends: markers that end the block, spelled. Without one a list ends it, or text.
        single: `{"f": {...}}` is a call of `f`.
        bare: the text looks like other text, so calls are only those of these tools.
        begun: text that was read before, with which the block begins.
    """

    def __init__(
        self,
        ends: Sequence[str],
        marks: Marks,
        tools: Tools,
        *,
        single: bool = False,
        bare: bool = False,
        begun: str = "",
    ) -> None:
        super().__init__(ends, marks, tools, bare=bare)
        self._text = begun
        self._closers = [marks.show(end) for end in ends]
        self._single = single
        self._listed = False  # inside a list
        self._separated = False  # a comma stands behind the last object
        self._fenced = False  # behind the beginning of a code block

    def _between(self) -> bool:
        text = self._text.lstrip(LEFTOVERS if self.closed else SPACE)
        skipped = self._take(len(self._text) - len(text))
        self._separated = self._separated or "," in skipped or ";" in skipped
        if not text:
            return False
        if self._take_one(self._closers):
            self._leave_block()
        elif self._waits([*self._closers, "```json", "```", _FUNCTION]):
            return False
        elif text.startswith("```") and self._fenced != (self.closed == 0):
            self._take(7 if text.startswith("```json") else 3)
            self._fenced = True
        elif text.startswith(_FUNCTION) and self._closers:
            return self._read_function()
        elif text[0] == "{":
            self._separated = False
            self._call = JsonCall(single=self._single, wary=self._bare)
        elif text[0] == "[" and not self._listed and not self.closed:
            self._listed = True
            self._take(1)
        elif text[0] == "]" and self.closed:
            self.over = not self._closers and self._listed
            self._listed = False
            self._take(1)
        else:
            self.over = self.closed > 0 and not self._listed and not self._separated
            self.refused = not self.over
        return True

    def _end_between(self, cut: bool) -> None:
        self._text = ""
        self.refused = self.closed == 0

    def _read_function(self) -> bool:
        """Read a name between tags, behind which only the arguments stand."""
        size = self._text.find(_END_FUNCTION)
        name = self._text[len(_FUNCTION) : size].strip()
        if size < 0 or not name:
            self.refused = size >= 0 or len(self._text) > _LONGEST
            return False
        self._take(size + len(_END_FUNCTION))
        self._call = JsonCall(name)
        return True

    def _take_one(self, texts: Iterable[str]) -> bool:
        """Take one of these from the front of the text; return whether it was there."""
        for text in texts:
            if self._text.startswith(text):
                self._take(len(text))
                return True
        return False

    def _waits(self, texts: Iterable[str]) -> bool:
        """Whether the text may become one of these."""
        size = len(self._text)
        return any(len(text) > size and text.startswith(self._text) for text in texts)


class FinalReader(ObjectsReader):
    """Reads objects that may be calls because nothing follows them. It gives none before the end
    of the answer."""

    def __init__(self, marks: Marks, tools: Tools, begun: str) -> None:
        super().__init__([], marks, tools, bare=True, begun=begun)
        self._whole: list[str] = []
        self._kept: list[CallPart] = []

    def feed(self, text: str) -> Sequence[CallPart]:
        self._whole.append(text)
        self._kept += super().feed(text)
        if self.over or self.refused:
            self.refused, self.over = True, False
            self.closed = 0
            self._unread = self._whole
        return ()

    def end(self, *, cut: bool) -> Sequence[CallPart]:
        return [*self._kept, *super().end(cut=cut)]


class EitherReader(ObjectsReader):
    """Reads objects, or what another reader reads if the block begins as its calls do.

    Args:
        other: the other reader.
        sign: the text with which its calls begin; empty if it may be any that JSON does not.
    """

    def __init__(
        self, ends: Sequence[str], marks: Marks, tools: Tools, other: CallReader, sign: str
    ) -> None:
        super().__init__(ends, marks, tools)
        self._other = other
        self._sign = sign
        self._chosen = False  # the other reads

    @property
    def rest(self) -> str:
        return self._other.rest if self._chosen else super().rest

    @property
    def unread(self) -> str:
        return self._other.unread if self._chosen else super().unread

    def feed(self, text: str) -> Sequence[CallPart]:
        return self._follow(self._other.feed(text)) if self._chosen else super().feed(text)

    def end(self, *, cut: bool) -> Sequence[CallPart]:
        return self._follow(self._other.end(cut=cut)) if self._chosen else super().end(cut=cut)

    def _between(self) -> bool:
        text = self._text.lstrip(SPACE)
        if self.closed or self._listed or not self._may_be_other(text):
            return super()._between()
        if len(text) >= len(self._sign):
            self._chosen = True
            self._parts += self._follow(self._other.feed(super().unread))
        return False

    def _may_be_other(self, text: str) -> bool:
        if not self._sign:
            return text[:1] not in ("", *_OBJECTS)
        return self._sign.startswith(text[: len(self._sign)])

    def _follow(self, parts: Sequence[CallPart]) -> Sequence[CallPart]:
        """Take the state of the other reader, which has given these parts."""
        other = self._other
        self.over, self.refused = other.over, other.refused
        self.closed, self.is_open = other.closed, other.is_open
        return parts
