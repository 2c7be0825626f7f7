"""The memory of one model's rows: the bytes that their KV caches take, and would take.

It counts by the facts of the model, before anything is taken:

- the arrays of the groups that are decoded, as large as the next steps need them;
- of each text that is being read, from its first slice on, the KV cache that it has at its end, or
  the slots that its rows take in a group, whichever is larger;
- of a text to embed that is large, or is read in several slices, what it takes at its end;
- what can be dropped at any time: cached prompts, also those that the runner is about to cache, and
  what the proposer has read.

Arrays grow, and rows are copied into them, one array of one layer at a time. So at most one array
is in memory twice. It is not counted here, but as memory that a step needs for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlxsrv.engine.events import kv_bytes
from mlxsrv.engine.outcomes import EmbedFacts, TextFacts
from mlxsrv.engine.scheduling.groups import GROWTH, GroupArrays, Growth
from mlxsrv.engine.scheduling.prompt_queue import same_prompt
from mlxsrv.engine.scheduling.reading import Reading
from mlxsrv.engine.scheduling.row import Row
from mlxsrv.engine.scheduling.row_book import RowBook

_POOLING = 7
"""Copies of a text's hidden states, at most, with which its vector is made: some are of 32 bits."""


class Forecast(msgspec.Struct, frozen=True):
    """The bytes that the KV caches of one model will take, if certain texts are read.

    How far rows and arrays grow is an argument of `bytes_after`, so one forecast answers several
    questions.

    Attributes:
        now: bytes of all arrays before the next steps change them.
        arrays: the arrays of the groups, before any row joins.
        joined: the same once the rows of the texts have joined.
        beside: bytes of the texts' own KV caches, and of prompts that are about to be cached.
        least: bytes of the smallest of these texts; 0: none has rows that join.
        granted: waiting rows that are given memory in this forecast.
    """

    now: int
    arrays: GroupArrays
    joined: GroupArrays
    beside: int = 0
    least: int = 0
    granted: tuple[Row, ...] = ()

    def bytes_after(self, growth: Growth, *, settled: bool = False) -> int:
        """The most bytes that are taken at any moment until rows have grown.

        Args:
            growth: of each row.
            settled: count the state after the next steps only, without what they free.
        """
        taken = self.arrays.bytes_after(growth)
        if self.joined is not self.arrays:
            # When a text has been read, its rows are copied into the groups' arrays and its own KV
            # cache, counted in `beside`, goes. Which text is first is not known: the smallest
            # frees the least.
            taken = max(taken, self.joined.bytes_after(growth) - self.least)
        return (taken if settled else max(self.now, taken)) + self.beside


