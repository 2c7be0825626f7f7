"""The memory of one model's rows: the bytes that they need, by the facts of the model.

They follow from lengths alone:

- a row that is decoded needs those of its class (see `groups`);
- a text that is being read, from its first slice on, needs those of its own KV cache, as it is at
  its end, or those that its rows need then, whichever is more;
- a text to embed that is large, or is read in several slices, needs what it takes at its end;
- a prompt that is about to be cached needs those of its KV cache.

All that memory holds beyond these can be given up at any time: cached prompts, what the proposer
has read, and what arrays have too much.

Texts to embed need no memory to begin, so their row gets a slot at its turn. For each text of more
tokens than a slice of a prompt may have, the row waits for memory as a prompt does, while its other
texts go on. It may be preempted like any row; texts that are done are not read again.

A draft model reads only while one row decodes. What it has read stays for the chat's next turn,
until its memory is needed.

These are not counted: the arrays of a step; one layer of the rows, which is there twice while
arrays change; the spare column of each of the two slots of a quantized layer; a pass over texts to
embed, for as many tokens as a slice of a prompt may have; and a cached prompt that has gone while
the storage thread still writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.engine.events import kv_bytes
from mlxsrv.engine.outcomes import EmbedFacts, TextFacts
from mlxsrv.engine.scheduling.groups import GROWTH, NEXT
from mlxsrv.engine.scheduling.prompt_queue import same_prompt
from mlxsrv.engine.scheduling.reading import Reading
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.row_book import RowBook

_POOLING = 7
"""Copies of a text's hidden states, at most, with which its vector is made: some are of 32 bits."""


