"""Where the text of an answer goes, by the markers in it: thoughts, content, or nowhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final

from mlxsrv.generation.outputs import Channel
from mlxsrv.text.marks import Marks

Piece = tuple[Channel, str]
"""Text of one channel."""

CONTENT: Final = "content"
REASONING: Final = "reasoning"

_NEWLINES = "\r\n"


class Frame(ABC):
    """The frame of one answer: it is given text and markers in their order.

    Attributes:
        markers: texts as they are shown, that are given to `cross`. They may change with a marker.
        reasoning: the text so far ends inside a thought.
        header: after a marker that ended the header of a message for a tool, whom it is for, such
            as "functions.f"; what follows is read as a call. None after any other marker.
    """

    markers: Sequence[str] = ()
    reasoning: bool = False
    header: str | None = None

    @abstractmethod
    def place(self, text: str) -> Sequence[Piece]:
        """Return the pieces that are certain, none of them empty, of a text without a marker."""

    @abstractmethod
    def cross(self, marker: str) -> Sequence[Piece]:
        """Go on behind a marker; return pieces that are certain now."""

    @abstractmethod
    def leave(self) -> None:
        """A call has ended the thought. Whitespace before it is dropped."""

    @abstractmethod
    def flush(self) -> Sequence[Piece]:
        """Return what waited when the answer ended."""


class FrameFormat(ABC):
    """The way in which a family of models tells its thoughts from its content.

    Attributes:
        name: as the operator names it.
        marks: markers, spelled, that are one token where the vocabulary has them.
        thinks: whether there are thoughts.
        close: what ends a thought at any place in it, spelled, so that content follows: the model's
            own way, with the whitespace that its template writes.
    """

    name: str
    marks: Sequence[str] = ()
    thinks: bool = True
    close: str = ""

    @abstractmethod
    def frame(self, marks: Marks, *, thinking: bool) -> Frame:
        """Return the frame of one answer.

        Args:
            thinking: the prompt leaves a thought open.
        """

    @abstractmethod
    def leaves_open(self, prompt: str) -> bool:
        """Whether a prompt, spelled, ends inside a thought."""


class MarkedThoughts(FrameFormat):
    """Thoughts between a pair of markers, such as `<think>` and `</think>`.

    Args:
        start: the marker that opens a thought.
        end: the marker that closes it.
        close: what ends a thought, if it is more than the marker.
    """

    def __init__(self, name: str, start: str, end: str, close: str = "") -> None:
        self.name = name
        self.marks = (start, end)
        self.close = close or end

    def frame(self, marks: Marks, *, thinking: bool) -> Frame:
        start, end = map(marks.show, self.marks)
        return _MarkedThoughts(start, end, thinking=thinking)

    def leaves_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.marks[0])


class NoThoughts(FrameFormat):
    """All text is content."""

    name = "none"
    thinks = False

    def frame(self, marks: Marks, *, thinking: bool) -> Frame:
        return _MarkedThoughts(None, None, thinking=False)

    def leaves_open(self, prompt: str) -> bool:
        return False


class _MarkedThoughts(Frame):
    """The frame of a pair of markers, which are never given out.

    - Reasoning is given without the newlines after its start marker and the whitespace before its
      end marker. A thought with nothing else in it gives no piece.
    - Content after a thought is given without its leading newlines, and whitespace alone before an
      answer's first marker is not given: GLM writes a newline before it thinks. Content of an
      answer without thoughts is given as it is.
    - A thought may open at any point and more than once. One that never closes is reasoning to the
      end. A start marker inside a thought is dropped: a model may write one though its prompt has
      opened the thought already.
    - An end marker outside a thought is dropped too. The text before it has been sent as content
      and stays content. The text after it is content after a thought.
    """

    def __init__(self, start: str | None, end: str | None, *, thinking: bool) -> None:
        self.markers = tuple(marker for marker in (start, end) if marker is not None)
        self.reasoning = thinking
        self._end = end
        self._space = ""  # whitespace that is dropped if the thought ends here
        # Whitespace with which the answer has begun; None: it has gone on.
        self._lead = "" if start is not None and not thinking else None
        self._trim = thinking  # at the beginning of a thought, or just after one

    def place(self, text: str) -> Sequence[Piece]:
        if self._trim:
            text = text.lstrip(_NEWLINES)
        if not text:
            return ()
        self._trim = False
        return self._place_thought(text) if self.reasoning else self._place_content(text)

    def cross(self, marker: str) -> Sequence[Piece]:
        self._lead = None
        self.reasoning = marker != self._end
        self._trim = True
        if not self.reasoning:
            self._space = ""
        return ()

    def leave(self) -> None:
        self.reasoning = False
        self._space = ""
        self._trim = True

    def flush(self) -> Sequence[Piece]:
        pieces: list[Piece] = []
        if self._lead:
            pieces.append((CONTENT, self._lead))
        if self._space:
            pieces.append((REASONING, self._space))
        self._lead, self._space = None, ""
        return pieces

    def _place_thought(self, text: str) -> Sequence[Piece]:
        body = text.rstrip()
        if not body:
            self._space += text
            return ()
        space, self._space = self._space, text[len(body) :]
        return [(REASONING, space + body)]

    def _place_content(self, text: str) -> Sequence[Piece]:
        if self._lead is not None:
            text = self._lead + text
            self._lead = text if text.isspace() else None
        return [] if self._lead is not None else [(CONTENT, text)]
