"""Sources: the KV cache that the reading of a prompt begins with, so that a prefix is not read
again.

A source is a cached prompt, or a running row. Where KV caches can be cut back to any length, other
prompts may begin with a copy of what a running row holds. So its prompt need not be in the prompt
cache as well: a cached prompt with only one user is *moved* to the row that begins with it, without
a copy, and leaves the prompt cache. When the row ends, its longer text is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.engine.scheduling.prompt_index import (
    LEAST,
    Beginning,
    PromptIndex,
    Tokens,
    common_prefix,
    find_beginning,
)
from mlxsrv.engine.scheduling.reading import Reading
from mlxsrv.engine.scheduling.row import Row, Source


class Sources:
    """Finds the sources of one model's prompts.

    Args:
        facts: of the model.
        index: the cached prompts.
        groups: rows that run.
    """

    def __init__(self, facts: TextFacts, index: PromptIndex, groups: Groups) -> None:
        self._facts = facts
        self._index = index
        self._groups = groups

    def find(self, row: Row, begun: Sequence[Reading]) -> Source:
        """Return the source that saves reading the most tokens of a row's text. The row remembers
        it until cached prompts or running rows have changed.

        Args:
            row: one that waits.
            begun: texts that are half read.
        """
        version = self._version(begun)
        if row.source_version != version:
            row.source_version, row.source = version, self._look_up(row, begun)
        return row.source

    def move_out(self, source: Source, others: Iterable[Row]) -> tuple[int, ...] | None:
        """Move a cached prompt to the row that begins with it, if two things hold: the row shares
        all of it but an answer, and none of the `others`, which wait, begins with it as well.

        Returns:
            Its uses, which the row's own text inherits when it is cached; None if it is not moved.
        """
        if source.entry is None or not self._facts.cuts:
            return None
        if any(row.source.entry == source.entry for row in others):
            return None
        return self._index.move_out(source.entry, source.tokens)

    def _version(self, begun: Sequence[Reading]) -> tuple[int, ...]:
        """Return counters that change whenever the possible sources do."""
        if not self._facts.cuts:
            return (self._index.changes,)
        return (self._index.changes, self._groups.changes, *[each.done for each in begun])

    def _look_up(self, row: Row, begun: Sequence[Reading]) -> Source:
        tokens, steering = row.text[:-1], row.job.steering
        entry, most = self._index.find(tokens, steering)
        best = Source(entry=entry, tokens=most)
        if tokens.size < LEAST or not self._facts.cuts:
            return best
        for from_row, held in self._find_row_sources(find_beginning(tokens, steering), begun):
            # One that shares more has the same token behind what the best one shares.
            if min(held.size, tokens.size) <= most or held[most] != tokens[most]:
                continue
            shared = common_prefix(held, tokens)
            if shared >= LEAST and shared > most:
                best, most = Source(row=from_row, tokens=shared), shared
        return best

    def _find_row_sources(
        self, beginning: Beginning, begun: Sequence[Reading]
    ) -> Iterator[tuple[int, Tokens]]:
        """The rows whose texts begin so, and the tokens of these that their KV caches hold."""
        for row in [row for row in self._groups.rows if row.beginning == beginning]:
            yield row.id, row.prompt[:-1]
        for reading in begun:
            if reading.opened and reading.beginning == beginning:
                yield reading.rows[0].id, reading.text[: reading.done]
