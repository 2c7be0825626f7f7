"""The line of one model: its jobs that wait for a slot, and those that have one.

All jobs of a model stand in it, those for texts to embed too. Whose turn it is: see `fair_queue`.
A row gets its slot when it is its turn, a slot is free, and there is memory to read its text: the
memory budget looks at the head of each line, and nobody behind it is served before. Texts to embed
need no memory to begin, so at their turn they get a free slot at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mlxsrv.engine.orders import Turn
from mlxsrv.engine.scheduling.fair_queue import FairQueue
from mlxsrv.engine.scheduling.row import Row


class JobLine:
    """The line of one model.

    Args:
        slots: how many jobs are served together.
        numbers: those of rows, in the order in which their turns come, over all models.
    """

    def __init__(self, slots: int, numbers: Iterator[int]) -> None:
        self._slots = slots
        self._numbers = numbers
        self._queue: FairQueue[Row | int] = FairQueue()
        self._begins: dict[int, Callable[[], None]] = {}  # by the ids of waiting jobs of texts
        self._numbered: Row | None = None  # the head that has got its number

    def __len__(self) -> int:
        """The number of jobs that wait."""
        return len(self._queue)

    @property
    def rows(self) -> int:
        """The number of rows that wait."""
        return len(self._queue) - len(self._begins)

    @property
    def free(self) -> int:
        """The number of free slots."""
        return self._slots - self._queue.served

    @property
    def head(self) -> Row | None:
        """The row whose turn it is, if a slot is free: it waits for memory."""
        if not self._queue or self.free <= 0:
            return None
        row = self._queue.next
        assert isinstance(row, Row), "texts that may begin have begun"
        if row is not self._numbered:
            self._numbered = row
            row.number = next(self._numbers)
        return row

    def join_row(self, row: Row) -> None:
        self._queue.enqueue(row, row.job.turn)
        self._serve_texts()

    def join_texts(self, job: int, turn: Turn, begin: Callable[[], None]) -> None:
        """Wait with a job of texts; `begin` is called when it is its turn."""
        self._begins[job] = begin
        self._queue.enqueue(job, turn)
        self._serve_texts()

    def serve_head(self) -> None:
        """Give the head its slot."""
        self._numbered = None
        self._queue.serve_next()
        self._serve_texts()

    def leave(self, job: Row | int, tokens: int = 0) -> None:
        """Give the slot of a job back, or wait no longer.

        Args:
            tokens: read and drawn for it.
        """
        if self._queue.waits(job):
            self._queue.leave(job)
            if isinstance(job, int):
                del self._begins[job]
        else:
            self._queue.finish(job, tokens)
        self._serve_texts()

    def _serve_texts(self) -> None:
        """Have the jobs of texts begin whose turn it is, as far as slots are free."""
        while self.free > 0 and isinstance(job := self._queue.next, int):
            self._queue.serve_next()
            self._begins.pop(job)()
