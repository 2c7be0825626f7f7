"""Spans: how far a slice reads each of its prompts, and whether the KV cache is cached there."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import Span
from mlxsrv.engine.scheduling.pace import LEAST_SLICE, Pace
from mlxsrv.engine.scheduling.prompt_index import PromptIndex
from mlxsrv.engine.scheduling.prompt_queue import PromptQueue
from mlxsrv.engine.scheduling.reading import Reading

_MOST_LOGITS = 16 * 1024 * 1024  # numbers, in a slice of a prompt that is scored


class SpanMaker:
    """Makes the spans of slices.

    Args:
        facts: of the model.
        pace: decides how many tokens a slice reads.
        queue: knows which prompts take several slices.
        index: gives numbers to the KV caches that a slice is to cache.
    """

    def __init__(
        self, facts: TextFacts, pace: Pace, queue: PromptQueue, index: PromptIndex
    ) -> None:
        self._facts = facts
        self._pace = pace
        self._queue = queue
        self._index = index

    def make(
        self, readings: Sequence[Reading], *, decoding: bool, beside: bool
    ) -> tuple[Span, ...]:
        """The spans of a slice: of several prompts all that is left, of one a part.

        Args:
            readings: the prompts.
            decoding: the model has streams.
            beside: other models have streams.
        """
        if len(readings) > 1:
            return tuple(map(self._make_whole, readings))
        return (self._make_part(readings[0], decoding=decoding, beside=beside),)

    def _make_whole(self, reading: Reading) -> Span:
        """All that is left of a prompt, in one pass with others."""
        end = reading.text.size - 1
        return self._make(reading, end, kept=self._ends_kept(reading), joins=True)

    def _make_part(self, reading: Reading, *, decoding: bool, beside: bool) -> Span:
        """The next part of a prompt that is read alone."""
        begun = reading in self._queue.begun
        prompts = max(1, self._queue.ready)
        limit = self._pace.limit(decoding=decoding, long=begun, beside=beside, prompts=prompts)
        if reading.scored:  # each token leaves a row of logits
            limit = min(limit, max(LEAST_SLICE, _MOST_LOGITS // self._facts.vocabulary))
        last = reading.text.size - 1
        end = min(reading.done + limit, last)
        checkpoint = next((each for each in reading.checkpoints if each > reading.done), last)
        end = min(end, checkpoint)
        # When a row joins, the next step copies KV caches, its own and those of other rows. If the
        # slice has already filled the gap between two tokens, that would make the gap longer. So
        # the row joins with an empty span in the next round. So does a suspect, when it is none.
        later = decoding and begun and end > reading.done
        joins = end == last and not later and not reading.suspect
        lasting = end in reading.checkpoints and end > reading.done
        kept = lasting or (joins and self._ends_kept(reading))
        return self._make(reading, end, kept=kept, joins=joins, lasting=lasting)

    def _make(
        self, reading: Reading, end: int, *, kept: bool, joins: bool, lasting: bool = False
    ) -> Span:
        keep = None
        if kept:
            text, steering = reading.text[:end], reading.steering
            keep = self._index.plan_keep(text, steering, lasting=lasting)
        return Span(
            rows=tuple([row.id for row in reading.rows]),
            begin=reading.done,
            end=end,
            opens=not reading.opened,
            source=None if reading.opened else reading.source.entry,
            moves=reading.moved and not reading.opened,
            from_row=None if reading.opened else reading.source.row,
            keep=keep,
            joins=reading.decoded if joins else None,
            scored=reading.scored,
        )

    def _ends_kept(self, reading: Reading) -> bool:
        """Whether the KV cache is cached at the end of the text. It is not where it can be cut back
        to any length: other prompts then begin with a copy of the running row's, which is cached
        when the row ends."""
        return not (self._facts.cuts and reading.decoded)
