"""Separates a model's reasoning from its content, by the markers around the reasoning."""

from mlxsrv.text.frames import CONTENT, REASONING, Piece
from mlxsrv.text.scan import Scanner
from mlxsrv.text.stage import Stage

_NEWLINES = "\r\n"
_NO_MARKERS = Scanner([])


class Channels(Stage[str, list[Piece]]):
    """Splits text at the think markers, which are never given out, not even in part.

    - Reasoning is given without the newlines after its start marker and the whitespace before its
      end marker. A block with nothing else in it gives no piece.
    - Content after a block is given without its leading newlines, and whitespace alone before an
      answer's first marker is not given: GLM writes a newline before it thinks. Content of an
      answer without blocks is given as it is.
    - A block may open at any point and more than once. A block that never closes is reasoning to
      the end. A start marker inside a block is dropped: a model may write one though its prompt has
      opened the block already.
    - An end marker outside a block is dropped too. The text before it has been sent as content and
      stays content. The text after it is content after a block.

    Args:
        start: the marker that opens a block; without markers all text is content.
        end: the marker that closes it.
        thinking: the prompt itself opened a block.
        bound: the answer follows a grammar. It has no block but the prompt's, and what looks like a
            marker is text that the grammar asked for.

    Attributes:
        reasoning: whether the text so far ends inside a block.
    """

    __slots__ = ("_bound", "_end", "_held", "_lead", "_markers", "_space", "_trim", "reasoning")

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
        # Whitespace with which the answer has begun; None: it has gone on.
        self._lead = "" if start is not None and not thinking and not bound else None
        self._trim = self.reasoning  # at the beginning of a block, or just after one

    @property
    def holding(self) -> bool:
        """Whether the text so far ends in what may be the beginning of a marker."""
        return bool(self._held)

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are certain, none of them empty."""
        if not text:
            return []
        settled = self._lead is None and not self._held and not self._trim
        if settled and not self._markers.start(text):
            if not self.reasoning:
                return [(CONTENT, text)]
            if not self._space and not text[-1].isspace():
                return [(REASONING, text)]
        return self._split(self._held + text)

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return what waited. If the answer was cut off, two or more characters of a marker are
        taken for the marker."""
        pieces: list[Piece] = []
        self._settle("" if cut and len(self._held) > 1 else self._held, pieces)
        if self._lead:
            pieces.append((CONTENT, self._lead))
        if self._space:
            pieces.append((REASONING, self._space))
        self._lead = None
        self._held = self._space = ""
        return pieces

    def _split(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while found := self._markers.search(text):
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
        self._lead = None
        if not self.reasoning:
            self._space = ""
            if self._bound:
                self._markers = _NO_MARKERS

    def _settle(self, text: str, pieces: list[Piece]) -> None:
        """Append `text`, which has no marker in it, to the channel that is open."""
        if self._trim:
            text = text.lstrip(_NEWLINES)
        if not text:
            return
        self._trim = False
        if not self.reasoning:
            self._settle_content(text, pieces)
            return
        body = text.rstrip()
        if not body:
            self._space += text
            return
        pieces.append((REASONING, self._space + body))
        self._space = text[len(body) :]

    def _settle_content(self, text: str, pieces: list[Piece]) -> None:
        if self._lead is not None:
            text = self._lead + text
            self._lead = text if text.isspace() else None
        if self._lead is None:
            pieces.append((CONTENT, text))
