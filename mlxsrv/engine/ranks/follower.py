"""The side of a rank that is not 0: it does the work items of rank 0's plans, and decides nothing.

Threads, and who owns what: the device thread does the work items, and notes each in the
clock. A second thread receives; what it receives goes through a queue. A third sends a beat every
second, from the clock, and the wish for a shutdown. If rank 0 is lost, the second thread ends the
process: the device thread may wait for ever in a collective.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic

from mlxsrv.engine.free_memory import release_memory
from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import WorkItem
from mlxsrv.engine.ranks.messages import (
    WAITING,
    Beat,
    RankConnection,
    RankMessage,
    Round,
    ShutdownWish,
    Stop,
    WorkFailed,
)
from mlxsrv.engine.watchdog import Clock
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

_BEAT_SECONDS = 1.0
_REST_SECONDS = 0.3
_FAILURE = 3  # the exit status of `--exit-on-failure`


class RankFollower:
    """Does the work items of rank 0's plans.

    Args:
        connection: with rank 0.
        clock: of the device thread, which notes here what it does.
    """

    def __init__(self, connection: RankConnection, clock: Clock) -> None:
        self._connection = connection
        self._clock = clock
        self._rounds: SimpleQueue[Round | None] = SimpleQueue()
        self._wishes: SimpleQueue[ShutdownWish | None] = SimpleQueue()
        self._round = 0  # which it has begun
        self._done = 0  # the last one that it has done
        self._sending = threading.Lock()
        for run in (self._listen, self._beat):
            threading.Thread(target=run, name="mlxsrv-rank-0", daemon=True).start()

    def follow(self, run: Callable[[WorkItem], Outcome]) -> None:
        """Do all work items until rank 0 stops. On the device thread."""
        worked = False
        while True:
            try:
                message = self._rounds.get(timeout=_REST_SECONDS if worked else None)
            except Empty:
                release_memory()
                worked = False
                continue
            if message is None:
                return
            self._round = message.number
            for number, work in enumerate(message.plan.items):
                self._clock.begin(work.title)
                if (reason := run(work).failure) is not None:
                    self._send(WorkFailed(message.number, number, reason))
            self._clock.stop()
            self._done = message.number
            worked = True

    def ask_to_stop(self) -> None:
        """Ask rank 0 to shut all ranks down. A signal's handler may call it: it waits for no lock,
        which the code that the signal has interrupted may hold."""
        self._wishes.put(ShutdownWish())

    def _send(self, message: RankMessage) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except OSError:  # the thread that receives notices as well, and ends the process
            _log.debug("rank 0 is lost", exc_info=True)

    def _listen(self) -> None:
        reason = "rank 0 has ended"
        try:
            while not isinstance(message := self._connection.receive(), Stop):
                self._rounds.put(message)
            self._rounds.put(None)
            self._wishes.put(None)
        except Exception as error:  # whatever it is: no other thread would notice
            log(_log, logging.CRITICAL, "ranks out of step", reason=f"{reason}: {error}")
            os._exit(_FAILURE)

    def _beat(self) -> None:
        reported = 0
        while True:
            with suppress(Empty):
                if (wish := self._wishes.get(timeout=_BEAT_SECONDS)) is None:
                    return
                self._send(wish)
            current, done = self._clock.slice, self._done
            if current is not None:
                self._send(Beat(self._round, current.what, monotonic() - current.since))
                reported = 0
            elif reported != done:
                self._send(Beat(done, WAITING, 0.0))
                reported = done
