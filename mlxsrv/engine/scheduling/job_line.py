"""The line of one model: its rows that wait for a slot, and those that have one.

All jobs of a model stand in it, those for texts to embed too. Whose turn it is: see `fair_queue`.
A row gets its slot when it is its turn, a slot is free, and there is memory to read its text: the
memory budget looks at the head of each line, and nobody behind it is served before.
"""

from __future__ import annotations

from collections.abc import Iterator

from mlxsrv.engine.scheduling.fair_queue import FairQueue
from mlxsrv.engine.scheduling.row import Row


class JobLine:
    """The line of one model.

    Args:
        slots: how many rows are served together.
        numbers: those of rows, in the order in which their turns come, over all models.
    """

    def __init__(self, slots: int, numbers: Iterator[int]) -> None:
        self._slots = slots
        self._numbers = numbers
        self._queue: FairQueue[Row] = FairQueue()
        self._numbered: Row | None = None  # the head that has got its number

    def __len__(self) -> int:
        """The number of rows that wait."""
        return len(self._queue)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self._slots - self._queue.served

    @property
    def head(self) -> Row | None:
        """The row whose turn it is, if a slot is free: it waits for memory."""
        if self.free <= 0 or (row := self._queue.next) is None:
            return None
        if row is not self._numbered:
            self._numbered = row
            row.number = next(self._numbers)
        return row

    def join(self, row: Row) -> None:
        self._queue.enqueue(row, row.job.turn)

    def serve_head(self) -> None:
        """Give the head its slot."""
        self._numbered = None
        self._queue.serve_next()

    def leave(self, row: Row, tokens: int) -> None:
        """Give the slot of a row back, or wait no longer.

        Args:
            tokens: read and drawn for it.
        """
        if self._queue.waits(row):
            self._queue.leave(row)
        else:
            self._queue.finish(row, tokens)
