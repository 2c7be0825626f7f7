"""The base of formats of tool calls, and of the readers of calls."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from mlxsrv.text.call_formats.call_ids import RANDOM, CallIds
from mlxsrv.text.call_formats.lark import Lark
from mlxsrv.text.marks import Marks

_SCOPES = re.compile(r"[.:/]")

ToolSchema = Mapping[str, Any]
"""The JSON schema of the arguments of a tool."""

CallFault = Literal[
    "cut off by a limit",
    "never closed",
    "its arguments are no JSON object",
    "no call could be read, so it is content",
    "the request has no tool of this name",
]
"""The faults of a call."""


class CallOpened(msgspec.Struct, frozen=True):
    """The name of a call is certain."""

    name: str


class CallClosed(msgspec.Struct, frozen=True):
    """A call is over. With a fault it is not complete."""

    fault: CallFault | None = None


CallPart = CallOpened | str | CallClosed
"""Part of a call as a reader gives it: its name, then text of its arguments, then its end. All
text of one call together is a JSON object, unless it is closed with a fault."""


class Tools(msgspec.Struct, frozen=True):
    """The tools that may be called: the JSON schemas of their arguments, by name."""

    schemas: Mapping[str, ToolSchema]

    def __contains__(self, name: str) -> bool:
        return name in self.schemas

    def schema(self, name: str) -> ToolSchema:
        """Return the schema of a tool's arguments; that of an unknown one says nothing."""
        return self.schemas.get(name, {})

    def meant(self, written: str) -> str | None:
        """Return the name of the tool that is meant: models write `functions.f`, `api:f` or `f()`.
        None if there is none."""
        bare = written.strip().removesuffix("()").strip()
        names = (written, bare, bare.removeprefix("functions."), _SCOPES.split(bare)[-1])
        return next((name for name in names if name in self), None)


class WrittenCall(msgspec.Struct, frozen=True):
    """A call with its arguments, and the id by which its result is known."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class NotEnforceable(ValueError):
    """No grammar can hold calls to this format. The message is for the client."""


class CallReader(ABC):
    """Reads a block of calls while it is written, from behind its opening marker on.

    What it gives depends on the text, not on how it was split, and is never taken back. It gives
    nothing of a call before the call's name is certain.

    A subclass takes text from the front of `_text` in `_step`, and gives parts with `_open`,
    `_give` and `_close`. Text that was looked at once should not be looked at again with each
    token: an argument may have 100,000 characters.

    Attributes:
        over: the block has ended; `rest` follows it.
        refused: what was written since the last call closed is no call. The block is over.
        closed: how many of its calls are over.
        is_open: a call was opened and is not over.
    """

    def __init__(self) -> None:
        self._text = ""  # not taken yet
        self._unread: list[str] = []  # all text since the last call closed
        self._parts: list[CallPart] = []
        self.over = False
        self.refused = False
        self.closed = 0
        self.is_open = False

    @property
    def rest(self) -> str:
        """The text behind a block that is over."""
        return self._text

    @property
    def unread(self) -> str:
        """All that was written since the last call closed, or since the block began."""
        return "".join(self._unread)

    def feed(self, text: str) -> Sequence[CallPart]:
        """Return the parts that are certain now."""
        self._unread.append(text)
        self._text += text
        while not self.over and not self.refused and self._step():
            pass
        return self._pop()

    def end(self, *, cut: bool) -> Sequence[CallPart]:
        """Return what is left when the answer ends, or was `cut` off by a limit.

        A call that is open is closed. Without one the reader is `over` if nothing but whitespace
        and markers was left, and `refused` otherwise.
        """
        self._end(cut)
        if self.is_open:
            self._close("cut off by a limit" if cut else "never closed")
        self.over = self.over or not self.refused
        return self._pop()

    @abstractmethod
    def _step(self) -> bool:
        """Take some of `_text`; return False if it has to wait for more, or nothing is left."""

    @abstractmethod
    def _end(self, cut: bool) -> None:
        """Read what is left, with nothing to follow. A call that is complete but for markers is
        closed here; if something else is left, the reader is refused."""

    def _take(self, size: int) -> str:
        taken, self._text = self._text[:size], self._text[size:]
        return taken

    def _open(self, name: str) -> None:
        self._parts.append(CallOpened(name))
        self.is_open = True

    def _give(self, arguments: str) -> None:
        """Give more text of the arguments, if there is any."""
        if arguments:
            self._parts.append(arguments)

    def _leave_block(self) -> bool:
        """End the block if it has had a call; else it is none. Return that no more is read."""
        self.over = self.closed > 0
        self.refused = not self.over
        return False

    def _close(self, fault: CallFault | None = None) -> None:
        self._parts.append(CallClosed(fault))
        self.is_open = False
        if fault not in ("cut off by a limit", "never closed"):  # these want the text of the call
            self._unread = [self._text]
        self.closed += 1

    def _pop(self) -> Sequence[CallPart]:
        parts, self._parts = self._parts, []
        return parts


class CallRules(msgspec.Struct, frozen=True):
    """The names of rules in a grammar of calls.

    Attributes:
        one: one call, from its opener to the last marker of its block.
        many: one or more calls, in one block or in several, as the model writes them.
        behind: what may follow an opener, up to the end of the block, by opener as it is spelled.
            The model has decided to make the call, so these leave room for its ways of writing it.
    """

    one: str
    many: str
    behind: Mapping[str, str]


class CallFormat(ABC):
    """The way in which a family of models writes calls. It serves many answers at a time.

    Attributes:
        name: as the operator names it.
        marks: markers, spelled, that are one token where the vocabulary has them.
        openers: texts, spelled, behind each of which a reader begins. They are looked for in
            content, and in thoughts where they are a token or begin a line.
        bare: those of the openers that other text has too. What is no call behind them is no fault.
        dropped: markers, spelled, that vanish outside a block, such as an end marker alone.
        leading: a reader is also tried from the first character of the content on that is no
            whitespace, with the opener "".
        ids: the form of the calls' ids.
        untyped: a value that is no text stands in a call as JSON, and nothing tells its type.
    """

    name: str
    marks: Sequence[str] = ()
    openers: Sequence[str] = ()
    bare: Sequence[str] = ()
    dropped: Sequence[str] = ()
    leading: bool = False
    ids: CallIds = RANDOM
    untyped: bool = False

    @abstractmethod
    def reader(self, opener: str, tools: Tools, marks: Marks) -> CallReader:
        """Return a reader for what follows an opener.

        Args:
            opener: one of `openers`, spelled; "" at the beginning of the content; or the header of
                a message that its frame found to be for a tool, such as "functions.f".
            marks: how markers are shown in the text.
        """

    @abstractmethod
    def spell(self, calls: Sequence[WrittenCall]) -> str:
        """Return calls as the model writes them, spelled, with their openers."""

    @abstractmethod
    def rules(self, tools: Sequence[tuple[str, ToolSchema]], lark: Lark) -> CallRules:
        """Write the rules by which these tools are called.

        Args:
            tools: the name of each and the schema of its arguments. At least one.
            lark: the grammar; rules are added to it.

        Raises:
            NotEnforceable: no grammar can hold this format, or a name cannot stand in it. The
                message goes to the client.
        """
