"""Reads calls with JSON arguments while they are written: the part that all formats have."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from mlxsrv.text.calls import CallReader
from mlxsrv.text.json_objects import JsonCall
from mlxsrv.text.marks import Marks
from mlxsrv.text.scan import Scanner


class JsonReader(CallReader):
    """Reads a block of calls. A subclass reads what stands between them, and begins each.

    An end marker inside a string of a call belongs to the string if the string is closed before its
    line ends. If it is not, the model forgot to close it and the marker ended the call.

    Args:
        ends: markers that end a call, spelled.
        marks: how markers are shown.
    """

    def __init__(self, ends: Sequence[str], marks: Marks) -> None:
        super().__init__()
        self._marks = marks
        self._ends = Scanner([marks.show(end) for end in ends])
        self._call: JsonCall | None = None  # the call that is read
        self._behind: list[str] = []  # text behind an end marker in a string, while it is in doubt

    @abstractmethod
    def _between(self) -> bool:
        """Take text between calls, or begin one, as `_step` does."""

    @abstractmethod
    def _end_between(self) -> None:
        """Read what is left between calls when the answer ends."""

    def _step(self) -> bool:
        call = self._call
        if call is None:
            return self._between()
        return self._read_doubted(call) if call.doubted else self._read(call)

    def _end(self, cut: bool) -> None:
        call = self._call
        if call is None:
            self._end_between()
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
        text = self._text
        found = self._ends.search(text) if self._ends.start(text) else None
        limit = found[0] if found else len(text) - self._ends.held(text)
        at = call.parse(text[:limit])
        self._text = text[at:]
        self._tell(call)
        if call.over or (found and not call.quoted):
            return self._leave(call)
        if found:
            call.doubt()
            limit = found[1]
            call.parse(text[found[0] : limit])
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
        if call.name is None or self.refused:
            return
        if not self.is_open:
            self._open(self._marks.spell(call.name))
        self._give_spelled(call.pop_arguments())

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
