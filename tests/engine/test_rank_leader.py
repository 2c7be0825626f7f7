"""Rank 0 notices other ranks that are lost, and those that are no longer in step."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from time import sleep

import msgspec
import pytest

from mlxsrv.engine.outcomes import Fault, LoadStep, Outcome, Refusal
from mlxsrv.engine.plans import Decode, RoundPlan
from mlxsrv.engine.ranks import leader as leader_module
from mlxsrv.engine.ranks.leader import COME_SECONDS, JOIN_SECONDS, RankLeader, RankLost, Reception
from mlxsrv.engine.ranks.messages import (
    WAITING,
    Beat,
    Hello,
    RankConnection,
    Round,
    Stop,
    WorkFailed,
)
from tests.support.serving import PATIENCE, wait_for

pytestmark = pytest.mark.served  # connections are made here

PLAN = RoundPlan((Decode(model=1),))
GOOD = Outcome(0.0, 1.0)
BAD = Outcome(0.0, 1.0, fault=Fault("no memory"))
REFUSED = Outcome(0.0, 1.0, LoadStep(refusal=Refusal("model not loaded", "it is broken")))


class Pair:
    """Rank 0 and two others, whose ends of the connections are `others`."""

    def __init__(self, patience: float = 0.3) -> None:
        ends = _pairs(2)
        self.others = [RankConnection(end) for _, end in ends]
        self.lost: SimpleQueue[str] = SimpleQueue()
        own = [RankConnection(end) for end, _ in ends]
        self.leader = RankLeader(own, self.lost.put, patience=patience)

    def close(self) -> None:
        self.leader.stop()
        for other in self.others:
            other.close()
        for thread in threading.enumerate():
            if thread.name.startswith("mlxsrv-rank-"):
                thread.join(5)


def _send(end: socket.socket, body: bytes) -> None:
    end.sendall(len(body).to_bytes(4, "big") + body)


def _pairs(count: int) -> list[tuple[socket.socket, socket.socket]]:
    """Connected TCP sockets."""
    found = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(count):
            end = socket.create_connection(server.getsockname())
            found.append((server.accept()[0], end))
    return found


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_plans_reach_all_ranks_in_order(pair: Pair) -> None:
    pair.leader.send(PLAN)
    pair.leader.send(RoundPlan())
    pair.leader.stop()
    for other in pair.others:
        assert other.receive(PATIENCE) == Round(1, PLAN)
        assert other.receive(PATIENCE) == Round(2, RoundPlan())
        assert other.receive(PATIENCE) == Stop()


@pytest.mark.parametrize("outcome", [BAD, REFUSED])
def test_a_work_that_fails_on_all_ranks_is_no_loss(patient: Pair, outcome: Outcome) -> None:
    leader = patient.leader
    leader.send(PLAN)
    for other in patient.others:
        other.send(WorkFailed(1, 0, "no memory"))
    leader.note_outcome(0, outcome)
    leader.send(PLAN)
    leader.note_outcome(0, GOOD)
    leader._check((1, 0))  # as a timer will
    assert patient.lost.empty()


def test_a_work_that_fails_on_rank_0_only_ends_all(pair: Pair) -> None:
    pair.leader.send(PLAN)
    with pytest.raises(RankLost, match="not on all ranks"):
        pair.leader.note_outcome(0, BAD)
    assert "not on all ranks" in pair.lost.get(timeout=PATIENCE)


@pytest.mark.parametrize("settled", [True, False])
def test_a_work_that_fails_on_another_rank_only_ends_all(pair: Pair, settled: bool) -> None:
    """Also while rank 0 waits in the collective that the other has left."""
    pair.leader.send(PLAN)
    if settled:
        pair.leader.note_outcome(0, GOOD)
    pair.others[1].send(WorkFailed(1, 0, "no memory"))
    assert pair.lost.get(timeout=PATIENCE) == "a work has failed on rank 2 only"
    with pytest.raises(RankLost, match="rank 2 only"):
        pair.leader.send(PLAN)


@pytest.fixture
def patient() -> Iterator[Pair]:
    """Here, what is noticed is noticed at once."""
    made = Pair(patience=60)
    yield made
    made.close()


def test_a_failure_that_is_heard_before_the_work_has_ended_ends_all_at_once(patient: Pair) -> None:
    patient.leader.send(PLAN)
    patient.others[0].send(WorkFailed(1, 0, "no memory"))
    patient.others[0].close()  # which is heard after the failure
    patient.lost.get(timeout=PATIENCE)
    with pytest.raises(RankLost, match="rank 1 only"):
        patient.leader.note_outcome(0, GOOD)


def test_a_failure_that_is_heard_after_the_work_has_ended_ends_all_at_once(patient: Pair) -> None:
    patient.leader.send(PLAN)
    patient.leader.note_outcome(0, GOOD)
    patient.others[0].send(WorkFailed(1, 0, "no memory"))
    assert patient.lost.get(timeout=PATIENCE) == "a work has failed on rank 1 only"


def test_a_rank_that_ends_is_noticed_at_once_and_no_plan_follows(pair: Pair) -> None:
    pair.others[0].close()
    assert pair.lost.get(timeout=PATIENCE).startswith("rank 1 is lost")
    with pytest.raises(RankLost, match="rank 1 is lost"):
        pair.leader.send(PLAN)


def test_strangers_do_not_keep_ranks_from_coming() -> None:
    """Also as many as are silent for longer than ranks have to come."""
    reception = Reception("127.0.0.1", patience=PATIENCE)
    meeting = reception.meeting
    address = (meeting.host, meeting.port)
    strangers = [socket.create_connection(address) for _ in range(22)]
    strangers[1].sendall(b"\xff\xff\xff\xff")
    strangers[2].sendall(b"GET / HTTP/1.1\r\n\r\n")
    wrong = RankConnection(strangers[3])
    wrong.send(Hello(1, "\xe9 wrong"))
    _send(strangers[4], msgspec.msgpack.encode(Hello(1, "text")).replace(b"text", b"\xff\xfe\xfd!"))
    nested = 990 * b"\x91" + b"\xc0"
    _send(strangers[5], b"\x82\xa4type\xa5Hello\xa1x" + nested)
    own = RankConnection(socket.create_connection(address))
    own.send(Hello(1, meeting.token))
    [met] = reception.receive(1, PATIENCE)
    own.send(Stop())
    assert met.receive(PATIENCE) == Stop(), "it is no stranger"
    for stranger in strangers:
        stranger.close()
    own.close()
    met.close()


def test_a_stranger_that_has_gone_already_keeps_no_rank_from_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gone = [ConnectionAbortedError(), OSError("Invalid argument")]  # as macOS tells it

    def connect(accepted: socket.socket) -> RankConnection:
        if gone:
            accepted.close()
            raise gone.pop()
        return RankConnection(accepted)

    monkeypatch.setattr("mlxsrv.engine.ranks.leader.RankConnection", connect)
    reception = Reception("127.0.0.1")
    meeting = reception.meeting
    address = (meeting.host, meeting.port)
    strangers = [socket.create_connection(address) for _ in gone]
    own = RankConnection(socket.create_connection(address))
    own.send(Hello(1, meeting.token))
    [met] = reception.receive(1, PATIENCE)
    for stranger in strangers:
        stranger.close()
    own.close()
    met.close()


def test_ranks_that_do_not_come_are_named() -> None:
    reception = Reception("127.0.0.1")
    meeting = reception.meeting
    own = RankConnection(socket.create_connection((meeting.host, meeting.port)))
    own.send(Hello(2, meeting.token))
    where = f"rank 1, 3 did not come to 127.0.0.1:{meeting.port} within 0.5 s"
    with pytest.raises(RankLost, match=where):
        reception.receive(3, 0.5)
    with pytest.raises(ConnectionResetError):
        own.receive(PATIENCE)
    own.close()
    assert COME_SECONDS < JOIN_SECONDS


class SlowEvent(threading.Event):
    """Between a look at it and what follows from that, other threads have their turn."""

    def is_set(self) -> bool:
        found = super().is_set()
        sleep(0.1)
        return found


def test_several_ranks_that_are_lost_at_once_are_one_loss() -> None:
    ends = _pairs(2)
    reported: list[str] = []
    leader = RankLeader([RankConnection(end) for end, _ in ends], reported.append)
    leader._over = SlowEvent()
    threads = [t for t in threading.enumerate() if t.name.startswith("mlxsrv-rank-")]
    for _, other in ends:
        other.close()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(reported) == 1
    with pytest.raises(RankLost, match=reported[0]):
        leader.send(PLAN)


def test_a_rank_that_has_done_its_part_is_not_called_silent(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr(leader_module, "monotonic", lambda: now)
    pair.leader.send(PLAN)
    pair.others[0].send(Beat(1, WAITING, 0.0))
    pair.others[1].send(Beat(1, "decode", 2.0))
    wait_for(lambda: len(pair.leader._beats) == 2, why="both beats have come")
    now += 60
    first, second = pair.leader.describe().split("; ")
    assert first == "rank 1 has done its part 60 s ago"
    assert second == "rank 2 is silent for 60 s"
    pair.leader.send(PLAN)
    assert pair.leader.describe().startswith("rank 1 is silent for 60 s;")
