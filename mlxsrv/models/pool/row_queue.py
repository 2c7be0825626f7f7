"""The queue in which requests wait for a row of a model.

The model's limiter counts the rows. `FairQueue` decides who gets the next one, and only `RowQueue`
takes slots of the limiter, so nobody ever waits in the limiter's own queue, which is first come,
first served.

Used on the event loop only.
"""

from __future__ import annotations

import anyio
import anyio.lowlevel

from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.fair_queue import FairQueue


class RowQueue:
    """Gives the free rows of one model to the requests that wait for them.

    Args:
        rows: the limiter, with one slot per row.
    """

    def __init__(self, rows: anyio.CapacityLimiter) -> None:
        self._rows = rows
        self._queue = FairQueue()
        self._granted: dict[object, anyio.Event] = {}  # of those who wait

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._queue)

    @property
    def clients(self) -> int:
        """The number of clients that wait."""
        return self._queue.clients

    def resize(self, rows: int) -> None:
        """Have so many rows from now on."""
        self._rows.total_tokens = rows
        self._grant()

    async def borrow(self, borrower: object, client: Client) -> None:
        """Wait for a row.

        The row belongs to the borrower, not to the task: one task may answer a reply, and another
        may end it. If the wait is cancelled, no row is held.
        """
        # A cancellation that came before is raised here, while nothing is held. And a request of
        # many choices lets others run between two of them, even where rows are free.
        await anyio.lowlevel.checkpoint()
        granted = self._granted[borrower] = anyio.Event()
        self._queue.join(borrower, client.id, client.priority)
        self._grant()
        try:
            if not granted.is_set():
                await granted.wait()
        except BaseException:
            # The row may have been granted in the same turn of the loop, before this task ran.
            if granted.is_set():
                self.give_back(borrower, 0)
            else:
                del self._granted[borrower]
                self._queue.leave(borrower)
            raise

    def give_back(self, borrower: object, tokens: int) -> None:
        """Return a row.

        Args:
            tokens: read and generated for the borrower.
        """
        self._rows.release_on_behalf_of(borrower)
        self._queue.finish(borrower, tokens)
        self._grant()

    def _grant(self) -> None:
        """Give free rows to those whose turn it is, on their behalf: until their tasks run, nobody
        else may take them."""
        while self._queue and self._rows.available_tokens > 0:
            borrower = self._queue.serve_next()
            self._rows.acquire_on_behalf_of_nowait(borrower)
            self._granted.pop(borrower).set()
