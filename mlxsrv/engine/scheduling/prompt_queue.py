"""The prompts of one model that are to be read, and which of them is read next.

A slice goes to the prompt that has the fewest tokens left. After a slice that did not go to the
oldest prompt, the oldest has the next one. So:

- A short prompt waits for a slice or two, however many long ones came before it.
- Short prompts without end do not starve a long one: the oldest has every second slice, each prompt
  becomes the oldest at some time, and so each is read after a bounded time.
- Among long prompts alone, the first is read to its end, then the next. Slices by turns would make
  all of them as late as the last.

Slots are given in the order of turns (see `fair_queue`): a prompt without a slot cannot overtake.
Several prompts are partly read at once where a shorter one overtakes. Each of them needs the memory
that its row will need. Where memory is short, they are read anew, one at a time.

Short prompts are read together, right-padded. One that does not fit a slice is read alone, in
several slices. So is one with a checkpoint (see `checkpoints`), if the checkpoint is worth a slice
or nobody else waits.

After a fault suspects are read before all others, for their streams stand still, one at a time and
each alone: when its text is read, the row draws its next tokens alone, and joins the others when it
is past the place of the fault (see `recovery`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter

import numpy as np

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.checkpoints import WORTH, choose_checkpoints, widest_part
from mlxsrv.engine.scheduling.groups import STEP, Groups
from mlxsrv.engine.scheduling.prompt_index import Beginning, PromptIndex, Source, Tokens
from mlxsrv.engine.scheduling.reading import Reading
from mlxsrv.engine.scheduling.row import Row, RowState

_MOST_BEGUN = 16


class PromptQueue:
    """Prompts that wait, in the order of their turns, and prompts that are partly read.

    Args:
        facts: of the model.
        index: prompts that were read before.
        groups: rows that run.

    Attributes:
        ready: how many prompts had a slot when the last slice was chosen, those that are begun
            included.
        granted: those that wait and may be begun: there is memory for them all. None: there is
            memory for whatever comes.
        watched: activations are looked at, so prompts are read from their first token: kept
            prompts have none, and statistics that lack those of cached tokens are biased.
    """

    def __init__(self, facts: TextFacts, index: PromptIndex, groups: Groups) -> None:
        self.waiting: list[Row] = []
        self.begun: list[Reading] = []
        self.ready = 0
        self.granted: Sequence[Row] | None = None
        self.watched = False
        self._facts = facts
        self._index = index
        self._groups = groups
        self._oldest_is_next = False
        self._most_begun = _MOST_BEGUN

    def __bool__(self) -> bool:
        return bool(self.waiting or self.begun)

    @property
    def rows(self) -> int:
        """The number of rows of the prompts that are partly read."""
        return len(self.partly_read) if self.begun else 0

    @property
    def partly_read(self) -> list[Row]:
        return [row for reading in self.begun for row in reading.rows]

    @property
    def preempted(self) -> list[Row]:
        """Rows that wait for their texts to be read again."""
        return [row for row in self.waiting if row.state is RowState.PREEMPTED]

    @property
    def tried(self) -> Reading | None:
        """The text of the suspect that draws alone."""
        return next((reading for reading in self.begun if reading.tried), None)

    def put_back(self, rows: Iterable[Row]) -> None:
        """Put rows back into the queue, at the places that their numbers give them, but suspects
        before all others: their streams stand still. Their prompts were being read or fetched, or
        they have lost their KV caches."""
        again = list(rows)
        for row in again:
            row.enter(RowState.PREEMPTED if row.read else RowState.WAITING)
        self.waiting = sorted(
            [*self.waiting, *again], key=lambda row: (not row.suspect, row.number)
        )

    def finish_reading(self, reading: Reading) -> None:
        """Note that a prompt is read."""
        if reading in self.begun:
            self.begun.remove(reading)
            # Where memory was short, one more may be partly read again.
            self._most_begun = min(self._most_begun + 1, _MOST_BEGUN)

    def abandon(self, readings: Collection[Reading]) -> None:
        """Forget prompts whose slice failed."""
        self.begun = [reading for reading in self.begun if reading not in readings]

    def shrink(self) -> list[Row]:
        """Put partly read prompts back into the queue, to be read again one at a time, since memory
        is short. Returns their rows."""
        begun, self.begun = self.begun, []
        rows = [row for reading in begun for row in reading.rows]
        for reading in begun:
            reading.restart()
        self.put_back(rows)
        self._most_begun = 1
        return rows

    def stop_reading(self, row: Row) -> Tokens | None:
        """Forget a row whose prompt is being read. Returns the tokens that are read, if no other
        row shares the reading; else None."""
        reading = next((reading for reading in self.begun if row in reading.rows), None)
        if reading is None:
            return None
        row.reported = max(row.reported, reading.done)  # it may be read anew
        if not reading.drop_row(row):
            return None
        self.abandon([reading])
        return reading.tokens_read

    # The next slice.

    def choose(self, free: int, limit: int) -> list[Reading]:
        """Choose the prompts of the next slice, and take them out of the queue.

        Args:
            free: rows that are free for prompts that are not begun.
            limit: tokens of a slice. Only so many prompts that take more are begun at once.
        """
        first = self.waiting[: max(free, 0)]
        if self.granted is not None:
            first = [row for row in first if row in self.granted]
        if any(reading.suspect for reading in self.begun):
            first = [row for row in first if not row.suspect]
        self.ready = len(self.begun) + len(first)
        chosen = self._choose(first, limit)
        if chosen is None or isinstance(chosen, Reading):
            return [] if chosen is None else [chosen]
        fits = self._fits(chosen, limit)
        reading = self._take(chosen, first)
        if fits:
            group = self._group(reading, first, limit)
            if len(group) > 1 or len(self.begun) >= self._most_begun:
                return group
        reading.checkpoints = self._choose_checkpoints(reading.rows[0], reading.cached)
        if not fits or reading.checkpoints:
            self.begun.append(reading)
        return [reading]

    def _choose(self, first: Sequence[Row], limit: int) -> Row | Reading | None:
        begun = [reading for reading in self.begun if not reading.tried]
        for reading in begun:
            if not reading.left:
                return reading  # its row is to join, which takes no reading
        among: list[Row | Reading] = [*begun, *first]
        for each in among:
            if each.suspect:
                return each
        if len(self.begun) >= self._most_begun:
            among = [*begun, *(row for row in first if self._fits(row, limit))]
        if not among:
            return None
        oldest = min(among, key=attrgetter("number"))
        alone = self._oldest_is_next or len(among) == 1
        chosen = oldest if alone else min(among, key=self._order)
        self._oldest_is_next = chosen is not oldest
        return chosen

    def _group(self, first: Reading, among: Sequence[Row], limit: int) -> list[Reading]:
        """The first prompt, and as many of the others, among these, as fit its slice."""
        longest = first.left
        group = [first]
        # A prompt with nothing to read cannot be padded beside others.
        if longest == 0 or first.rows[0].incidents or not self._facts.batched:
            return group
        for row in self._shortest(among, limit):
            left = self._measure(row)
            if max(left, longest) * (len(group) + 1) > limit:
                break
            # A twin of a prompt that was taken in this loop does not wait any more.
            if self._pads_well(row, left, first, longest) and row.waits:
                longest = max(longest, left)
                group.append(self._take(row, among))
        return group

    def _choose_checkpoints(self, row: Row, cached: int) -> tuple[int, ...]:
        if self._facts.cuts_at(row.prompt.size + row.job.max_tokens):
            return ()  # it can be cut back even when its answer is there
        return choose_checkpoints(row.job.checkpoints, cached, row.prompt.size - 1, self._facts)

    def _pads_well(self, row: Row, left: int, first: Reading, longest: int) -> bool:
        """Whether a prompt with `left` tokens to read may be read beside one with `longest`. Where
        memory is counted, the KV caches of both must be about as long, for they are padded."""
        alike = self.granted is None or abs(row.length - first.text.size) < STEP
        return alike and left > 0 and (left == longest or self._facts.pads)

    def _take(self, head: Row, among: Sequence[Row]) -> Reading:
        """Take a prompt out of the queue, and with it those among these that have the same text."""
        source = self.find_source(head)
        if source.entry is not None:
            self._index.use(source.entry, source.tokens)
        rows = [head, *self._find_twins(head, among)]
        for row in rows:
            row.enter(RowState.PREFILLING)
            self.waiting.remove(row)
        source_bytes = self.source_bytes(head)
        uses = self._move_out(source)
        head.uses = head.uses if uses is None else uses
        return Reading(rows, source, moved=uses is not None, source_bytes=source_bytes)

    def _find_twins(self, head: Row, among: Sequence[Row]) -> list[Row]:
        """The rows among these that have the same text and are not scored."""
        if not self._facts.batched:
            return []
        return [row for row in among if row is not head and same_prompt(row, head)]

    def find_source(self, row: Row) -> Source:
        """Find the source of most use to a row whose text is to be read. The row remembers it until
        cached prompts or running rows have changed."""
        if self.reads_anew(row):
            return Source()
        version: tuple[int, ...] = (self._index.changes,)
        if self._facts.cuts:
            version += (self._groups.changes, *[each.done for each in self.begun])
        if row.source_version != version:
            rows = self._list_held if self._facts.cuts else None
            row.source = self._index.find(row.text[:-1], row.job.steering, rows)
            row.source_version = version
        return row.source

    def _list_held(self, beginning: Beginning) -> Iterator[tuple[int, Tokens]]:
        """The rows whose texts begin so, and the tokens of these that their KV caches hold."""
        for row in [row for row in self._groups.rows if row.beginning == beginning]:
            yield row.id, row.prompt[:-1]
        for reading in self.begun:
            # What a suspect holds may be lost with its next step.
            if reading.opened and not reading.suspect and reading.beginning == beginning:
                yield reading.rows[0].id, reading.text[: reading.done]

    def _move_out(self, source: Source) -> tuple[int, ...] | None:
        """Move a cached prompt to the row that begins with it, without a copy, if two things hold:
        the row shares all of it but an answer, and no other that waits begins with it as well. When
        the row ends, its longer text is cached.

        Returns:
            Its uses, which the row's own text inherits when it is cached; None if it is not moved.
        """
        entry = source.entry
        waited_for = any(row.source.entry == entry for row in self.waiting)
        if entry is None or not self._facts.cuts or waited_for:
            return None
        return self._index.move_out(entry, source.tokens)

    def source_bytes(self, row: Row) -> int:
        """Bytes of the cached prompt that a waiting row goes on from; 0 if there is none."""
        if not (row.drawn or self._index.begins(row.beginning)):
            return 0
        entry = self.find_source(row).entry
        return 0 if entry is None else self._index.bytes_of(entry)

    def _measure(self, row: Row) -> int:
        """Return how many tokens of a waiting prompt are to be read: those that are not cached."""
        return row.length - 1 - self.find_source(row).tokens

    def reads_anew(self, row: Row) -> bool:
        """Whether cached prompts are of no use, since each of the prompt's tokens is reported: with
        scores, or activations."""
        return not row.read and (row.job.scores is not None or self.watched)

    def _fits(self, row: Row, limit: int) -> bool:
        """Whether the prompt is read whole in a slice of `limit` tokens. One that is scored is
        not: each of its tokens leaves a row of logits. Nor is one that has a checkpoint worth a
        slice, nor that of a suspect, which then draws tokens."""
        scored = row.job.scores is not None and not row.read
        if scored or row.suspect or (left := self._measure(row)) > limit:
            return False
        if left < WORTH:
            return True
        cached = row.length - 1 - left
        return widest_part(cached, self._choose_checkpoints(row, cached)) < WORTH

    def _shortest(self, among: Sequence[Row], limit: int) -> list[Row]:
        """Prompts that fit a slice of `limit` tokens and may share it, the shortest first."""
        waiting = [row for row in among if row.waits and not row.incidents]
        return sorted([row for row in waiting if self._fits(row, limit)], key=self._order)

    def _order(self, prompt: Row | Reading) -> tuple[int, int]:
        left = prompt.left if isinstance(prompt, Reading) else self._measure(prompt)
        return left, prompt.number


def same_prompt(one: Row, other: Row) -> bool:
    """Whether one reading does for both rows, of which `one` is not scored. Not after a fault: one
    of them may have caused it."""
    if one.checksum != other.checksum:
        return False
    if one.prompt is not other.prompt and not np.array_equal(one.prompt, other.prompt):
        return False
    if one.incidents or other.incidents or one.drawn or other.drawn or one.job.scores is not None:
        return False
    return one.job.steering == other.job.steering
