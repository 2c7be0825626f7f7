"""Formats in which an answer is one or more messages, each with a header that says what it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from mlxsrv.text.frames import Frame, FrameFormat, PairFrame, Piece
from mlxsrv.text.marks import SPELLED, Marks
from mlxsrv.text.scan import Scanner

_LONGEST = 256  # characters of a header; what is longer is text
_ROLE = "assistant"
_CHANNELS = ("analysis", "commentary", "final")
_WORDS = (_ROLE, *_CHANNELS)
_ASIDE = ("analysis", "self")  # the channel of thoughts, and their recipient
_ANY_ROLE = re.compile(r"\s*[\w.:-]+")
_TO = "to="
_RECIPIENT = re.compile(r"to=([\w./:-]+)")
_NO_TOOLS = ("", "all", "assistant", "commentary", "functions", "user")
_BUILT_IN = ("browser", "container", "python")  # tools that a model knows without being told

_Destination = Literal["thought", "content", "call"]


class _Message(msgspec.Struct, frozen=True):
    """Facts of a message, by its header.

    Attributes:
        destination: whether it is a thought, content, or for a tool.
        recipient: the tool.
    """

    destination: _Destination
    recipient: str = ""


class HeadedMessages(FrameFormat):
    """Answers in messages with a header, as harmony and Muse write them.

    Args:
        start: the marker that opens a message; the prompt has written the first.
        text: the marker behind a header.
        ends: markers that end a message.
        parts: markers inside a header: before the channel, and before the type of the text.
        thought: what stands before a thought, behind the role.
        close: what ends a thought.
        preamble: what stands before content that a call follows, behind the role.
    """

    def __init__(
        self,
        name: str,
        start: str,
        text: str,
        ends: Sequence[str],
        parts: Sequence[str],
        *,
        thought: str,
        close: str,
        preamble: str,
    ) -> None:
        self.name = name
        self.marks = (start, text, *ends, *parts)
        self.close = close
        end = f"{ends[0]}{start}{_ROLE}"
        self.thought = (thought, end)
        self.answer = (close.removeprefix(end), "")
        self.preamble = (preamble, end)
        self._ends = ends
        self._parts = parts
        self._thought = thought

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        start, text = map(marks.show, self.marks[:2])
        ends, parts = map(marks.show, self._ends), map(marks.show, self._parts)
        frame = _MessageFrame(start, text, tuple(ends), tuple(parts), Scanner(self.marks))
        begun = self._thought if thinking and not prompt else self._find_message(prompt)
        frame.go_on(marks.show(begun))
        return frame

    def leaves_open(self, prompt: str) -> bool:
        return self.frame(SPELLED, thinking=False, prompt=prompt).reasoning

    def _find_message(self, prompt: str) -> str:
        """Return the part of the answer's first message that the prompt has."""
        _, start, message = prompt.rpartition(self.marks[0])
        return start and message.removeprefix(_ROLE)


