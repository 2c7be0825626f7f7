"""Tool calls that a model may make, each held to a grammar from its opening marker on.

Until the model opens a call its row is free, and the constraint is dormant: it only reads the text,
through the same stages as the answer's own text. So a marker in a think block opens no call, and
one that is spelled with several tokens does. When a call is over, the constraint is dormant again.

A token may write the end of the marker and more, such as ">(" after "<tool_call". Where it might
come, those are forbidden with which no call can begin.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping

import msgspec

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.parameters import Grammar, Mask
from mlxsrv.logs import log
from mlxsrv.prompts.grammars.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarConstraint,
    LatestAndUsed,
)
from mlxsrv.prompts.grammars.specs import GrammarSpec
from mlxsrv.text.channels import CONTENT
from mlxsrv.text.pipeline import TextPipeline
from mlxsrv.text.scan import Scanner

_log = logging.getLogger("mlxsrv.engine")

_CACHED = 16  # grammars that a model keeps


class CallCompiler:
    """Compiles the grammars of calls for one model. Any thread may use it."""

    def __init__(self, grammars: GrammarCompiler) -> None:
        self._grammars = grammars
        self._usable = functools.lru_cache(maxsize=_CACHED)(self._try)
        self._compiled = LatestAndUsed(_CACHED, self._compile)

    def compile(self, spec: GrammarSpec, marker: str, *, param: str) -> CallGrammar | None:
        """Return the compiled grammar of a call, which begins behind its opening `marker`.

        No request asks for it. So if it cannot be used, the log says so, and the result is None.

        Raises:
            UnsupportedParameter: as `GrammarCompiler.prepare`.
        """
        self._grammars.prepare(param=param)
        grammar = self._usable(spec, marker)
        return None if grammar is None else self._compiled(grammar)

    def find(self, grammar: Grammar) -> CallGrammar:
        """Return the compiled grammar of a call, as `GrammarCompiler.find` does."""
        return self._compiled(Grammar(grammar.text, grammar.by_characters, grammar.marker))

    def _try(self, spec: GrammarSpec, marker: str) -> Grammar | None:
        try:
            compiled = self._grammars.compile(spec, param="tools")
        except InvalidRequest as error:
            log(_log, logging.WARNING, "tool calls not enforced", reason=error.message)
            return None
        return msgspec.structs.replace(compiled.grammar, marker=marker)

    def _compile(self, grammar: Grammar) -> CallGrammar:
        return CallGrammar(grammar, self._grammars.find(grammar))


class CallGrammar:
    """The compiled grammar of a call, for a model whose calls open with the grammar's marker.

    Attributes:
        grammar: what jobs carry of it.
    """

    def __init__(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self.grammar = grammar
        self._compiled = compiled
        self._refused = _find_refused(compiled, grammar.marker)

    def constraint(self, text: TextPipeline, hidden: Collection[int] = ()) -> CallConstraint:
        """Return the constraint of one answer.

        Args:
            text: tells the answer's content, with markers of calls, from its thoughts.
            hidden: tokens that are markers wherever they stand, so no call may have them.
        """
        allowed = ~self._compiled.mask(hidden)
        marker = self.grammar.marker
        return CallConstraint(text, marker, self._compiled, self._refused, allowed)


class CallConstraint:
    """The calls of one answer; see `CallGrammar`."""

    def __init__(
        self,
        text: TextPipeline,
        marker: str,
        grammar: CompiledGrammar,
        refused: Mapping[int, Mask],
        allowed: Mask,
    ) -> None:
        self._text = text
        self._markers = Scanner([marker])
        self._grammar = grammar
        self._refused = refused
        self._allowed = allowed
        self._tail = ""  # the beginning of a marker, if the content ends in one
        self._call: GrammarConstraint | None = None  # the call that is being written
        self.dormant = True
        self.failure: str | None = None

    def fill(self, mask: Mask) -> None:
        if self._call is None:
            mask &= ~self._refused[len(self._tail)]
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
        for piece in self._text.feed((token,)):
            if isinstance(piece, tuple) and piece[0] == CONTENT:
                self._look(piece[1])

    def _look(self, text: str) -> None:
        """Begin a call if the content has a whole marker now."""
        text = self._tail + text
        found = self._markers.find(text)
        if found is None:
            held = self._markers.held(text)
            self._tail = text[len(text) - held :]
            self.dormant = held not in self._refused
            return
        self._tail = ""
        self._call = self._grammar.begin_within(text[found[1] :])
        self.dormant = self._call is None

    def _leave(self) -> None:
        self._call = None
        self.dormant = True


def _find_refused(grammar: CompiledGrammar, marker: str) -> dict[int, Mask]:
    """Return the tokens that may not come behind so many characters of a marker: they write the
    rest of it and more, with which the grammar does not begin."""
    rests = {size: marker[size:].encode() for size in range(1, len(marker))}
    last = marker[-1].encode()
    refused: defaultdict[int, list[int]] = defaultdict(list)
    for token, spelling in grammar.spellings():
        if last not in spelling:
            continue
        for size, rest in rests.items():
            if spelling.startswith(rest) and len(spelling) > len(rest):
                more = spelling[len(rest) :].decode(errors="replace")
                if grammar.begin_within(more) is None:
                    refused[size].append(token)
    return {size: grammar.mask(tokens) for size, tokens in refused.items()}
