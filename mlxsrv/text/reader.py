"""Parts an answer into thoughts, content and tool calls.

A frame says where text goes, a format of calls what stands behind its opening markers. This module
alternates between the two, and has the rules that hold in every format:

- Markers are never given out, not even in part. Whitespace before a call, between calls and after
  the last is dropped. It waits while a call may follow, and is given as it is if none does.
- Before anything of a call is sent, its reader decides. If it finds no call, the text is what it
  would be without: content or thoughts, with the markers and the whitespace before them.
- Once the name was sent it is a call, with the arguments as the model wrote them. A client must
  expect arguments that are not JSON, as it must with OpenAI. What was cut is not completed: a
  command or a path that was cut and then closed looks right and does something else.
- If a limit cuts a call off, the part that was written is sent: the name once it is certain, and
  the arguments so far. If the name is not certain, nothing is sent.
- A call in a thought ends it, if it is whole and calls a tool of the request. Until then it waits.
- A call of another tool is a call: the client answers it with an error, from which the model
  learns. It is a fault for the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from mlxsrv.generation.outputs import is_object
from mlxsrv.text.call_formats.calls import (
    CallClosed,
    CallFault,
    CallFormat,
    CallOpened,
    CallPart,
    CallReader,
    Tools,
)
from mlxsrv.text.frames import CONTENT, Frame, Piece
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.scan import Scanner
from mlxsrv.text.stage import Stage

# A text that was no call is read again, up to so many: one may open call after call.
_READ_AGAIN = 4096  # characters

_UNFINISHED = (CallClosed("cut off by a limit"), CallClosed("never closed"))


class ToolOpened(msgspec.Struct, frozen=True):
    """The beginning of the answer's call number `index`, from 0, of the tool `name`."""

    index: int
    id: str
    name: str


class ToolArguments(msgspec.Struct, frozen=True):
    """More text of a call's arguments, which together are a JSON object. Never empty."""

    index: int
    text: str


OutputPart = Piece | ToolOpened | ToolArguments
"""One part of an answer: text of a channel, or part of a tool call."""


class OfferedCalls(msgspec.Struct, frozen=True):
    """The calls that the answers to a request may make.

    Attributes:
        format: in which the model writes them.
        tools: those that may be called.
        parallel: more than one call may be made; else nothing is given after the first.
        earlier: how many calls the chat has already.
    """

    format: CallFormat
    tools: Tools
    parallel: bool = True
    earlier: int = 0


