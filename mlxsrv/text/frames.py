"""Where the text of an answer goes, by the markers in it: thoughts, content, or nowhere."""

from __future__ import annotations

import re
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
_LONGEST_LABEL = 32  # characters


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
        thought: what stands before and behind a thought that the model opens itself, spelled;
            empty if it opens none, or no grammar can hold it.
        answer: what stands before and behind an answer's content, spelled.
        preamble: what stands before and behind content that a call follows, spelled; empty if a
            grammar need not tell it from an answer.
    """

    name: str
    marks: Sequence[str] = ()
    thinks: bool = True
    close: str = ""
    thought: tuple[str, str] = ("", "")
    answer: tuple[str, str] = ("", "")
    preamble: tuple[str, str] = ("", "")

    @property
    def ending(self) -> str:
        """The text at which a thought ends, spelled."""
        return self.thought[1] or self.close.strip()

    @property
    def bound_close(self) -> str:
        """The part of `close` up to the end of the thought, where more follows: a grammar of the
        whole answer says itself what comes then, such as a header."""
        before, end, behind = self.close.partition(self.ending) if self.ending else ("", "", "")
        return before + end if behind.strip() else self.close

    @abstractmethod
    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        """Return the frame of one answer.

        Args:
            thinking: the prompt leaves a thought open.
            prompt: the prompt or its end, spelled, if it is known.
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
        self.marks = self.thought = (start, end)
        self.close = close or end

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        start, end = map(marks.show, self.marks)
        return PairFrame([start], [end], thinking=thinking)

    def leaves_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.marks[0])


class LabelledThoughts(FrameFormat):
    """Thoughts in channels that begin with a label and a newline, as Gemma 4 writes them.

    All channels are thoughts, by whatever label.

    Args:
        start: the marker that opens a channel.
        end: the marker that closes it.
        close: what ends a thought, if it is more than the marker.
        label: the usual one.
        turn: the marker that ends a turn.
    """

    def __init__(
        self, name: str, start: str, end: str, *, close: str, label: str, turn: str
    ) -> None:
        self.name = name
        self.marks = (start, end)
        self.thought = (f"{start}{label}\n", end)
        self.close = close
        self._label = label
        self._turn = turn

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        start, end = map(marks.show, self.marks)
        labelled = thinking and self._is_unlabelled(prompt)
        return _LabelledFrame(start, end, self._label, thinking=thinking, labelled=labelled)

    def leaves_open(self, prompt: str) -> bool:
        start, end = self.marks
        return prompt.rfind(start) > max(prompt.rfind(end), prompt.rfind(self._turn))

    def _is_unlabelled(self, prompt: str) -> bool:
        start = self.marks[0]
        return start in prompt and "\n" not in prompt[prompt.rfind(start) :]


class WrappedAnswers(FrameFormat):
    """Thoughts between a pair of markers, and answers in a wrapper, which vanishes.

    A wrapper that is no token counts where content begins, and its end counts once. Elsewhere it is
    text: an answer may be about it.

    Args:
        start: the marker that opens a thought.
        end: the marker that closes it.
        wrappers: pairs of markers around an answer.
        close: what ends a thought, if it is more than the marker.
        anywhere: the wrappers count everywhere, and one that opens ends a thought.
    """

    def __init__(
        self,
        name: str,
        start: str,
        end: str,
        wrappers: Sequence[tuple[str, str]],
        *,
        close: str = "",
        anywhere: bool = False,
    ) -> None:
        self.name = name
        self.marks = (start, end, *(mark for pair in wrappers for mark in pair))
        self.thought = (start, end)
        self.close = close or end
        self._wrappers = wrappers
        self._anywhere = anywhere

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        wrapped = any(prompt.rstrip().endswith(opened) for opened, _ in self._wrappers)
        frame = _AnywhereFrame if self._anywhere else _WrappedFrame
        return frame(marks, self.marks[:2], self._wrappers, thinking=thinking, wrapped=wrapped)

    def leaves_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(self.marks[0])


