"""Rank 0's side: it sends each plan to the other ranks, and notices when one of them is lost.

Threads, and who owns what: the device thread sends. Each other rank has a thread here that
receives. It touches `_beats`, of which it replaces its own entry, and `_faults`, under the lock.
`lost` is called on such a thread, for the device thread may wait for ever in a collective
that the lost rank will not join.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from time import monotonic, sleep

import msgspec

from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import RoundPlan
from mlxsrv.engine.ranks.messages import (
    WAITING,
    Beat,
    Hello,
    RankConnection,
    RankMessage,
    Round,
    ShutdownWish,
    Stop,
    WorkFailed,
    encode_message,
)
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.engine")

JOIN_SECONDS = 60.0
"""For MLX to connect all ranks. Then the process ends, with a traceback."""

COME_SECONDS = JOIN_SECONDS / 2
"""For all ranks to come to rank 0, once MLX has connected them. Who does not come is named."""

_FAULT_SECONDS = 5.0
_HELLO_SECONDS, _HELLO_BYTES = 2.0, 1024
_WISH_SECONDS = 0.5
_LOOK_SECONDS = 0.05  # between looks whether all ranks have come
_SILENT_SECONDS = 3.0  # a rank that works sends a beat every second


class Meeting(msgspec.Struct, frozen=True):
    """The place where rank 0 waits for the others. `token` keeps strangers out."""

    host: str
    port: int
    token: str


class RankLost(Exception):
    """A rank has ended, or is no longer in step. The message names it."""


class RankLeader:
    """The other ranks, as rank 0 knows them.

    Args:
        connections: with each of them, in their order; the first is rank 1's.
        lost: called with the reason, once, when a rank is lost.
        wished: called when a rank asks for a shutdown.
        patience: seconds in which all ranks must report a fault that one of them has.
    """

    def __init__(
        self,
        connections: Sequence[RankConnection],
        lost: Callable[[str], None],
        wished: Callable[[], None] = lambda: None,
        patience: float = _FAULT_SECONDS,
    ) -> None:
        self._connections = connections
        self._patience = patience
        self._wished = wished
        self._lost = lost
        self._round = 0
        self._over = threading.Event()  # a rank is lost, or all are to stop
        self._losing = threading.Lock()
        self._beats: dict[int, tuple[float, Beat]] = {}  # when it came, by rank
        self._faults: dict[
            tuple[int, int], set[int]
        ] = {}  # ranks, by round and index of the work item
        self._changed = threading.Condition()
        self._done = (0, -1)  # the last work item that succeeded here
        self._reason: str | None = None  # why a rank is lost
        for rank, connection in enumerate(connections, start=1):
            name = f"mlxsrv-rank-{rank}"
            arguments = (rank, connection)
            threading.Thread(target=self._listen, args=arguments, name=name, daemon=True).start()

    # The device thread's.

    def send(self, plan: RoundPlan) -> None:
        """Have all ranks do the work items of a plan. Raises RankLost."""
        if self._reason is not None:  # a send to a closed connection may succeed
            raise RankLost(self._reason)
        self._round += 1
        self._send(Round(self._round, plan))

    def note_outcome(self, work: int, outcome: Outcome) -> None:
        """Compare how a work item of the round has ended here with the other ranks.

        Raises:
            RankLost: it failed on some ranks and not on others. These have not taken part in the
                same collectives, so they cannot go on together.
        """
        key = (self._round, work)
        with self._changed:
            if outcome.failure is not None:
                everyone = set(range(1, len(self._connections) + 1))
                alike = self._changed.wait_for(
                    lambda: self._faults.get(key) == everyone, self._patience
                )
                self._faults.pop(key, None)
                if not alike:
                    self._fail("a work has failed on rank 0, and not on all ranks")
            elif key in self._faults:
                self._fail(f"a work has failed on rank {min(self._faults[key])} only")
            else:
                self._done = key

    def stop(self) -> None:
        """Have the other ranks end."""
        if not self._over.is_set():
            self._over.set()
            for connection in self._connections:
                try:
                    connection.send(Stop())
                except OSError:
                    _log.debug("a rank ended before it was asked to", exc_info=True)

    def _send(self, message: RankMessage) -> None:
        encoded = encode_message(message)
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send_encoded(encoded)
            except OSError as error:
                self._fail(f"rank {rank} is lost: {error}")

    def _fail(self, reason: str) -> None:
        self._lose(reason)
        raise RankLost(reason)

    def _lose(self, reason: str) -> None:
        with self._losing:  # several ranks may be lost at once, and each has a thread
            if self._over.is_set():
                return
            self._reason = reason
            self._over.set()
        log(_log, logging.CRITICAL, "ranks out of step", reason=reason)
        self._lost(reason)

    # From any thread.

    def describe(self) -> str:
        """The state of the other ranks, for a report of a slow step."""
        return "; ".join(
            f"rank {rank} {self._describe(rank)}" for rank in range(1, len(self._connections) + 1)
        )

    def _describe(self, rank: int) -> str:
        if rank not in self._beats:
            return "is silent"
        came, beat = self._beats[rank]
        silent = monotonic() - came
        if beat.what == WAITING and beat.round == self._round:
            return f"has done its part {silent:.0f} s ago"
        if silent > _SILENT_SECONDS:
            return f"is silent for {silent:.0f} s"
        return f"{beat.what} for {beat.seconds:.0f} s, round {beat.round} of {self._round}"

    # A rank's own thread.

    def _listen(self, rank: int, connection: RankConnection) -> None:
        try:
            while True:
                self._take(rank, connection.receive())
        except (OSError, msgspec.DecodeError) as error:
            self._lose(f"rank {rank} is lost: {error}")
        finally:
            connection.close()

    def _take(self, rank: int, message: RankMessage) -> None:
        match message:
            case Beat():
                self._beats[rank] = (monotonic(), message)
            case ShutdownWish():
                log(_log, logging.INFO, "a rank asks for a shutdown", rank=rank)
                # A signal to all ranks reaches rank 0 as well, and is then the first. A second one
                # would end its requests at once.
                wish = threading.Timer(_WISH_SECONDS, self._wished)
                wish.daemon = True
                wish.start()
            case WorkFailed(round, work, reason):
                log(_log, logging.ERROR, "a rank failed", rank=rank, reason=reason)
                with self._changed:
                    self._faults.setdefault((round, work), set()).add(rank)
                    self._changed.notify_all()
                    late = (round, work) <= self._done
                if late:
                    self._check((round, work))
                    return
                check = threading.Timer(self._patience, self._check, ((round, work),))
                check.daemon = True
                check.start()

    def _check(self, key: tuple[int, int]) -> None:
        """Notice a failure that rank 0 does not have. The work item has succeeded here, or rank 0
        waits in a collective that the other rank has left."""
        with self._changed:
            ranks = self._faults.get(key)
        if ranks:
            self._lose(f"a work has failed on rank {min(ranks)} only")


class Reception:
    """The place where rank 0 waits for the others.

    Args:
        host: the address to listen at.
        patience: seconds in which one that has connected must say who it is.
    """

    def __init__(self, host: str, patience: float = _HELLO_SECONDS) -> None:
        self._patience = patience
        self._socket = socket.create_server((host, 0))
        self._token = secrets.token_hex(16)

    @property
    def meeting(self) -> Meeting:
        host, port = self._socket.getsockname()[:2]
        return Meeting(host, port, self._token)

    def receive(self, count: int, seconds: float) -> list[RankConnection]:
        """Wait so many seconds for so many other ranks. Raises RankLost if they do not come."""
        found: dict[int, RankConnection] = {}
        deadline = monotonic() + seconds
        with self._socket:
            self._socket.settimeout(_LOOK_SECONDS)
            while len(found) < count:
                if monotonic() > deadline:
                    for each in [*found.values()]:  # a thread may add one
                        each.close()
                    missing = sorted(set(range(1, count + 1)) - found.keys())
                    raise RankLost(self._missing(missing, seconds))
                try:
                    connection = RankConnection(self._socket.accept()[0])
                except TimeoutError:
                    continue
                except OSError:  # a stranger that has gone already
                    sleep(_LOOK_SECONDS)
                    continue
                # Each on a thread of its own: strangers that are silent must not hold up a rank.
                threading.Thread(target=self._meet, args=(connection, found), daemon=True).start()
        return [found[rank] for rank in sorted(found)]

    def _meet(self, connection: RankConnection, found: dict[int, RankConnection]) -> None:
        """Add the connection to those `found` if it is a rank's, else close it."""
        if (rank := self._greet(connection)) is None:
            connection.close()
        else:
            found[rank] = connection

    def _missing(self, ranks: list[int], seconds: float) -> str:
        host, port = self._socket.getsockname()[:2]
        names = ", ".join(map(str, ranks))
        return (
            f"--parallel: rank {names} did not come to {host}:{port} within {seconds:g} s; see its "
            "log, and let its host connect to any port of this one"
        )

    def _greet(self, connection: RankConnection) -> int | None:
        """The rank that has connected; None for a stranger."""
        try:
            hello = connection.receive(self._patience, _HELLO_BYTES)
        except Exception:  # it may send anything; what it is worth, its token says
            return None
        if not isinstance(hello, Hello):
            return None
        known = secrets.compare_digest(hello.token.encode(), self._token.encode())
        return hello.rank if known else None
