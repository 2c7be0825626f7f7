"""Slices of a load on several ranks: each phase begins on all of them at once.

Ranks may read different numbers of bytes, so one has read its part before another. A pass of the
model has collectives, so it must not begin before all have.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import TypeVar

import msgspec

from mlxsrv.engine.ranks.rank_group import RankGroup

T = TypeVar("T")


class Meet(Enum):
    """Yielded by a load at a point that all ranks must reach before any goes on."""

    HERE = "here"


class _State(Enum):
    GOING = "going"
    MET = "met"
    DONE = "done"
    FAILED = "failed"


class _Report(msgspec.Struct, frozen=True):
    """The report of a rank to the others after a slice."""

    state: _State
    reason: str = ""


def in_step(slices: Generator[Meet | None, None, T], ranks: RankGroup) -> Generator[None, None, T]:
    """Do slices on all ranks, until all are done.

    Raises:
        Exception: what the slices raise; ValueError if those of another rank have failed.
    """
    own = _Report(_State.GOING)
    result: list[T] = []
    error: Exception | None = None
    met = False  # passes of the model run: a rank that fails cannot report it in a collective
    while True:
        if own.state is _State.GOING:
            try:
                own = _Report(_State.GOING if next(slices) is None else _State.MET)
            except StopIteration as done:
                result.append(done.value)
                own = _Report(_State.DONE)
            except Exception as raised:
                if met:
                    raise
                own, error = _Report(_State.FAILED, str(raised)), raised
        reports = [
            msgspec.msgpack.decode(each, type=_Report)
            for each in ranks.exchange(msgspec.msgpack.encode(own))
        ]
        if error is not None:
            raise error
        for rank, report in enumerate(reports):
            if report.state is _State.FAILED:
                raise ValueError(f"rank {rank} failed: {report.reason}")
        states = {report.state for report in reports}
        if states == {_State.DONE}:
            return result[0]
        if states == {_State.MET}:
            own, met = _Report(_State.GOING), True
        yield
