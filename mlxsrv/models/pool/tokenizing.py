"""Turns at a model's tokenizer, which one thread at a time may use.

First come, first served; but who takes long gives up the turn between two pieces of a text and
waits for the next, so that a short prompt never waits for the whole of a long one.

`run` is the event loop's; `pause` is called in the worker thread that `run` lent the turn to.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from mlxsrv.prompts.encoding import PIECE

V = TypeVar("V")


class Turns:
    """One model's. Lives on the event loop."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(1)
        # The worker thread's own: `turn`, and `characters` of its texts since it began or paused.
        self._here = threading.local()

    @property
    def busy(self) -> bool:
        return self._limiter.borrowed_tokens > 0

    async def run(self, work: Callable[[], V]) -> V:
        """Do `work` in a worker thread, in its turn. A caller that is cancelled waits for the
        thread, which `pause` ends."""
        turn = object()
        await self._limiter.acquire_on_behalf_of(turn)
        try:
            # A limiter of its own: a thread that waits for its next turn keeps none from others.
            alone = anyio.CapacityLimiter(1)
            return await anyio.to_thread.run_sync(self._work, turn, work, limiter=alone)
        finally:
            # A turn that was given up and not taken again is somebody else's.
            if turn in self._limiter.statistics().borrowers:
                self._limiter.release_on_behalf_of(turn)

    def _work(self, turn: object, work: Callable[[], V]) -> V:
        self._here.turn, self._here.characters = turn, 0
        try:
            return work()
        finally:
            del self._here.turn, self._here.characters

    def pause(self, characters: int = PIECE) -> None:
        """Let those who wait have their turn, once this one has had the characters of a piece.
        Raises CancelledError if nobody waits for this work any more."""
        # Counted by turn: what others had before is not for this one to make up for.
        self._here.characters += characters
        if self._here.characters < PIECE:
            return
        self._here.characters = 0
        anyio.from_thread.check_cancelled()
        # Read without a lock: at worst, who comes now waits for one more piece.
        if self._limiter.statistics().tasks_waiting:
            anyio.from_thread.run(self._take_another, self._here.turn)

    async def _take_another(self, turn: object) -> None:
        self._limiter.release_on_behalf_of(turn)
        await anyio.lowlevel.checkpoint()  # whom that woke is first
        await self._limiter.acquire_on_behalf_of(turn)
