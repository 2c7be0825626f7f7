"""The memory of one model's rows: the bytes that their KV caches take, and would take.

It counts by the facts of the model, before anything is taken:

- the arrays of the groups that are decoded, as large as the next steps need them;
- of each text that is being read, from its first slice on, the KV cache that it has at its end, and
  then the places in a group that its rows take instead;
- what can go at any time: kept prompts, also those that the runner has yet to keep, and what the
  draft model has read.

Arrays change, and rows go over to them, one array of a layer after the other. So what is there
twice for a moment is one of these, and counts as what a step needs for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.scheduling.groups import STEP, Fit, Groups
from mlxsrv.engine.scheduling.prompt_queue import Reading, same_prompt
from mlxsrv.engine.scheduling.recovery import choose_room
from mlxsrv.engine.scheduling.row import Row, RowState
from mlxsrv.engine.scheduling.row_book import RowBook


class RowMemory:
    """The memory of one model's rows and kept prompts.

    Args:
        facts: of the model.
        slice: the most tokens of a slice of prompts.
        book: has the rows, and knows where they may be.

    Attributes:
        preemptions: how often a row has lost its KV cache for want of memory.
        proposals_fit: there is room for tokens that are proposed to rows.
    """

    def __init__(self, facts: TextFacts, slice: int, book: RowBook) -> None:
        self.preemptions = 0
        self.proposals_fit = True
        self.index = book.index
        self.queue = book.queue
        self.groups = book.groups
        self.book = book
        self._facts = facts
        self._slice = slice
        self._recovery = book.recovery
        self._joining: list[Reading] = []  # texts that were read since the last step

    # Rows.

    @property
    def rows(self) -> list[Row]:
        """Rows that have a KV cache, or are getting one."""
        trial = self._recovery.trial
        reading = [row for each in self._readings for row in each.rows]
        return [*self.groups.rows, *reading, *([] if trial is None else [trial])]

    @property
    def candidates(self) -> list[Row]:
        """Rows whose texts may be read next, in the order of their numbers: those that wait and
        have a place beside the others, and the first of those that were lost in a fault."""
        recovery = self._recovery
        decoding = len(self.groups.rows) + (recovery.trial is not None)
        free = recovery.fitting - decoding - len(recovery.rows) - self.queue.rows
        found = self.queue.waiting[: max(free, 0)]
        lost = None if recovery.reading is not None else recovery.next_lost(decoding)
        if lost is not None:
            found = sorted([lost, *found], key=lambda row: row.number)
        return found

    def grant(self, rows: Sequence[Row] | None) -> None:
        """Let the texts of these candidates be read, and of no others; None: of all."""
        if rows is None:
            self.queue.granted, self._recovery.granted = None, True
            return
        lost = sum(row.state is RowState.RECOVERING for row in rows)
        self.queue.granted, self._recovery.granted = len(rows) - lost, lost > 0

    def preempt(self, row: Row) -> None:
        """Take a row's KV cache. It waits again in its old place, and its text is read anew."""
        self.preemptions += 1
        self.book.preempt(row)

    def note_joining(self, readings: Sequence[Reading]) -> None:
        """Note that these texts are read. Their KV caches stay until the next step, in which the
        arrays of a group take them over. Where rows cannot share arrays, they stay."""
        self._joining += readings if self._facts.batched else ()

    def note_step(self) -> None:
        """Note that all rows that were read are in the arrays of a group."""
        self._joining.clear()

    # Bytes.

    @property
    def reading_bytes(self) -> int:
        """Bytes of the KV caches of texts that are being read, as they are at their ends, and of
        rows that are not decoded yet."""
        return sum(map(self._measure, self._readings)) + self._joining_bytes

    @property
    def _joining_bytes(self) -> int:
        joining = [each for each in self._joining if any(_is_fresh(row) for row in each.rows)]
        return sum(map(self._measure, joining))

    @property
    def spare_bytes(self) -> int:
        """Bytes that can be had at once: of kept prompts, and of what the draft has read."""
        drafts = self.book.drafts
        return self.index.bytes + (0 if drafts is None else drafts.bytes)

    def give_way(self, bytes: int) -> int:
        """Have what is spare go, until so many bytes are free: the draft's last, since it is in
        use where rows are. Returns the bytes that are free then."""
        freed = self.index.give_way(bytes)
        if freed < bytes and self.book.drafts is not None:
            freed += self.book.drafts.drop()
        return freed

    @property
    def draft_growth(self) -> int:
        """Bytes that the draft takes more in this round, if it follows the only row."""
        rows, drafts = self.groups.rows, self.book.drafts
        return drafts.growth(rows[0]) if drafts is not None and len(rows) == 1 else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of what is spare, with prompts that the runner has yet to keep."""
        return self.spare_bytes + sum(map(self.measure, self.index.promised))

    def count(
        self,
        tokens: int,
        fit: Fit,
        granted: Sequence[Row] = (),
        *,
        free: bool = False,
        settled: bool = False,
    ) -> int:
        """The most bytes that all KV caches take until each row has so many tokens more, or as many
        as its job allows.

        Args:
            tokens: of each row.
            fit: how arrays grow.
            granted: rows whose texts are to be read as well.
            free: rows may have more tokens than their jobs allow: those that are proposed to others
                of their group.
            settled: but for what goes with the next steps.
        """
        coming = [row for reading in self._readings for row in reading.rows]
        own = list(map(self._measure, self._readings))
        for place, row in enumerate(granted):
            coming.append(row)
            if not any(same_prompt(row, other) for other in granted[:place]):
                own.append(self._measure_text(row, self.queue.source_bytes(row)))
        drawing = [row for row in coming if row.job.max_tokens > 0 and self._facts.batched]
        texts, trial, tried = sum(own), self._trial_bytes, self._recovery.trial
        # A layer's arrays take the rows that were read, whose own caches of the layer then go.
        before = self.groups.bytes + self._joining_bytes + texts + self._count_trial()
        then = self.groups.bytes_with((), tokens, fit, bounded=not free) + texts + trial
        joining = drawing if tried is None else [*drawing, tried]
        if joining:  # of several texts it is not known which is read first
            last = self.groups.bytes_with(joining, tokens, fit, bounded=not free)
            last += self._count_tried(coming)
            then = max(then, last + texts - (min(own) if drawing else 0))
        return (then if settled else max(before, then)) + self.kept_bytes

    def bound(self, tokens: int) -> int | None:
        """Bytes that `count` does not exceed, whichever candidates are granted. It is counted in a
        few steps, with no look at each row; None after a fault, when only `count` knows."""
        if self._recovery.rows or self._recovery.trial is not None:
            return None
        candidates = self.candidates
        reading = [row for each in self._readings for row in each.rows]
        # A text may go on from a kept prompt that is longer, and was cut back.
        own = sum(self.measure(row.length) + self.index.bytes for row in candidates)
        arrays = self.groups.bound([*reading, *candidates], tokens)
        return arrays + own + self.reading_bytes + self.kept_bytes + self.draft_growth

    def count_alone(self, row: Row, tokens: int) -> int:
        """Bytes that a row takes that is read, and then decoded alone, until it has so many tokens
        more."""
        own = self.measure(row.length)
        if row.job.max_tokens == 0 or not self._facts.batched:
            return own
        return max(own, Groups(self._facts, 1).bytes_with([row], tokens, Fit.EXACT))

    def measure(self, tokens: int) -> int:
        """Bytes of the KV cache of one row with so many tokens, at most: mlx-lm's grows by STEP,
        from whatever it has, and one with a window keeps a slice more while a prompt is read."""
        room = tokens + STEP - 1
        return sum(
            cost.fixed
            + cost.per_token * (min(room, cost.window + self._slice) if cost.window else room)
            for cost in self._facts.kv_costs
        )

    def statistics(self) -> dict[str, int]:
        """In numbers, as `/health` lists them."""
        return {
            "row_bytes": self.groups.bytes + self._count_trial(),
            "reading_bytes": self.reading_bytes,
            "preemptions": self.preemptions,
        }

    @property
    def held(self) -> int:
        """Bytes that all KV caches take before the next steps, at most."""
        return self.groups.bytes + self._count_trial() + self.reading_bytes + self.kept_bytes

    @property
    def growth(self) -> int:
        """Bytes by which the arrays of the groups grow with the next step."""
        return self.groups.bytes_with((), 1, self.groups.fit) - self.groups.bytes

    def limit_padding(self, bytes: int) -> None:
        """Keep groups apart for which so many bytes would be padding."""
        self.groups.padding = min(self._facts.padding, bytes)

    def _measure(self, reading: Reading) -> int:
        return self._measure_text(reading.rows[0], reading.source_bytes)

    def _measure_text(self, row: Row, source_bytes: int) -> int:
        """Bytes of the KV cache of a row's text when it is read, or of the arrays in which the row
        is then tried. One that was cut back is as large as it was."""
        own = max(self.measure(row.length), source_bytes)
        if row is self._recovery.trial or row.state is RowState.RECOVERING:
            return max(own, self._measure_trial(row))
        return own

    @property
    def _readings(self) -> list[Reading]:
        recovering = self._recovery.reading
        return [*self.queue.begun, *([] if recovering is None else [recovering])]

    @property
    def _trial_bytes(self) -> int:
        """Bytes of the arrays in which a row is tried."""
        row = self._recovery.trial
        return 0 if row is None else self._measure_trial(row)

    def _count_trial(self) -> int:
        """The same, once they are there, and not only the text that was read."""
        row = self._recovery.trial
        coming = self._facts.batched and row is not None and _is_fresh(row)
        return 0 if coming else self._trial_bytes

    def _count_tried(self, coming: Iterable[Row]) -> int:
        """Bytes of the arrays in which a row was tried, when it goes over to those of others."""
        if not self.groups:
            return 0
        lost = [row for row in coming if row.state is RowState.RECOVERING]
        return max(map(self._measure_trial, lost), default=self._trial_bytes)

    def _measure_trial(self, row: Row) -> int:
        room = self._recovery.room
        if room is None or row.id not in room.rows or row.state is RowState.RECOVERING:
            room = choose_room(row)  # its text has not grown since it was chosen, if it was
        return self._facts.kv_bytes(room.columns)


def _is_fresh(row: Row) -> bool:
    return row.state is RowState.FRESH
