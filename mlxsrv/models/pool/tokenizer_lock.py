"""A fair lock on a model's tokenizer, which only one thread at a time may use.

The lock is granted first come, first served. Long work gives it up after every piece of text and
queues for it again, so a short prompt never waits for the whole of a long one.

`run` belongs to the event loop. `pause` is called in the worker thread that `run` started.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from mlxsrv.prompts.encoding import PIECE_CHARACTERS

V = TypeVar("V")


class TokenizerLock:
    """The lock of one model's tokenizer. Lives on the event loop."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)
        # Per worker thread: its `holder`, and the `characters` of text since the last pause.
        self._thread = threading.local()

    @property
    def busy(self) -> bool:
        return self._limiter.borrowed_tokens > 0

    async def run(self, work: Callable[[], V]) -> V:
        """Run `work` in a worker thread that holds the lock. A caller that is cancelled waits until
        that thread's next `pause`, which ends it."""
        holder = object()
        await self._limiter.acquire_on_behalf_of(holder)
        try:
            # A limiter of its own: a thread that waits for the lock must not use up the threads
            # that others need.
            alone = anyio.CapacityLimiter(1)
            return await anyio.to_thread.run_sync(self._work, holder, work, limiter=alone)
        finally:
            # `pause` may have been ended after it gave the lock up, before it had it again.
            if holder in self._limiter.statistics().borrowers:
                self._limiter.release_on_behalf_of(holder)

    def _work(self, holder: object, work: Callable[[], V]) -> V:
        self._thread.holder, self._thread.characters = holder, 0
        try:
            return work()
        finally:
            del self._thread.holder, self._thread.characters

    def pause(self, characters: int = PIECE_CHARACTERS) -> None:
        """Let those who wait have the lock, if this work has had the characters of a piece.

        Raises:
            CancelledError: nobody waits for this work any more.
        """
        # Counted per holder: short texts of others are no reason to pause.
        self._thread.characters += characters
        if self._thread.characters < PIECE_CHARACTERS:
            return
        self._thread.characters = 0
        anyio.from_thread.check_cancelled()
        # Read without synchronisation: at worst, a newcomer waits for one more piece.
        if self._limiter.statistics().tasks_waiting:
            anyio.from_thread.run(self._requeue, self._thread.holder)

    async def _requeue(self, holder: object) -> None:
        self._limiter.release_on_behalf_of(holder)
        await anyio.lowlevel.checkpoint()  # the task that this woke goes first
        await self._limiter.acquire_on_behalf_of(holder)
