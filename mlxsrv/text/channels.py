"""Tells a model's reasoning from its content by the markers around the reasoning."""

from typing import Final, Literal

from mlxsrv.text.scan import Scanner

Channel = Literal["content", "reasoning"]
Piece = tuple[Channel, str]

CONTENT: Final = "content"
REASONING: Final = "reasoning"

_NEWLINES = "\r\n"
_NO_MARKERS = Scanner([])


class Channels:
    """Cuts text at the think markers, which never come out, not even in part.

    - Reasoning comes without the newlines after its start marker and without the whitespace
      before its end marker; a block with nothing else in it gives no piece.
    - Content that follows a block comes without its leading newlines; content of an answer that
      never thought comes as it is.
    - A block may open at any point and more than once. One that never closes is reasoning to the
      end. A start marker inside a block, as a model writes whose prompt had already opened one, is
      dropped.
    - An end marker outside a block is dropped too. What came before it has been sent as content
      and stays content; what follows is content that follows a block.

    `thinking` says that the prompt itself opened a block. Without markers all text is content. An
    answer that is `bound` by a grammar has no block but that one: what looks like a marker in it,
    the grammar asked for.
    `reasoning` tells whether the text fed so far ends inside a block.
    """

    __slots__ = ("_bound", "_end", "_held", "_markers", "_space", "_trim", "reasoning")

    def __init__(
        self, start: str | None, end: str | None, *, thinking: bool, bound: bool = False
    ) -> None:
        markers = [marker for marker in (start, end) if marker is not None]
        self._markers = _NO_MARKERS if bound and not thinking else Scanner(markers)
        self._end = end
        self._bound = bound
        self._held = ""  # may be the beginning of a marker
        self._space = ""  # whitespace that is dropped if the block ends here
        self.reasoning = thinking and (start is not None or end is not None)
        self._trim = self.reasoning  # at the beginning of a block, or just after one

    @property
    def holding(self) -> bool:
        """Whether the text fed so far ends in what may be the beginning of a marker."""
        return bool(self._held)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are settled, in order, none of them empty."""
        if not text:
            return []
        if not self._held and not self._trim and not self._markers.start(text):
            if not self.reasoning:
                return [(CONTENT, text)]
            if not self._space and not text[-1].isspace():
                return [(REASONING, text)]
        return self._split(self._held + text)

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """What waited for a marker that never came. Of an answer that was `cut` off, more than one
        character of a marker is taken for one."""
        pieces: list[Piece] = []
        self._settle("" if cut and len(self._held) > 1 else self._held, pieces)
        if self._space:
            pieces.append((REASONING, self._space))
        self._held = self._space = ""
        return pieces

    def _split(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while found := self._markers.find(text):
            start, end = found
            self._settle(text[:start], pieces)
            self._cross(text[start:end])
            text = text[end:]
        settled = len(text) - self._markers.held(text)
        self._held = text[settled:]
        self._settle(text[:settled], pieces)
        return pieces

    def _cross(self, marker: str) -> None:
        self.reasoning = marker != self._end
        self._trim = True
        if not self.reasoning:
            self._space = ""
            if self._bound:
                self._markers = _NO_MARKERS

    def _settle(self, text: str, pieces: list[Piece]) -> None:
        """Append what `text`, which has no marker in it, adds to the channel that is open."""
        if self._trim:
            text = text.lstrip(_NEWLINES)
        if not text:
            return
        self._trim = False
        if not self.reasoning:
            pieces.append((CONTENT, text))
            return
        body = text.rstrip()
        if not body:
            self._space += text
            return
        pieces.append((REASONING, self._space + body))
        self._space = text[len(body) :]
