"""The storage thread: reads and writes stored prompts, beside the device thread.

It never calls MLX. What it reads of memory are arrays that the device thread has computed and holds
until the write is reported. Reads go before writes, and interrupt them between two
pieces: a client waits for a read, and nobody for a write. Between the pieces of a write the thread
rests for nine times as long as the piece took, so that streams have the processor. It has the
priority of all others: with a lower one it would be interrupted while it holds Python's lock, and
the device thread would wait for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_REST = 9  # times as long as a piece of a write takes
_LONGEST_REST = 0.2  # seconds

Task = Iterator[None]
"""A read or a write, a piece at a time. It deals with its own errors."""


class StorageThread:
    """The thread, which is started by the first task.

    `add_read`, `add_write`, `flush` and `hurry` are called on the device thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._reads: deque[Task] = deque()
        self._writes: deque[Task] = deque()
        self._working = False
        self._hurries_until = 0.0  # by time.monotonic
        self._thread: threading.Thread | None = None

    def add_read(self, task: Task) -> None:
        """Queue a read."""
        self._add(self._reads, task)

    def add_write(self, task: Task) -> None:
        """Queue a write."""
        self._add(self._writes, task)

    def flush(self, seconds: float) -> bool:
        """Wait until all is written, at most so long, without rests. What is left is given up.

        Returns:
            Whether all was done.
        """
        self.hurry(seconds)
        with self._changed:
            done = self._changed.wait_for(lambda: not self._busy, seconds)
            self._writes.clear()
            return done

    def hurry(self, seconds: float) -> None:
        """Write without rests for so many seconds."""
        with self._changed:
            self._hurries_until = time.monotonic() + seconds
            self._changed.notify_all()

    @property
    def _hurries(self) -> bool:
        return time.monotonic() < self._hurries_until

    @property
    def _busy(self) -> bool:
        return bool(self._reads or self._writes or self._working)

    def _add(self, queue: deque[Task], task: Task) -> None:
        with self._changed:
            queue.append(task)
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mlxsrv-storage", daemon=True
                )
                self._thread.start()

    # From here on: the storage thread.

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._reads or self._writes)
                self._working = True
                reads = bool(self._reads)
                task = self._reads.popleft() if reads else self._writes[0]
            seconds = self._step(task, whole=reads)
            with self._changed:
                if seconds is None and not reads and self._writes and self._writes[0] is task:
                    self._writes.popleft()
                self._working = False
                self._changed.notify_all()
                if seconds is not None:
                    self._changed.wait_for(
                        lambda: self._reads or self._hurries, min(_REST * seconds, _LONGEST_REST)
                    )

    def _step(self, task: Task, *, whole: bool) -> float | None:
        """Do a piece, or the whole task; in a hurry as much as no read waits for. Returns how long
        it took; None if the task is over."""
        began = time.perf_counter()
        try:
            for _ in task:
                if not whole and (self._reads or not self._hurries):
                    return time.perf_counter() - began
        except Exception:
            log(_log, logging.ERROR, "a stored prompt failed", traceback=True)
        return None
