"""Tool calls that a model may make, each held to a grammar from its opener on.

Until the model opens a call its row is free, and the constraint is dormant: it only reads the text,
through the same stages as the answer's own text. So an opener in a thought opens no call, and one
that is spelled with several tokens does. When a call is over, the constraint is dormant again.

A token may write the end of an opener and more, such as ">(" after "<tool_call". Where it might
come, those are forbidden with which no call can begin.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from mlxsrv.generation.parameters import Mask
from mlxsrv.text.frames import CONTENT
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.scan import Scanner

if TYPE_CHECKING:
    from mlxsrv.prompts.grammars.grammar import CompiledGrammar, GrammarConstraint


class CallConstraint:
    """The calls of one answer.

    Args:
        grammar: that of the calls, each with its opener.
        text: the stages that part the answer's content, with openers in it, from its thoughts.
        hidden: tokens that are markers wherever they stand, so no call may have them.
        headers: openers by what the frame gives for a header in their place.
    """

    def __init__(
        self,
        grammar: CompiledGrammar,
        text: TextPipeline,
        hidden: Collection[int] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = headers or {}
        self._text = text
        self._openers = Scanner(grammar.grammar.openers)
        self._grammar = grammar
        self._allowed = ~grammar.mask(hidden)
        self._tail = ""  # the beginning of an opener, if the content ends in one
        self._call: GrammarConstraint | None = None  # the call that is being written
        self.dormant = True
        self.failure: str | None = None

    def fill(self, mask: Mask) -> None:
        if self._call is None:
            mask &= ~self._grammar.refused[self._tail]
            return
        self._call.fill(mask)
        if self._call.failure is not None:  # the log has it; the answer goes on without a grammar
            self._leave()
            mask[:] = -1
        elif (mask & self._allowed).any():
            mask &= self._allowed

    def accept(self, token: int) -> None:
        if self._call is not None:
            self._call.accept(token)
            if self._call.over or self._call.failure is not None:
                self._leave()
            return
        header = self._text.header
        pieces = self._text.feed((token,))
        begun = self._text.header
        if begun is not None and begun != header and begun in self._headers:
            self._look(self._headers[begun])
            return
        for piece in pieces:
            if isinstance(piece, tuple) and piece[0] == CONTENT:
                self._look(piece[1])

    def _look(self, text: str) -> None:
        """Begin a call if the content has a whole opener now."""
        text = self._tail + text
        found = self._openers.search(text)
        if found is None:
            self._tail = text[len(text) - self._openers.held(text) :]
            self.dormant = self._tail not in self._grammar.refused
            return
        self._tail = ""
        start, end = found
        self._call = self._grammar.begin_within(text[start:end], text[end:])
        self.dormant = self._call is None

    def _leave(self) -> None:
        self._call = None
        self.dormant = True
