"""The stages of one answer together: from its token ids to the parts that are sent."""

from collections.abc import Iterable, Sequence

from mlxsrv.text.call_formats.calls import CallFault
from mlxsrv.text.frames import CONTENT
from mlxsrv.text.reader import AnswerReader, OutputPart, ToolArguments, ToolOpened
from mlxsrv.text.repetition import RepetitionGuard
from mlxsrv.text.stage import Stage
from mlxsrv.text.stops import StopStrings


class TextPipeline(Stage[Sequence[int], list[OutputPart]]):
    """Detokenizer, then the reader of thoughts and calls, then stop strings.

    Stop strings apply to content without its calls. They do not apply to reasoning: a stop string
    found there, such as a blank line, would end the answer before it began. Content that waits for
    the rest of a stop string is still held back while a thought or a call is sent, so it can come
    out after them.

    The caller removes the tokens that end an answer; every id given here counts.

    Args:
        reader: without one, all text is content.
        min_tokens: before so many ids no stop string ends the answer.
        guard: ends the answer when it repeats itself.

    Attributes:
        tokens: ids consumed, including the one that completed a stop string.
        reasoning_tokens: those of them inside a thought, markers included.
        calls: tool calls given; calls after a stop string do not count.
        stopped: a stop string was found, the only call that may be made is over, or the answer
            repeats itself; nothing is consumed or given any more.
    """

    __slots__ = (
        "_detokenizer",
        "_guard",
        "_min_tokens",
        "_reader",
        "_stops",
        "_undecided",
        "calls",
        "reasoning_tokens",
        "stopped",
        "tokens",
    )

    def __init__(
        self,
        detokenizer: Stage[int, str],
        reader: AnswerReader | None = None,
        stops: StopStrings | None = None,
        *,
        min_tokens: int = 0,
        guard: RepetitionGuard | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._guard = guard
        self._reader = reader
        self._stops = stops
        self._min_tokens = min_tokens
        self._undecided = 0  # ids of which it is not certain whether they are reasoning
        self.calls = 0
        self.tokens = 0
        self.reasoning_tokens = 0
        self.stopped = False

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched if self._stops is not None else None

    @property
    def repeated(self) -> bool:
        """Whether the answer repeats itself."""
        return self._guard is not None and self._guard.found

    @property
    def broken(self) -> Sequence[int]:
        """The numbers of tool calls that are over and not complete."""
        return self._reader.broken if self._reader is not None else ()

    @property
    def fragment(self) -> str:
        """After a flush, the text of a tool call that the answer ended in."""
        return self._reader.fragment if self._reader is not None else ""

    @property
    def faults(self) -> Sequence[CallFault]:
        """The faults of tool calls."""
        return self._reader.faults if self._reader is not None else ()

    @property
    def reasoning(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._reader is not None and self._reader.reasoning

    @property
    def header(self) -> str | None:
        """The header of a message for a tool that the text so far ends with."""
        return None if self._reader is None else self._reader.header

    @property
    def aside(self) -> bool:
        """Whether the text so far ends inside a thought or a call."""
        return self._reader is not None and (self._reader.reasoning or self._reader.inside)

    def feed(self, token_ids: Sequence[int]) -> list[OutputPart]:
        """Return the parts that are certain, in order; neighbours are of different kinds."""
        parts: list[OutputPart] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            text = self._detokenizer.feed(token_id)
            self._pass(_content(text) if self._reader is None else self._read(text), parts)
            if self._guard is not None and not self.stopped:
                self._guard.feed(token_id)
                if self._guard.found:
                    parts += self.flush(cut=True)
                    self.stopped = True
        return parts if len(parts) < 2 else _merge(parts)

    def flush(self, *, cut: bool = False) -> list[OutputPart]:
        if self.stopped:
            return []
        parts: list[OutputPart] = []
        text = self._detokenizer.flush()
        reader = self._reader
        if reader is None:
            self._pass(_content(text), parts)
        else:
            self._pass([*reader.feed(text), *reader.flush(cut=cut)], parts)
        if self._stops is not None and not self.stopped:
            parts.extend(_content(self._stops.flush()))
        return _merge(parts)

    def _read(self, text: str) -> list[OutputPart]:
        """Feed the text of one token to the reader, and count the token if it is reasoning."""
        reader = self._reader
        assert reader is not None
        inside = reader.reasoning
        parts = reader.feed(text)
        if inside or reader.reasoning:
            self.reasoning_tokens += 1 + self._undecided
            self._undecided = 0
        elif reader.holding:
            self._undecided += 1
        else:
            self._undecided = 0
        return parts

    def _pass(self, source: Iterable[OutputPart], parts: list[OutputPart]) -> None:
        """Append parts, and content as far as stop strings let it pass."""
        for part in source:
            if not isinstance(part, tuple):
                self.calls += isinstance(part, ToolOpened)
                parts.append(part)
            elif self._stops is None or part[0] != CONTENT:
                parts.append(part)
            else:
                parts.extend(_content(self._scan(self._stops, part[1])))
                if self._stops.matched is not None:
                    self.stopped = True
                    return
        self.stopped = self._reader is not None and self._reader.done

    def _scan(self, stops: StopStrings, text: str) -> str:
        """Return the text before a stop string; within `min_tokens` a stop string is text."""
        return stops.feed(text) if self.tokens > self._min_tokens else stops.skip(text)


def _content(text: str) -> list[OutputPart]:
    return [(CONTENT, text)] if text else []


def _merge(pieces: list[OutputPart]) -> list[OutputPart]:
    merged: list[OutputPart] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        match last, piece:
            case (str(), str()), (str(), str()) if last[0] == piece[0]:
                merged[-1] = (last[0], last[1] + piece[1])
            case ToolArguments(), ToolArguments() if last.index == piece.index:
                merged[-1] = ToolArguments(last.index, last.text + piece.text)
            case _:
                merged.append(piece)
    return merged