class HeadedThoughts(FrameFormat):
    """Thoughts under a heading, and the answer under another one, as Granite 3.2 writes them.

    The headings are plain text. They count only where the answer begins, and then once.

    Args:
        starts: headings of thoughts.
        ends: headings of answers.
    """

    def __init__(self, name: str, starts: Sequence[str], ends: Sequence[str]) -> None:
        self.name = name
        self.close = f"\n\n{ends[0]}\n"
        self._starts = starts
        self._ends = ends

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        return _HeadedFrame(self._starts, self._ends, thinking=thinking)

    def leaves_open(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(tuple(self._starts))


class NoThoughts(FrameFormat):
    """All text is content."""

    name = "none"
    thinks = False

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        return PairFrame((), (), thinking=False)

    def leaves_open(self, prompt: str) -> bool:
        return False


class PairFrame(Frame):
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

    Args:
        starts: markers that open a thought.
        ends: markers that close it.
        thinking: a thought is open.
    """

    def __init__(self, starts: Sequence[str], ends: Sequence[str], *, thinking: bool) -> None:
        self.markers = (*starts, *ends)
        self.reasoning = thinking
        self._starts = starts
        self._space = ""  # whitespace that is dropped if the thought ends here
        # Whitespace with which the answer has begun; None: it has gone on.
        self._lead = "" if starts and not thinking else None
        self._trim = thinking  # at the beginning of a thought, or just after one

    def place(self, text: str) -> Sequence[Piece]:
        if self._trim:
            text = text.lstrip(_NEWLINES)
        if not text:
            return ()
        self._trim = False
        return self._place_thought(text) if self.reasoning else self._place_content(text)

    def cross(self, marker: str) -> Sequence[Piece]:
        if marker in self._starts:
            self.think()
        else:
            self.leave()
        return ()

    def think(self) -> None:
        """A thought begins, or goes on."""
        self._lead = None
        self.reasoning = True
        self._trim = True

    def leave(self) -> None:
        self._lead = None
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


class _LabelledFrame(PairFrame):
    """The frame of channels that begin with a label, which is not given out.

    A label is the first line of a channel if it is one word. The usual one needs no newline.
    """

    def __init__(self, start: str, end: str, label: str, *, thinking: bool, labelled: bool) -> None:
        super().__init__([start], [end], thinking=thinking)
        self._usual = re.compile(rf"\s*{re.escape(label)}\b\s*")
        self._label: str | None = "" if labelled else None  # what may be the label

    def place(self, text: str) -> Sequence[Piece]:
        if self._label is not None:
            text = self._skip_label(self._label + text)
        return super().place(text)

    def think(self) -> None:
        super().think()
        self._label = ""

    def leave(self) -> None:
        super().leave()
        self._label = None

    def flush(self) -> Sequence[Piece]:
        self._label = None
        return super().flush()

    def _skip_label(self, text: str) -> str:
        """Return a text without the label that it begins with; nothing while that may go on."""
        line, newline, rest = text.partition("\n")
        word = line.strip()
        may_be_label = len(line) <= _LONGEST_LABEL and (
            not word or (word.isascii() and word.isidentifier())
        )
        self._label = text if may_be_label and not newline else None
        if may_be_label:
            return rest
        return self._usual.sub("", text, count=1) if self._usual.match(text) else text


class _WrappedFrame(PairFrame):
    """The frame of a pair of markers, with wrappers around the answer.

    Args:
        pair: the markers of thoughts, spelled.
        wrappers: pairs of markers, spelled.
        wrapped: the prompt has opened a wrapper.
    """

    def __init__(
        self,
        marks: Marks,
        pair: Sequence[str],
        wrappers: Sequence[tuple[str, str]],
        *,
        thinking: bool,
        wrapped: bool,
    ) -> None:
        start, end = map(marks.show, pair)
        super().__init__([start], [end], thinking=thinking)
        self._marks = marks
        self._pair = self.markers
        self._opens = [marks.show(opened) for opened, _ in wrappers]
        self.markers = (*self._pair, *(marks.show(mark) for both in wrappers for mark in both))
        self._depth = int(wrapped)  # of wrappers that are open
        self._fresh = not wrapped  # content has not begun, so it may be wrapped
        self._tail = ""  # whitespace that is dropped if the wrapper ends here

    def cross(self, marker: str) -> Sequence[Piece]:
        if marker in self._pair:
            tail, self._tail = "" if self._fresh else self._tail, ""
            self._fresh = True
            super().cross(marker)
            return [(CONTENT, tail)] if tail else ()
        opens = marker in self._opens
        if not self._counts(opens=opens):
            return self.place(self._marks.spell(marker))
        self._fresh = False
        self._tail = ""
        if opens or not self.reasoning:
            self.leave()
        return ()

    def _counts(self, *, opens: bool) -> bool:
        """Note a marker of a wrapper; return whether it is one, and no text."""
        if self.reasoning:
            return False
        if opens:
            self._depth += self._fresh or self._depth > 0
            return self._fresh
        closes = self._depth == 1
        self._depth = max(self._depth - 1, 0)
        return closes

    def flush(self) -> Sequence[Piece]:
        tail, self._tail = self._tail, ""
        return [(CONTENT, tail)] if tail else super().flush()

    def _place_content(self, text: str) -> Sequence[Piece]:
        body = text.rstrip()
        if not body and (self._fresh or self._depth):
            self._tail += text
            return ()
        self._fresh = False
        before, self._tail = self._tail, text[len(body) :] if self._depth else ""
        return super()._place_content(before + text.removesuffix(self._tail))


class _AnywhereFrame(_WrappedFrame):
    """The frame of wrappers that are tokens: none of them is text."""

    def _counts(self, *, opens: bool) -> bool:
        self._depth = int(opens)
        return True


class _HeadedFrame(PairFrame):
    """The frame of headings, which are text but where the answer begins."""

    def cross(self, marker: str) -> Sequence[Piece]:
        begins = self._lead is not None  # nothing but whitespace stands before
        if begins or (self.reasoning and marker not in self._starts):
            return super().cross(marker)
        return self.place(marker)

    def place(self, text: str) -> Sequence[Piece]:
        return super().place(text.lstrip() if self._trim else text)