class _MessageFrame(Frame):
    """The frame of an answer in messages.

    Models write headers that are not quite right. So a header is read as far as it can be: the last
    channel that is known counts, and the last recipient. Where one may begin without a marker, at
    the beginning and between messages, text waits while it may be one.

    A message to a tool that models know without being told is a thought, unless a tool of the
    request has this very name. So is one in another role than the model's: a result that it has
    made up.

    Args:
        start: the marker that opens a message.
        text: the marker behind a header.
        ends: markers that end a message.
        parts: markers inside a header.
        spelled: finds the beginning of a marker that was not written to its end.
    """

    def __init__(
        self,
        start: str,
        text: str,
        ends: Sequence[str],
        parts: Sequence[str],
        spelled: Scanner,
    ) -> None:
        self.markers = (start, text, *ends, *parts)
        self._spelled = spelled
        self._start = start
        self._text = text
        self._ends = ends
        self._channel = parts[0] if parts else None
        self._channels = PairFrame((), (), thinking=False)
        self._header: list[str] | None = [""]  # its parts; None: inside a message
        self._marked = False  # the header began with a marker, so it is one
        self._first = True  # no message has begun

    def go_on(self, prompt: str) -> None:
        """Read the beginning of a message, as shown, which the prompt has."""
        markers = Scanner(self.markers)
        while prompt:
            start, end = markers.search(prompt) or (len(prompt), len(prompt))
            if self._header is not None:
                self.place(prompt[:start])
            if start < end:
                self.cross(prompt[start:end])
            prompt = prompt[end:]
        self.header = None

    def place(self, text: str) -> Sequence[Piece]:
        if self._header is None:
            return self._channels.place(text)
        for place, character in enumerate(text, 1):  # what is no header does not hang on the split
            self._header[-1] += character
            if not self._may_go_on(self._header):
                return [*self._end_header(), *self._channels.place(text[place:])]
        return ()

    def cross(self, marker: str) -> Sequence[Piece]:
        self.header = None
        if marker == self._text:
            return () if self._header is None else self._begin(_read_header(self._header))
        if marker == self._start or marker in self._ends:
            pieces = () if self._header is None else self._end_header()
            self._begin_header(marked=marker == self._start)
            return pieces
        if self._header is not None:
            self._marked = True
            self._header.append("")
        elif marker == self._channel:  # the end of the message before is missing
            self._begin_header(marked=True)
            self._header = ["", ""]
        return ()

    def leave(self) -> None:
        self._begin(_Message("content"))

    def flush(self) -> Sequence[Piece]:
        pieces = () if self._header is None else self._end_header()
        return [*pieces, *self._channels.flush()]

    def _may_go_on(self, header: Sequence[str]) -> bool:
        """Whether the text that waits may be part of a header so far."""
        if len(header) > 1 or len(header[0]) > _LONGEST:
            return sum(map(len, header)) <= _LONGEST
        text = header[0][: len(header[0]) - self._spelled.held(header[0])]
        if _may_be_header(text):
            return True
        return self._marked and _may_be_header(_ANY_ROLE.sub("", text, count=1))

    def _begin_header(self, *, marked: bool) -> None:
        self._header = [""]
        self._marked = marked
        self._first = False
        self.reasoning = False

    def _begin(self, message: _Message) -> Sequence[Piece]:
        self._header = None
        self._first = False
        self.header = message.recipient or None
        self.reasoning = message.destination == "thought"
        if self.reasoning:
            self._channels.think()
        else:
            self._channels.leave()
        return ()

    def _end_header(self) -> Sequence[Piece]:
        """Go on without a header's last marker; return the text that is no header."""
        header = self._header or [""]
        text = header[-1]
        if len(header) > 1:
            text = _skip_header(text, typed=True)
        elif (self._marked or not self._first) and self._may_go_on(header):
            text = ""
        elif self._marked:
            text = _skip_header(text, typed=False)
        self._begin(_read_header(header) if self._marked else _Message("content"))
        self.header = None
        return self._channels.place(text) if text else ()


def _may_be_header(text: str) -> bool:
    """Whether a text without a marker may be part of a header so far."""
    words = text.split()
    last = words.pop() if words and not text[-1].isspace() else ""
    if not all(word in _WORDS or word.startswith(_TO) for word in words):
        return False
    return last.startswith(_TO) or any(word.startswith(last) for word in (*_WORDS, _TO))


def _skip_header(text: str, *, typed: bool) -> str:
    """Return the text behind a header without its last marker.

    Args:
        typed: one word may be the type of the text that follows.
    """
    rest = text.lstrip().removeprefix(_ROLE).lstrip()
    while rest and (word := rest.split(maxsplit=1)[0]):
        if word not in _WORDS and not word.startswith(_TO):
            break
        rest = rest[len(word) :].lstrip()
    return rest if not typed or len(rest.split(maxsplit=1)) > 1 else ""


def _read_header(parts: Sequence[str]) -> _Message:
    words = [word for part in parts for word in part.split()]
    channel = next((word for word in reversed(words) if word in _CHANNELS), "")
    recipients = [name.rstrip("./:-") for part in parts for name in _RECIPIENT.findall(part)]
    recipient = next((name for name in reversed(recipients) if name not in _NO_TOOLS), "")
    role = parts[0].split(maxsplit=1)[:1]
    if role and not role[0].startswith((*_WORDS, _TO)):
        return _Message("thought")
    if not recipient or recipient in _ASIDE:
        aside = channel in _ASIDE or recipient in _ASIDE
        return _Message("thought" if aside else "content")
    owner, _, part = recipient.partition(".")
    if owner in _BUILT_IN:
        return _Message("thought", "" if part else recipient)
    return _Message("call", recipient)