class AnswerReader(Stage[str, list[OutputPart]]):
    """Reads the text of one answer, with its markers as `marks` show them.

    Args:
        frame: the answer's.
        marks: the markers of the model's formats.
        calls: those that may be made; without it there are none.
        bound: the answer follows a grammar. It begins with a call or has none, and once its content
            has begun, what spells a marker in it is text that the grammar asked for. Small models
            then repeat a call without end, so a call that is the same as an earlier one is not
            given and ends the answer. A call is held back as long as it may become one.

    Attributes:
        calls: how many calls were opened.
        broken: the numbers of opened calls that are over and not complete: they were cut off, never
            closed, or have arguments that are no JSON object.
        fragment: after a flush, all that was written of a call that the answer ended in, from its
            marker on, if it is broken or was not opened. Content does not have it.
        faults: what was wrong with calls, in order.
    """

    def __init__(
        self,
        frame: Frame,
        marks: Marks,
        calls: OfferedCalls | None = None,
        *,
        thinking: bool = False,
        bound: bool = False,
    ) -> None:
        self._frame = frame
        self._marks = marks
        self._offered = calls
        self._single = calls is not None and not calls.parallel
        self._bound = bound
        self._tokens_only = bound and not thinking
        self._openers: dict[str, str] = {}  # as they are spelled, by how they are shown
        self._dropped: frozenset[str] = frozenset()
        if calls is not None:
            self._openers = {marks.show(opener): opener for opener in calls.format.openers}
            self._dropped = frozenset(map(marks.show, calls.format.dropped))
        self._stray = frozenset(marks.tokens.values())
        self._inner = False  # some of these stand inside longer markers
        self._framed: Sequence[str] = ()
        self._markers = Scanner([])
        self._leading = calls is not None and calls.format.leading
        self._plain = not bound and not self._leading  # text without a marker decides nothing
        self._begun = False  # content has begun
        self._settled = False  # a bound answer's content has begun, so no opener follows
        self._held = ""  # may be the beginning of a marker
        self._space: list[str] = []  # whitespace of content that is dropped if a call follows
        self._after = False  # a call went before, so whitespace is dropped
        self._spared = False  # an opener was text, so is the end marker that belongs to it
        self._line = True  # the thought so far ends at the beginning of a line
        self._reader: CallReader | None = None  # of the block that is read
        self._opener = ""  # of that block, as it is shown
        self._trial: list[CallPart] | None = None  # parts of a call in a thought, while it is held
        self._tried: list[str] = []  # its text
        self._open = False  # the last call is not over
        self._name = ""  # of the last call
        self._arguments: list[str] = []  # of the last call
        self._earlier: list[str] = []  # the text of each call that was given, if it may not repeat
        self._alike: list[str] = []  # those of them that the last call may be again
        self._compared = 0  # characters of it that are the same
        self._waiting: list[ToolOpened | ToolArguments] = []  # parts of it meanwhile
        self._repeated = False
        self._find_markers()
        self.calls = 0
        self.broken: list[int] = []
        self.fragment = ""
        self.faults: list[CallFault] = []

    @property
    def done(self) -> bool:
        """Whether the only call that may be made is over, or an earlier one is made again, so that
        no more need be generated."""
        return self._repeated or (self._single and self.calls > 0 and not self._open)

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._frame.reasoning and self._trial is None

    @property
    def header(self) -> str | None:
        """The header of a message for a tool, since the marker that ended it."""
        return self._frame.header

    @property
    def inside(self) -> bool:
        """Whether the text so far ends inside a block of calls."""
        return self._reader is not None

    @property
    def holding(self) -> bool:
        """Whether it is not certain yet where the end of the text so far belongs."""
        return bool(self._held) or self._trial is not None

    def feed(self, text: str) -> list[OutputPart]:
        """Return the parts that are certain, none of them empty."""
        parts: list[OutputPart] = []
        still = self._plain and self._reader is None and not self._held
        same = self._frame.markers is self._framed
        if still and same and not self._markers.start(text):
            # Nearly all text: it has no marker, and nothing waits for it.
            self._place(text, parts)
            return parts
        if text and not self.done:
            self._read(text, parts)
        return parts

    def flush(self, *, cut: bool = False) -> list[OutputPart]:
        """Return what waited. If the answer was cut off, two or more characters of a marker are
        taken for the marker, unless other text has it too."""
        parts: list[OutputPart] = []
        while self._reader is not None and not self.done:
            self._read(self._end_block(self._reader, cut, parts), parts)
        ends = (*self._dropped, *map(self._marks.spell, self._dropped))
        ending = self._after and any(each.startswith(self._held) for each in ends)
        held, self._held = self._held, ""
        if self.done:
            return parts
        bare = self._offered.format.bare if self._offered is not None else ()
        torn = cut and len(held) > 1 and not any(each.startswith(held) for each in bare)
        if held and not ending and not torn:
            self._place(held, parts)
        for piece in self._frame.flush():
            self._put(piece, parts)
        if self._space:
            parts.append((CONTENT, "".join(self._space)))
            self._space.clear()
        return parts

    def _read(self, text: str, parts: list[OutputPart]) -> None:
        text, self._held = self._held + text, ""
        while text and not self.done:
            if self._reader is None:
                text = self._read_text(text, parts)
            else:
                text = self._read_block(self._reader, text, parts)

    # Each of these reads `text` up to where another one goes on, and returns the rest.

    def _read_text(self, text: str, parts: list[OutputPart]) -> str:
        """Read up to a marker, and the marker."""
        if self._frame.markers is not self._framed:
            self._find_markers()
        leads = self._leading and not self._begun and not self._frame.reasoning
        if leads:
            body = text.lstrip()  # openers that begin with whitespace are for later text
            self._place(text[: len(text) - len(body)], parts)
            text = body
        found = self._markers.search(text) if self._markers.start(text) else None
        start, end = found or (len(text) - self._markers.held(text),) * 2
        if leads and start > 0:
            self._begun = True
            self._plain = not self._bound
            self._begin_block("", "")
            return text
        self._place(text[:start], parts)
        if self._bound and self._begun and self.calls == 0 and not self._settled:
            self._settled = self._plain = True
            self._find_markers()
            return text[start:]
        if found is None:
            self._held = text[start:]
            return ""
        self._cross(text[start:end], parts)
        return text[end:]

    def _read_block(self, reader: CallReader, text: str, parts: list[OutputPart]) -> str:
        """Read calls, up to the end of their block."""
        if self._trial is not None:
            self._tried.append(text)
        failed = self._take_all(reader.feed(text), parts)
        if failed or reader.refused:
            return self._refuse(reader, parts)
        if not reader.over:
            return ""
        if self._trial is not None:  # the block had no call
            return self._refuse(reader, parts)
        self._leave_block()
        return reader.rest

    def _end_block(self, reader: CallReader, cut: bool, parts: list[OutputPart]) -> str:
        """End the block that the answer ended in; return text that has to be read again."""
        taken = reader.end(cut=cut)
        failed = self._take_all(taken, parts)
        if failed or self._trial is not None:
            return self._refuse(reader, parts)
        unopened = reader.refused and cut and self._is_marked
        unfinished = bool(taken) and taken[-1] in _UNFINISHED
        if unopened or unfinished:
            if unopened:
                self.faults.append("cut off by a limit")
            opener = self._opener if reader.closed == int(unfinished) else ""
            self.fragment = self._marks.spell(opener + reader.unread)
        elif reader.refused:
            return self._refuse(reader, parts)
        self._leave_block()
        return "" if unopened else reader.rest

    # Text.

    def _find_markers(self) -> None:
        """Make the scanner for the markers that are looked for now."""
        self._framed = self._frame.markers
        patterns = {*self._framed, *self._openers, *self._dropped}
        self._inner = any(sign in each for each in patterns - self._stray for sign in self._stray)
        patterns |= {sign for sign in self._stray if not any(sign in each for each in patterns)}
        # Outside of calls a marker may also be spelled by several tokens.
        patterns |= set(map(self._marks.spell, patterns))
        if self._settled:
            patterns = set(self._stray)
        elif self._tokens_only:
            # A grammar's text may spell a marker of thoughts; one that is a token opens a thought.
            thoughts = {*self._framed, *map(self._marks.spell, self._framed)}
            patterns -= thoughts - self._stray
        self._markers = Scanner(sorted(patterns))

    def _cross(self, marker: str, parts: list[OutputPart]) -> None:
        """Go on behind a marker."""
        found, marker = marker, self._marks.show(marker)
        if (
            marker in self._openers
            and not self._settled
            and (not self._frame.reasoning or found in self._stray or self._line)
        ):
            self._begin_block(found, self._openers[marker])
        elif marker in self._framed:
            for piece in self._frame.cross(marker):
                self._put(piece, parts)
            self._line = True
            if self._frame.header is not None and self._offered is not None:
                self._begin_block("", self._frame.header)
        elif marker not in self._dropped or self._frame.reasoning or self._spared:
            self._spared = False
            self._place(self._marks.spell(marker), parts)

    def _place(self, text: str, parts: list[OutputPart]) -> None:
        if not text:
            return
        if self._inner:
            text = self._marks.spell(text)
        pieces = self._frame.place(text)
        if self._offered is None:
            parts += pieces
            self._begun = self._begun or (
                self._bound and any(each[0] == CONTENT for each in pieces)
            )
        else:
            if body := text.rstrip(" \t"):
                self._line = body[-1] == "\n"
            for piece in pieces:
                self._put(piece, parts)

    def _put(self, piece: Piece, parts: list[OutputPart]) -> None:
        """Append a piece, but for whitespace that is dropped if a call follows."""
        channel, text = piece
        if channel != CONTENT or self._offered is None:
            parts.append(piece)
            self._begun = self._begun or channel == CONTENT
            return
        if self._after:
            text = text.lstrip()
        body = text.rstrip()
        if body:
            self._begun = True
            self._after = False
            parts.append((CONTENT, "".join([*self._space, body])))
            self._space.clear()
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    # Blocks of calls.

    @property
    def _is_marked(self) -> bool:
        """Whether a marker opened the block, and not what other text has too."""
        assert self._offered is not None
        spelled = self._marks.spell(self._opener)
        return bool(spelled.strip()) and spelled not in self._offered.format.bare

    def _begin_block(self, marker: str, opener: str) -> None:
        assert self._offered is not None
        self._opener = marker
        self._spared = False
        # What is between spelled markers has no others.
        marks = self._marks if self._marks.show(marker) == marker else SPELLED
        self._reader = self._offered.format.reader(opener, self._offered.tools, marks)
        self._trial = [] if self._frame.reasoning else None
        self._tried.clear()

    def _leave_block(self) -> None:
        self._reader = None
        self._trial = None
        self._space.clear()
        self._after = True
        self._begun = True

    def _refuse(self, reader: CallReader, parts: list[OutputPart]) -> str:
        """Leave a block that has no call in it, or no more; return text that is read again."""
        text = reader.unread if self._trial is None else "".join(self._tried)
        opener = self._opener if self._trial is not None or reader.closed == 0 else ""
        if opener and self._is_marked and self._trial is None:
            self.faults.append("no call could be read, so it is content")
        self._reader = self._trial = None
        self._after = self._after or reader.closed > 0
        self._spared = bool(opener.strip())
        self._place(self._marks.spell(opener), parts)
        if len(text) <= _READ_AGAIN:
            return text
        self._read_without_calls(text, parts)
        return ""

    def _read_without_calls(self, text: str, parts: list[OutputPart]) -> None:
        while text:
            markers = Scanner(self._frame.markers)
            start, end = markers.search(text) or (len(text), len(text))
            self._place(self._marks.spell(text[:start]), parts)
            if start < end:
                for piece in self._frame.cross(text[start:end]):
                    self._put(piece, parts)
            text = text[end:]

    def _take_all(self, taken: Iterable[CallPart], parts: list[OutputPart]) -> bool:
        """Append parts of calls; return whether a call in a thought has turned out to be none."""
        for part in taken:
            if self.done:
                break
            if self._trial is None:
                self._take(part, parts)
                continue
            self._trial.append(part)
            if isinstance(part, CallClosed) and not self._end_trial(part, parts):
                return True
        return False

    def _end_trial(self, closed: CallClosed, parts: list[OutputPart]) -> bool:
        """Decide on a call in a thought, which is over; return whether it is one."""
        held = self._trial or []
        assert self._offered is not None
        opened = held[0]
        known = isinstance(opened, CallOpened) and opened.name in self._offered.tools
        whole = closed.fault is None and is_object("".join(x for x in held if isinstance(x, str)))
        if not known or not whole:
            return False
        self._trial = None
        self._frame.leave()
        for part in held:
            self._take(part, parts)
        return True

    def _take(self, part: CallPart, parts: list[OutputPart]) -> None:
        match part:
            case CallOpened(name=name):
                self._open_call(name, parts)
            case str():
                self._append_call(ToolArguments(self.calls - 1, part), part, parts)
                self._arguments.append(part)
            case CallClosed(fault=fault):
                if fault is None and not is_object("".join(self._arguments)):
                    fault = "its arguments are no JSON object"
                if fault is not None:
                    self.broken.append(self.calls - 1)
                    self.faults.append(fault)
                self._close_call(parts)

    def _open_call(self, name: str, parts: list[OutputPart]) -> None:
        assert self._offered is not None
        offered = self._offered
        id = offered.format.ids.new(name, offered.earlier + self.calls)
        self._open = True
        self._name, self._alike, self._compared = name, self._earlier, 0
        self._arguments.clear()
        self._space.clear()
        self._append_call(ToolOpened(self.calls, id, name), f"{name}\n", parts)
        self.calls += 1
        if name not in self._offered.tools:
            self.faults.append("the request has no tool of this name")

    def _append_call(
        self, part: ToolOpened | ToolArguments, text: str, parts: list[OutputPart]
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

    def _release(self, parts: list[OutputPart]) -> None:
        parts += self._waiting
        self._waiting.clear()

    def _close_call(self, parts: list[OutputPart]) -> None:
        """Give the rest of an opened call, or drop it if it is the same as an earlier one."""
        self._open = False
        self._plain = self._plain and not self.done
        call = "".join([self._name, "\n", *self._arguments])
        if call in self._alike and self.calls - 1 not in self.broken:
            self._repeated = True
            self._plain = False
            self._waiting.clear()
            self.calls -= 1
            return
        self._release(parts)
        if self._bound:
            self._earlier.append(call)
