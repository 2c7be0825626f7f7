"""Sources: what the reading of a prompt goes on from, so that its beginning is not read again.

A source is a kept prompt, or a row that runs. Where KV caches can be cut back to any length, each
row that runs holds its prompt for others as well. So such prompts are not kept beside their rows: a
kept prompt is *lent* to the row that goes on from it, if that is its only user. It is moved there
and not copied, and it is no kept prompt any more. When the row ends, its longer text is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.engine.scheduling.prompt_index import LEAST, PromptIndex, Tokens, common_prefix
from mlxsrv.engine.scheduling.row import Row, Source
from mlxsrv.generation.parameters import Steering


class _Reading(Protocol):
    """A text that is half read."""

    rows: list[Row]
    opened: bool
    done: int
    text: Tokens
    steering: Steering | None


class _Lender(NamedTuple):
    """A row, and tokens that its KV cache holds."""

    row: int
    tokens: Tokens
    steering: Steering | None


class Sources:
    """Finds the sources of one model's prompts.

    Args:
        facts: of the model.
        index: prompts that are kept.
        groups: rows that run.
    """

    def __init__(self, facts: TextFacts, index: PromptIndex, groups: Groups) -> None:
        self._facts = facts
        self._index = index
        self._groups = groups

    def find(self, row: Row, begun: Sequence[_Reading]) -> Source:
        """The source that saves most of reading a row's text. Looked up again when there are
        others.

        Args:
            row: it waits.
            begun: texts that are half read.
        """
        version = self._version(begun)
        if row.found[0] != version:
            row.found = version, self._look_up(row, begun)
        return row.found[1]

    def lend(self, source: Source, others: Iterable[Row]) -> tuple[int, ...] | None:
        """Lend a kept prompt to the row that goes on from it, if it may be.

        It may be if all of it that a client has asked stays there to go on from, and none of the
        `others` that wait goes on from it, too.

        Returns:
            Its uses, which the row's own text takes over when it is kept; None if it is not lent.
        """
        if source.entry is None or not self._facts.cuts:
            return None
        if any(row.found[1].entry == source.entry for row in others):
            return None
        return self._index.lend(source.entry, source.tokens)

    def _version(self, begun: Sequence[_Reading]) -> tuple[int, ...]:
        """Changes with what there is to go on from."""
        if not self._facts.cuts:
            return (self._index.changes,)
        done = (reading.done for reading in begun)
        return (self._index.changes, self._groups.changes, *done)

    def _look_up(self, row: Row, begun: Sequence[_Reading]) -> Source:
        tokens, steering = row.text[:-1], row.job.steering
        entry, most = self._index.find(tokens, steering)
        best = Source(entry=entry, tokens=most)
        for lender in self._lenders(begun) if tokens.size >= LEAST else ():
            # One that shares more has the same token behind what the best one shares.
            size = min(lender.tokens.size, tokens.size)
            if size <= max(best.tokens, LEAST - 1) or lender.steering != steering:
                continue
            if lender.tokens[best.tokens] != tokens[best.tokens]:
                continue
            shared = common_prefix(lender.tokens, tokens)
            if shared >= LEAST and shared > best.tokens:
                best = Source(row=lender.row, tokens=shared)
        return best

    def _lenders(self, begun: Sequence[_Reading]) -> Iterator[_Lender]:
        if not self._facts.cuts:
            return
        for row in self._groups.rows:
            yield _Lender(row.id, row.prompt[:-1], row.job.steering)
        for reading in begun:
            if reading.opened:
                tokens = reading.text[: reading.done]
                yield _Lender(reading.rows[0].id, tokens, reading.steering)