class TaggedMessages(FrameFormat):
    """Answers in tags of tokens, as Kimi K3 writes them.

    `open` name `sep` begins an element, `close` name `sep` ends it. The element `think` is a
    thought, `response` content, and `tools` has calls.

    Args:
        open: the marker that begins a tag.
        close: the marker that begins a tag which ends an element.
        sep: the marker that ends a tag.
        end: the marker that ends a turn.
    """

    def __init__(self, name: str, open: str, close: str, sep: str, end: str) -> None:
        self.name = name
        self.marks = (open, close, sep, end)
        self._thought = f"{open}think{sep}"
        self.thought = (self._thought, f"{close}think{sep}")
        self.answer = (f"{open}response{sep}", f"{close}response{sep}")
        self.close = f"{close}think{sep}{open}response{sep}"

    def frame(self, marks: Marks, *, thinking: bool, prompt: str = "") -> Frame:
        return _TagFrame(*map(marks.show, self.marks), thinking=thinking)

    def leaves_open(self, prompt: str) -> bool:
        _, thought, rest = prompt.rpartition(self._thought)
        return bool(thought) and not any(mark in rest for mark in self.marks)


class _TagFrame(Frame):
    """The frame of an answer in tags.

    A model may write its answer into the thought that its prompt has opened. Only the end of a
    `response` that it never began tells so. Then the text is given again, as content: what was
    given as a thought cannot be taken back, and an answer without content would be none.
    """

    def __init__(self, open: str, close: str, sep: str, end: str, *, thinking: bool) -> None:
        self.markers = (open, close, sep, end)
        self._open = open
        self._sep = sep
        self._end = end
        self._tag: str | None = None  # the text of a tag that is being written
        self._opening = False  # that tag begins an element
        self._channels = PairFrame((), (), thinking=thinking)
        self._thought: list[str] = []  # the text of the thought that is open
        self._answered = False  # a response was begun
        self._inside = True  # in a thought or a response, or in what is neither and no gap
        self._gap = ""  # whitespace between elements
        self.reasoning = thinking

    def place(self, text: str) -> Sequence[Piece]:
        if self._tag is None:
            return self._give(text)
        self._tag += text
        return () if len(self._tag) <= _LONGEST else self._end_tag()

    def cross(self, marker: str) -> Sequence[Piece]:
        self.header = None
        if marker == self._sep:
            return () if self._tag is None else self._read_tag(self._tag.strip())
        pieces = () if self._tag is None else self._end_tag()
        self._opening = marker == self._open
        self._tag = None if marker == self._end else ""
        return pieces

    def leave(self) -> None:
        self._go_on(thinking=False, inside=False)

    def flush(self) -> Sequence[Piece]:
        pieces = () if self._tag is None else self._end_tag()
        return [*pieces, *self._channels.flush()]

    def _give(self, text: str) -> Sequence[Piece]:
        if self.reasoning and not self._answered:
            self._thought.append(text)
        if not self._inside:
            self._gap += text
            if self._gap.isspace():
                return ()
            text, self._gap, self._inside = self._gap, "", True
        return self._channels.place(text)

    def _end_tag(self) -> Sequence[Piece]:
        """Go on without the end of a tag; what has more than a name and attributes is text."""
        tag, self._tag = self._tag or "", None
        name, _, rest = tag.strip().partition(" ")
        return self._give(tag) if (rest and "=" not in rest) or "\n" in name else ()

    def _read_tag(self, tag: str) -> Sequence[Piece]:
        self._tag = None
        name = tag.partition(" ")[0]
        if self._opening and name in ("tools", "call"):
            self.header = tag
            self._inside, self._gap = False, ""
        elif self._opening and name in ("think", "response"):
            self._answered = name == "response"
            self._thought.clear()
            self._go_on(thinking=name == "think", inside=True)
        elif not self._opening and name == "response" and self.reasoning:
            self._go_on(thinking=False, inside=False)
            return () if self._answered else self._channels.place("".join(self._thought))
        elif not self._opening:
            self._go_on(thinking=False, inside=False)
        return ()

    def _go_on(self, *, thinking: bool, inside: bool) -> None:
        self.reasoning = thinking
        self._inside, self._gap = inside, ""
        if thinking:
            self._channels.think()
        else:
            self._channels.leave()
