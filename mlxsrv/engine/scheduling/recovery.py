"""Recovery: what becomes of the rows of a step, or of a slice of prompts, that failed.

An exception does not tell which row caused it, for a step is one pass for all rows. So:

- Prompts of a slice that failed are read again, each alone. One that fails alone ends, unless it
  began with what a cached prompt or another row holds. That may be to blame, or may have been lost,
  so the text is read anew, and the cached prompt is dropped.
- Rows of a step that failed lose their KV caches, since these may already contain part of the
  failed step. Their texts are read anew, one row at a time. Each row is then decoded alone, in the
  solo decoder, beside the others, until it is past the token at which the step failed. A row that
  fails alone ends. The others join again and go on with the same tokens as if nothing had been: the
  token that was drawn and not delivered is drawn again, with the same key.
- A row that was in several failed work items for which no cause was found ends as well.
- Where memory was short, there were just too many rows. So fewer are decoded together, until some
  have ended, and a row that fails alone has more attempts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from mlxsrv.engine.events import Failed
from mlxsrv.engine.faults import OUT_OF_MEMORY
from mlxsrv.engine.plans import RowGroup
from mlxsrv.engine.scheduling.groups import Groups, alone
from mlxsrv.engine.scheduling.prompt_index import Tokens
from mlxsrv.engine.scheduling.reading import Reading
from mlxsrv.engine.scheduling.row import Incident, Row, RowState

_MOST_INCIDENTS = 3  # of one row that are not explained, or in which memory was short
# A fault appears when its token is read, or one token earlier, so two tokens must pass.
_SOLO_TOKENS = 2


class Recovery:
    """The rows of one model that have lost their KV caches, and the one in the solo decoder.

    Args:
        max_rows: rows that are decoded together while memory suffices.
        groups: rows that run.

    Attributes:
        fitting: rows whose KV caches fit into memory, as far as known.
        reading: the text of the row that is next in the solo decoder.
        solo: the row in the solo decoder.
        room: of that decoder's arrays, for this row, or for the one that is being read.
        granted: there is memory for the next row.
    """

    def __init__(self, max_rows: int, groups: Groups) -> None:
        self.fitting = max_rows
        self.reading: Reading | None = None
        self.solo: Row | None = None
        self.room: RowGroup | None = None
        self.granted = True
        self._max_rows = max_rows
        self._groups = groups
        self._lost: deque[Row] = deque()  # rows to be read anew and decoded alone, in turn
        # Tokens that the row must have drawn in all before it leaves the solo decoder.
        self._passed = 0

    @property
    def rows(self) -> list[Row]:
        """Rows without a KV cache, one of them perhaps half read."""
        return [*([] if self.reading is None else self.reading.rows), *self._lost]

    @property
    def next_lost(self) -> Row | None:
        """The row to read anew now."""
        if not self._lost or self.reading is not None or self.solo is not None:
            return None
        return self._lost[0] if self._groups.count < self.fitting else None

    def put_back(self, row: Row) -> None:
        """Queue a row that was being read, or was in the solo decoder: its KV cache has gone."""
        if not row.recovering:
            row.enter(RowState.RECOVERING)
        self._lost.appendleft(row)

    def begin_reading(self, reading: Reading) -> None:
        """Note that the text of the next lost row is being read."""
        row = self._lost.popleft()
        self._passed = len(row.drawn) + _SOLO_TOKENS
        self.reading = reading
        self.room = choose_room(row)

    def begin_solo(self) -> None:
        """Note that the text is read: its row is in the solo decoder from now on."""
        assert self.reading is not None
        [self.solo] = self.reading.rows
        self.reading = None

    def end_solo(self) -> Row | None:
        """Take the row out of the solo decoder, if it is past the place of the fault. Returns
        it."""
        row = self.solo
        if row is None or len(row.drawn) < self._passed:
            return None
        self.solo = None
        return row

    def drop(self, row: Row) -> Tokens | None:
        """Forget a row. Returns what is read anew of its text."""
        if row is self.solo:
            self.solo = None
        elif (reading := self.reading) is not None and row in reading.rows:
            self.reading = None
            return reading.tokens_read
        elif row in self._lost:
            self._lost.remove(row)
        return None

    # After a fault.

    def lose(self, rows: Sequence[Row], incident: Incident, *, stepping: bool) -> list[Row]:
        """Queue these rows to be read anew and decoded alone. Returns those that end: the only row
        of a step, and rows that were in too many.

        Args:
            rows: all rows of a decoder; they have lost their KV caches.
            incident: the work item that failed.
            stepping: it was a step, so a row that was alone in it is the cause.
        """
        guilty: list[Row] = []
        for row in rows:
            row.incidents.append(incident)
            if _exhausted(row) or (stepping and len(rows) == 1 and not _may_wait([row], incident)):
                guilty.append(row)
            else:
                row.enter(RowState.RECOVERING)
                row.alone = True
                self._lost.append(row)
        return guilty

    def read_again(self, readings: Sequence[Reading], incident: Incident) -> tuple[bool, list[Row]]:
        """Have the prompts of a slice that failed read again, each alone; or end the only one,
        unless a cached prompt may be to blame.

        Returns:
            Whether the rows end, and the rows of the prompts that are not recovering.
        """
        rows = [row for reading in readings for row in reading.rows]
        for reading in readings:
            reading.restart()
        for row in rows:
            row.incidents.append(incident)
            row.alone = True
        copied = any(reading.cached and not reading.opened for reading in readings)
        ends = len(readings) == 1 and not copied and not _may_wait(rows, incident)
        if self.reading in readings:
            self.reading = None
            if not ends:
                self._lost.extendleft(reversed(rows))
                rows = []
        return ends, rows

    def shrink(self, rows: int) -> None:
        """Decode at most so many rows together, since memory was short with more."""
        self.fitting = max(1, min(self.fitting, rows))

    def widen(self, ended: int, *, busy: bool) -> None:
        """Let one more row decode for each that ended well, and all rows when none is left."""
        self.fitting = min(self.fitting + ended, self._max_rows) if busy else self._max_rows


def choose_room(row: Row) -> RowGroup:
    """The room of the solo decoder's arrays for a row. The first step gives no token."""
    return alone(row, _SOLO_TOKENS + 1)


def blame(row: Row) -> Failed:
    """Return the event of a row that caused its last incident. Its incidents do not count against
    other rows any more."""
    last = row.incidents[-1]
    for each in row.incidents:
        each.explained = True
    if last.memory:
        return Failed(row.id, f"{OUT_OF_MEMORY}: {last.reason}", clear=OUT_OF_MEMORY)
    return Failed(row.id, last.reason)


def _exhausted(row: Row) -> bool:
    """Whether the row was in too many work items that failed for causes that were not found."""
    return sum(not each.explained for each in row.incidents) >= _MOST_INCIDENTS


def _may_wait(rows: Iterable[Row], incident: Incident) -> bool:
    """Whether rows that failed alone may wait for memory that others hold."""
    if not incident.memory:
        return False
    return all(sum(each.memory for each in row.incidents) < _MOST_INCIDENTS for row in rows)