class RowMemory:
    """The memory of one model's rows and cached prompts.

    Args:
        facts: of the model.
        embed: the same, of texts to embed.
        slice: the most tokens of a slice of prompts.
        book: has the rows, and knows where they may be.

    Attributes:
        preemptions: how often a row has lost its KV cache for want of memory.
        proposals_fit: there is room for tokens that are proposed to rows.
        book, index, queue, groups: as above, and the book's own.
    """

    def __init__(self, facts: TextFacts, embed: EmbedFacts, slice: int, book: RowBook) -> None:
        self.preemptions = 0
        self.proposals_fit = True
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
        return [*self.groups.rows, *self.queue.half_read, *self._texts.holders]

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

    def grant(self, rows: Sequence[Row], *, ample: bool = False) -> None:
        """Allow the texts of these candidates to be read, and no others. `ample`: any prompt that
        comes may be read as well."""
        self.queue.granted = None if ample else sum([row.waits for row in rows])
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

    # Bytes.

    @property
    def reading_bytes(self) -> int:
        """Bytes of the KV caches of texts that are being read, as they are at their ends, and of
        rows that are not decoded yet."""
        return sum(map(self._measure, self.queue.begun)) + self._joining_bytes + self._embedded

    @property
    def _embedded(self) -> int:
        """Bytes of the texts to embed that have begun, as they are at their ends."""
        return sum([self.measure_embedded(text.length) for text in self._texts.begun])

    @property
    def _joining_bytes(self) -> int:
        fresh = [each for each in self._joining if any(row.fresh for row in each.rows)]
        return sum([self._measure(each) for each in fresh])

    @property
    def spare_bytes(self) -> int:
        """Bytes that can be freed at once: of cached prompts, and of what the proposer has read."""
        proposer = self.book.proposer
        return self.index.bytes + (0 if proposer is None else proposer.cache_bytes)

    def give_way(self, bytes: int) -> int:
        """Drop cached prompts until so many bytes are free, and then what the proposer has read,
        which is in use while a row decodes. Returns the bytes that are free then."""
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

    def forecast(self) -> Forecast:
        """Forecast the bytes of rows, and of prompts that the runner is about to cache."""
        arrays = self.groups.arrays
        found = Forecast(
            now=self.groups.bytes + self._joining_bytes,
            arrays=arrays,
            joined=arrays,
            beside=sum(map(self.measure, self.index.promised)) + self._embedded,
        )
        for reading in self.queue.begun:
            found = self._foresee_texts(found, reading.rows, [self._measure(reading)])
        return found

    def foresee_granted(self, found: Forecast, rows: Sequence[Row]) -> Forecast:
        """Return the forecast if the texts of these waiting rows are read as well."""
        granted, own = [*found.granted], list[int]()
        for row in rows:
            if row.embeds and row.queued:
                continue  # it needs no memory to begin
            if row.embeds:
                beside = found.beside + self._measure_large(row)
                found = msgspec.structs.replace(found, beside=beside)
            elif not any(same_prompt(row, each) for each in granted):
                own.append(self._measure_text(row, self.queue.source_bytes(row)))
            granted.append(row)
        return self._foresee_texts(found, rows, own, tuple(granted))

    def _foresee_texts(
        self,
        found: Forecast,
        rows: Sequence[Row],
        own: Sequence[int],
        granted: tuple[Row, ...] = (),
    ) -> Forecast:
        """Return the forecast if these rows' texts are read as well.

        Args:
            found: the forecast without them.
            rows: of the texts.
            own: bytes of each text's KV cache; rows may share a text.
            granted: see `Forecast`.
        """
        joining = [row for row in rows if row.job.max_tokens > 0 and self._facts.batched]
        return Forecast(
            found.now,
            found.arrays,
            joined=found.joined.join(joining) if joining else found.joined,
            beside=found.beside + sum(own),
            least=min([found.least or max(own), *own]) if joining and own else found.least,
            granted=granted,
        )

    def count_alone(self, row: Row, growth: Growth) -> int:
        """Bytes that a row takes if no other is there: to be read, and then decoded until it has
        grown."""
        if row.embeds:
            return self._measure_large(row)
        own = self.measure(row.length)
        if row.job.max_tokens == 0 or not self._facts.batched:
            return own
        return max(own, GroupArrays(self.groups, [], 0, True).join([row]).bytes_after(growth))

    def count_tokens(self, row: Row) -> int:
        """Tokens of the text that a row waits with: of texts to embed, of the large one."""
        large = self._texts.large if row.embeds else None
        return row.length if large is None else large.length

    def measure(self, tokens: int) -> int:
        """Bytes of the KV cache of one row with so many tokens, at most."""
        return kv_bytes(self._facts.kv_costs, tokens + GROWTH, self._slice + GROWTH)

    def measure_embedded(self, tokens: int) -> int:
        """Bytes of a text to embed of so many tokens that is read in several slices, or is large. A
        pass over as many tokens as a slice of a prompt may have needs no more than that slice, so
        it is not counted; what it needs beyond these tokens is."""
        if not self._embed.slices:
            return self._embed.pass_bytes(tokens, tokens)
        hidden = self._embed.hidden_bytes * tokens
        cache = kv_bytes(self._embed.kv_costs, tokens + GROWTH, self._slice + GROWTH)
        return hidden + max(cache, _POOLING * hidden)

    def _measure_large(self, row: Row) -> int:
        """Bytes of the large text of the row that is embedded next."""
        large = self._texts.large
        return 0 if large is None or row.queued else self.measure_embedded(large.length)

    def counters(self) -> dict[str, int]:
        """In numbers, as `/health` lists them."""
        return {
            "row_bytes": self.groups.bytes,
            "reading_bytes": self.reading_bytes,
            "preemptions": self.preemptions,
        }

    @property
    def held(self) -> int:
        """Bytes that all KV caches take before the next steps, at most."""
        found = self.forecast()
        return found.now + found.beside + self.spare_bytes

    @property
    def growth(self) -> int:
        """Bytes by which the arrays of the groups grow with the next step."""
        return self.groups.arrays.bytes_after(Growth(1, self.groups.fit)) - self.groups.bytes

    def limit_padding(self, bytes: int) -> None:
        """Keep groups apart for which so many bytes would be padding."""
        self.groups.padding = min(self._facts.padding, bytes)

    def _measure(self, reading: Reading) -> int:
        return self._measure_text(reading.rows[0], reading.source_bytes)

    def _measure_text(self, row: Row, source_bytes: int) -> int:
        """Bytes of the KV cache of a row's text when it is read. One that was cut back is as large
        as it was before."""
        return max(self.measure(row.length), source_bytes)
