"""A rank that follows rank 0 does its work items, and tells how it is."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from mlxsrv.engine.outcomes import Fault, Outcome
from mlxsrv.engine.plans import Decode, RoundPlan, WorkItem
from mlxsrv.engine.ranks.follower import RankFollower
from mlxsrv.engine.ranks.messages import (
    WAITING,
    Beat,
    RankConnection,
    Round,
    ShutdownWish,
    Stop,
    WorkFailed,
)
from mlxsrv.engine.watchdog import Clock
from tests.support.serving import PATIENCE

pytestmark = pytest.mark.served  # connections are made here

T = TypeVar("T")

PLAN = RoundPlan((Decode(model=1), Decode(model=2)))


class Followed:
    """A follower in a thread that is its device thread, and rank 0's end of the connection.

    Attributes:
        go_on: its work items wait for this.
    """

    def __init__(self) -> None:
        rank_0, own = _pair()
        self.rank_0 = RankConnection(rank_0)
        self._own = RankConnection(own)
        self.follower = RankFollower(self._own, Clock())
        self.go_on = threading.Event()
        self.done: list[int] = []
        self._pool = ThreadPoolExecutor(1)
        self._following = self._pool.submit(self.follower.follow, self._work)

    def _work(self, work: WorkItem) -> Outcome:
        assert self.go_on.wait(PATIENCE)
        self.done.append(work.model)
        return Outcome(0.0, 1.0, fault=Fault("no memory") if work.model == 2 else None)

    def receive(self, kind: type[T]) -> T:
        """The next message of this kind; others are skipped."""
        while not isinstance(message := self.rank_0.receive(PATIENCE), kind):
            pass
        return message

    def close(self) -> None:
        self.go_on.set()
        self.rank_0.send(Stop())
        self._following.result(PATIENCE)
        self._pool.shutdown()
        for thread in threading.enumerate():
            if thread.name == "mlxsrv-rank-0":
                thread.join(PATIENCE)
        self.rank_0.close()
        self._own.close()


def _pair() -> tuple[socket.socket, socket.socket]:
    """Connected TCP sockets."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = socket.create_connection(server.getsockname())
        return end, server.accept()[0]


@pytest.fixture
def followed() -> Iterator[Followed]:
    made = Followed()
    yield made
    made.close()


@pytest.mark.slow
def test_a_rank_does_its_works_and_tells_what_it_is_in(followed: Followed) -> None:
    followed.rank_0.send(Round(1, PLAN))
    beat = followed.receive(Beat)
    assert (beat.round, beat.what) == (1, PLAN.items[0].title)
    followed.go_on.set()
    assert followed.receive(WorkFailed) == WorkFailed(1, 1, "no memory")
    assert followed.done == [1, 2]
    while (beat := followed.receive(Beat)).what != WAITING:
        pass
    assert beat.round == 1, "it has done its part"
    followed.go_on.clear()
    followed.rank_0.send(Round(2, PLAN))
    beat = followed.receive(Beat)
    assert (beat.round, beat.what) == (2, PLAN.items[0].title)


def test_a_signal_that_comes_while_something_is_sent_waits_for_nothing(followed: Followed) -> None:
    """A second SIGTERM may interrupt the handler of the first."""
    asked = threading.Thread(target=followed.follower.ask_to_stop, daemon=True)
    with followed.follower._sending:
        asked.start()
        asked.join(PATIENCE)
        assert not asked.is_alive()
    assert followed.receive(ShutdownWish) == ShutdownWish()