class RowMemory:
    """The memory of one model's rows and cached prompts.

    Args:
        facts: of the model.
        embed: the same, of texts to embed.
        slice: the most tokens of a slice of prompts.
        book: has the rows, and knows where they may be.

    Attributes:
        preemptions: how often a row has lost its KV cache for want of memory.
        book, index, queue, groups: as above, and the book's own.
    """

    def __init__(self, facts: TextFacts, embed: EmbedFacts, slice: int, book: RowBook) -> None:
        self.preemptions = 0
        self.book = book
        self.index = book.index
        self.queue = book.queue
        self.groups = book.groups
        self._facts = facts
        self._embed = embed
        self._slice = slice
        self._texts = book.texts
        self._joining: list[Reading] = []  # texts that were read since the last step

    # Rows.

    @property
    def rows(self) -> list[Row]:
        """Rows that have a KV cache, or are getting one."""
        return [*self.groups.rows, *self.queue.partly_read, *self._texts.holders]

    @property
    def candidates(self) -> list[Row]:
        """Rows whose texts may be read next, in the order of their numbers: those that wait and
        have a place beside the others, the one whose large text is embedded next, and the head of
        the line."""
        found = self.queue.waiting[: max(self.book.free, 0)]
        if (large := self._texts.large) is not None:
            found = sorted([self._texts.jobs[large.job].row, *found], key=lambda row: row.number)
        if (head := self.book.head) is not None:
            found.append(head)
        return found

    def grant(self, rows: Sequence[Row], *, ample: bool) -> None:
        """Allow the texts of these candidates to be read, and no others. `ample`: any prompt that
        comes may be read as well."""
        self.queue.granted = None if ample else [row for row in rows if row.waits]
        if any(row.embeds for row in rows):
            self._texts.begin_large()

    def preempt(self, row: Row) -> None:
        """Drop a row's KV cache. It waits again in its old place, and its text is read anew."""
        self.preemptions += 1
        self.book.preempt(row)

    def note_joining(self, readings: Sequence[Reading]) -> None:
        """Note that these texts are read. Their KV caches stay until the next step, in which the
        arrays of a group take them over."""
        self._joining += readings

    def note_step(self) -> None:
        """Note that all rows that were read are in the arrays of a group."""
        self._joining.clear()

    # What rows need.

    def count_bytes(self, tokens: int = NEXT) -> int:
        """The bytes that rows need, with room for so many tokens more of each."""
        begun = self.queue.begun
        texts = [self._count_text(each.rows, self._measure(each), tokens) for each in begun]
        decoded = self.groups.count_bytes(self.groups.rows, tokens)
        return decoded + sum(texts) + self._embedded + self._promised

    def count_candidate(self, row: Row, tokens: int, granted: Sequence[Row] = ()) -> int:
        """The bytes that a candidate needs beside the `granted` ones."""
        if row.embeds:
            return self._measure_large(row)
        own = self._measure_text(row, self.queue.source_bytes(row))
        twins = [each for each in granted if same_prompt(row, each)]  # one text does for all
        before = self._count_text(twins, own, tokens) if twins else 0
        return self._count_text([*twins, row], own, tokens) - before

    def count_alone(self, row: Row, tokens: int) -> int:
        """The bytes that a row needs when nothing else is in memory."""
        if row.embeds:
            return self._measure_large(row)
        return self._count_text([row], self.measure(row.length), tokens)

    def _count_text(self, rows: Sequence[Row], own: int, tokens: int) -> int:
        """The greater of two: the bytes of the text's own KV cache, and those of its rows.

        Args:
            rows: of the text.
            own: bytes of the text's own KV cache.
            tokens: as above.
        """
        joining = [row for row in rows if row.job.max_tokens > 0]
        return max(own, self.groups.count_bytes(joining, tokens))

    def count_tokens(self, row: Row) -> int:
        """Tokens of the text that a row waits with: of texts to embed, of the large one."""
        large = self._texts.large if row.embeds else None
        return row.length if large is None else large.length

    def measure(self, tokens: int) -> int:
        """Bytes of the KV cache of one text with so many tokens, at most."""
        return kv_bytes(self._facts.kv_costs, tokens + GROWTH, self._slice)

    def measure_embedded(self, tokens: int) -> int:
        """Bytes of a text to embed of so many tokens that is read in several slices, or is large. A
        pass over as many tokens as a slice of a prompt may have needs no more than that slice, so
        it is not counted; what it needs beyond these tokens is."""
        if not self._embed.slices:
            return self._embed.pass_bytes(tokens, tokens)
        hidden = self._embed.hidden_bytes * tokens
        cache = kv_bytes(self._embed.kv_costs, tokens + GROWTH, self._slice)
        return hidden + max(cache, _POOLING * hidden)

    def _measure_large(self, row: Row) -> int:
        """Bytes of the large text of the row that is embedded next."""
        large = self._texts.large
        return 0 if large is None or row.queued else self.measure_embedded(large.length)

    def _measure(self, reading: Reading) -> int:
        return self._measure_text(reading.rows[0], reading.source_bytes)

    def _measure_text(self, row: Row, source_bytes: int) -> int:
        """Bytes of the KV cache of a row's text when it is read. One that was cut back is as large
        as it was before."""
        return max(self.measure(row.length), source_bytes)

    @property
    def _embedded(self) -> int:
        """Bytes of the texts to embed that have begun, as they are at their ends."""
        return sum([self.measure_embedded(text.length) for text in self._texts.begun])

    @property
    def _promised(self) -> int:
        """Bytes of prompts that are about to be cached."""
        return sum(map(self.measure, self.index.promised))

    # What there is.

    @property
    def reading_bytes(self) -> int:
        """Bytes of the KV caches of texts that are being read, as they are at their ends, and of
        rows that are not decoded yet."""
        fresh = [each for each in self._joining if any(row.fresh for row in each.rows)]
        return sum(map(self._measure, [*self.queue.begun, *fresh])) + self._embedded

    @property
    def spare_bytes(self) -> int:
        """Bytes that can be freed at once: of cached prompts, and of what the proposer has read."""
        proposer = self.book.proposer
        return self.index.bytes + (0 if proposer is None else proposer.cache_bytes)

    @property
    def held(self) -> int:
        """Bytes that all KV caches take before the next steps, at most."""
        return self.groups.bytes + self.reading_bytes + self._promised + self.spare_bytes

    def counters(self) -> dict[str, int]:
        """In numbers, as `/health` lists them."""
        return {
            "row_bytes": self.groups.bytes,
            "reading_bytes": self.reading_bytes,
            "preemptions": self.preemptions,
        }

    def give_way(self, bytes: int) -> int:
        """Drop cached prompts until so many bytes are free; if they are too few, the proposer's KV
        cache as well. Returns the bytes freed."""
        freed = self.index.give_way(bytes)
        if freed < bytes and self.book.proposer is not None:
            freed += self.book.proposer.evict()
        return freed

    @property
    def proposer_grows(self) -> bool:
        """Whether the proposer may take more while rows only draw tokens."""
        return self.book.proposer is not None and self.book.proposer.computes

    @property
    def proposer_growth(self) -> int:
        """Bytes that the proposer takes more in this round, if it follows the only row."""
        rows, proposer = self.groups.rows, self.book.proposer
        return proposer.growth(rows[0]) if proposer is not None and len(rows) == 1 else 0
