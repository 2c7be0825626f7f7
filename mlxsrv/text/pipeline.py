"""Token ids of one answer to the pieces of text that are sent."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Protocol

from mlxsrv.text.channels import CONTENT, Channels, Piece
from mlxsrv.text.stops import StopStrings


class TokenStage(Protocol):
    """A detokenizer: the text that an id completes, and at the end what still waited."""

    def feed(self, token_id: int, /) -> str: ...
    def flush(self) -> str: ...


class TextPipeline:
    """Detokenizer, then channels, then stop strings.

    Stop strings apply to content only. They are written for the answer: one that is found in the
    reasoning, such as a blank line, would end the answer before it began. Content that waits for a
    stop string goes on waiting across a think block, so it may come after that block's reasoning.

    The tokens that end an answer are the caller's to remove; every id given here counts.

    - `tokens`: ids consumed, the last one that which completed a stop string.
    - `reasoning_tokens`: those of them inside a think block, markers included.
    - `stopped`: a stop string was found; nothing is consumed or given any more.
    """

    __slots__ = (
        "_channels",
        "_detokenizer",
        "_stops",
        "_undecided",
        "reasoning_tokens",
        "stopped",
        "tokens",
    )

    def __init__(
        self,
        detokenizer: TokenStage,
        channels: Channels | None = None,
        stops: StopStrings | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._channels = channels
        self._stops = stops
        self._undecided = 0  # ids that may turn out to be the beginning of a start marker
        self.tokens = 0
        self.reasoning_tokens = 0
        self.stopped = False

    def feed(self, token_ids: Sequence[int]) -> list[Piece]:
        """The pieces that are safe to send, in order; neighbours differ in their channel."""
        pieces: list[Piece] = []
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

    def flush(self) -> list[Piece]:
        """What still waited when the answer ended."""
        if self.stopped:
            return []
        pieces: list[Piece] = []
        text = self._detokenizer.flush()
        if self._channels is not None:
            self._send([*self._channels.feed(text), *self._channels.flush()], pieces)
        else:
            self._send(_content(text), pieces)
        if self._stops is not None:
            pieces.extend(_content(self._stops.flush()))
        return _merge(pieces)

    def _separate(self, channels: Channels, text: str) -> list[Piece]:
        """Feed the text of one token to the channels, and count it for reasoning if it is so."""
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

    def _send(self, source: Iterable[Piece], pieces: list[Piece]) -> None:
        """Append what the stop strings let pass of `source`."""
        stops = self._stops
        if stops is None:
            pieces.extend(source)
            return
        for channel, text in source:
            if channel == CONTENT:
                text = stops.feed(text)
            if text:
                pieces.append((channel, text))
            if stops.matched is not None:
                self.stopped = True
                return


def _content(text: str) -> list[Piece]:
    return [(CONTENT, text)] if text else []


def _merge(pieces: list[Piece]) -> list[Piece]:
    runs = groupby(pieces, key=itemgetter(0))
    return [(channel, "".join(text for _, text in run)) for channel, run in runs]
