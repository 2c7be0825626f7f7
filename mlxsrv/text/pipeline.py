"""The stages of one answer together: from its token ids to the parts that are sent."""

from collections.abc import Iterable, Sequence

from mlxsrv.text.calls import CallFault
from mlxsrv.text.channels import Channels
from mlxsrv.text.frames import CONTENT, Piece
from mlxsrv.text.reader import OutputPart, ToolArguments, ToolOpened
from mlxsrv.text.stage import Stage
from mlxsrv.text.stops import StopStrings
from mlxsrv.text.tools import ToolCalls


class TextPipeline(Stage[Sequence[int], list[OutputPart]]):
    """Detokenizer, then channels, then tool calls, then stop strings.

    Tools are called in content, and stop strings apply to the rest of the content. They do not
    apply to reasoning: a stop string found there, such as a blank line, would end the answer before
    it began. Content that waits for the rest of a stop string is still held back while a think
    block or a call is sent, so it can come out after them.

    The caller removes the tokens that end an answer; every id given here counts.

    Args:
        min_tokens: before so many ids no stop string ends the answer.

    Attributes:
        tokens: ids consumed, including the one that completed a stop string.
        reasoning_tokens: those of them inside a think block, markers included.
        calls: tool calls given; calls after a stop string do not count.
        stopped: a stop string was found, or the only call that may be made is over; nothing is
            consumed or given any more.
    """

    __slots__ = (
        "_channels",
        "_detokenizer",
        "_min_tokens",
        "_stops",
        "_tools",
        "_undecided",
        "calls",
        "reasoning_tokens",
        "stopped",
        "tokens",
    )

    def __init__(
        self,
        detokenizer: Stage[int, str],
        channels: Channels | None = None,
        stops: StopStrings | None = None,
        tools: ToolCalls | None = None,
        *,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = detokenizer
        self._channels = channels
        self._stops = stops
        self._tools = tools
        self._min_tokens = min_tokens
        self._undecided = 0  # ids that may be the beginning of a start marker
        self.calls = 0
        self.tokens = 0
        self.reasoning_tokens = 0
        self.stopped = False

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stops.matched if self._stops is not None else None

    @property
    def broken(self) -> Sequence[int]:
        """The numbers of tool calls that are over and not complete."""
        return self._tools.broken if self._tools is not None else ()

    @property
    def fragment(self) -> str:
        """After a flush, the text of a tool call that the answer ended in."""
        return self._tools.fragment if self._tools is not None else ""

    @property
    def faults(self) -> Sequence[CallFault]:
        """The faults of tool calls."""
        return self._tools.faults if self._tools is not None else ()

    @property
    def aside(self) -> bool:
        """Whether the text so far ends inside a think block or a call."""
        return (self._channels is not None and self._channels.reasoning) or (
            self._tools is not None and self._tools.inside
        )

    def feed(self, token_ids: Sequence[int]) -> list[OutputPart]:
        """Return the parts that are certain, in order; neighbours are of different kinds."""
        pieces: list[OutputPart] = []
        for token_id in token_ids:
            if self.stopped:
                break
            self.tokens += 1
            text = self._detokenizer.feed(token_id)
            if self._channels is not None:
                self._send(self._separate(self._channels, text), pieces)
            else:
                self._send(_content(text), pieces)
        return pieces if len(pieces) < 2 else _merge(pieces)

    def flush(self, *, cut: bool = False) -> list[OutputPart]:
        if self.stopped:
            return []
        pieces: list[OutputPart] = []
        text = self._detokenizer.flush()
        if self._channels is not None:
            self._send([*self._channels.feed(text), *self._channels.flush(cut=cut)], pieces)
        else:
            self._send(_content(text), pieces)
        if self._tools is not None:
            self._pass(self._tools.flush(cut=cut), pieces)
        if self._stops is not None and not self.stopped:
            pieces.extend(_content(self._stops.flush()))
        return _merge(pieces)

    def _separate(self, channels: Channels, text: str) -> list[Piece]:
        """Feed the text of one token to the channels, and count the token if it is reasoning."""
        inside = channels.reasoning
        pieces = channels.feed(text)
        if inside or channels.reasoning:
            self.reasoning_tokens += 1 + self._undecided
            self._undecided = 0
        elif channels.holding:
            self._undecided += 1
        else:
            self._undecided = 0
        return pieces

    def _send(self, source: Iterable[Piece], pieces: list[OutputPart]) -> None:
        """Append the parts that tool calls and stop strings leave of `source`."""
        if self._tools is None and self._stops is None:
            pieces.extend(source)
            return
        for channel, text in source:
            if channel != CONTENT:
                pieces.append((channel, text))
                continue
            self._pass([text] if self._tools is None else self._tools.feed(text), pieces)
            if self._tools is not None and self._tools.done:
                self.stopped = True
            if self.stopped:
                return

    def _pass(
        self, source: Iterable[str | ToolOpened | ToolArguments], pieces: list[OutputPart]
    ) -> None:
        """Append calls as they are, and content as far as stop strings let it pass."""
        for part in source:
            if not isinstance(part, str):
                self.calls += isinstance(part, ToolOpened)
                pieces.append(part)
                continue
            text = part if self._stops is None else self._scan(self._stops, part)
            if text:
                pieces.append((CONTENT, text))
            if self._stops is not None and self._stops.matched is not None:
                self.stopped = True
                return

    def _scan(self, stops: StopStrings, text: str) -> str:
        """Return the text before a stop string; within `min_tokens` a stop string is text."""
        return stops.feed(text) if self.tokens > self._min_tokens else stops.skip(text)


def _content(text: str) -> list[Piece]:
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
