"""Replay: gives recorded orders and outcomes to a scheduler, and compares its plans with those that
were recorded. They are the same, or the scheduler decides otherwise than it did.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import msgspec

from mlxsrv.engine.events import Failed, Token
from mlxsrv.engine.orders import Embed, Submit
from mlxsrv.engine.plans import Decode, Work
from mlxsrv.engine.recording.record_file import (
    OutcomeLine,
    RecordedRound,
    RecordError,
    RecordReader,
    shorten,
)
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler

JobKey = tuple[int, int]
"""The client's number and the job's id."""


def _find_ends(rounds: Iterable[RecordedRound]) -> dict[JobKey, set[int]]:
    """Return the pseudonyms of end tokens that jobs have drawn: a replay must know them before
    their time. Raises RecordError."""
    found: dict[JobKey, set[int]] = {}
    for this in rounds:
        for client, job, token in [end for result in this.results for end in result.ends]:
            found.setdefault((client, job), set()).add(token)
    return found


class Difference(msgspec.Struct, frozen=True):
    """The first round that went otherwise: `what` is one sentence.

    `recorded` and `planned` are its plans, if they differ.
    """

    round: int
    what: str
    recorded: tuple[Work, ...] | None = None
    planned: tuple[Work, ...] | None = None


class ReplaySummary(msgspec.Struct):
    """The contents of the record, as far as it was replayed.

    Attributes:
        failures: how often jobs have failed, by reason.
        faults: how often works have failed, by reason.
        ended: the last plan was not done when the record ended; the work that is next.
    """

    rounds: int = 0
    works: int = 0
    jobs: int = 0
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    failures: Counter[str] = msgspec.field(default_factory=Counter)
    ended: str | None = None
    difference: Difference | None = None


class Follower(Protocol):
    """Does something with each work of a replay, before its outcome is settled."""

    def take_orders(self, orders: Sequence[Received]) -> None:
        """Look at the orders of a round."""

    def follow(self, work: Work, result: OutcomeLine) -> str | None:
        """Look at a work, and what came of it. Returns what is wrong, in one sentence.

        Raises RecordError if it cannot be looked at.
        """


def _guesses(work: Work) -> bool:
    return isinstance(work, Decode) and any(work.guesses)


class Replay:
    """One replay of a record.

    Args:
        reader: the record.
        follower: takes all works, besides the scheduler.
        show: called with each round before it is replayed.

    Raises:
        RecordError: it cannot be read to its end.
    """

    def __init__(
        self,
        reader: RecordReader,
        follower: Follower | None = None,
        show: Callable[[RecordedRound], None] = lambda _: None,
    ) -> None:
        self._reader = reader
        self._ends = {} if reader.header.tokens else _find_ends(reader)
        self._follower = follower
        self._show = show
        self._scheduler = Scheduler()
        self.summary = ReplaySummary()

    def run(self) -> ReplaySummary:
        """Replay the record to its end, or to the first difference. Raises RecordError."""
        for this in self._reader:
            self._show(this)
            try:
                self.summary.difference = self._play(this)
            except RecordError:
                raise
            except Exception as error:  # as it may have been when it was recorded: a bug is found
                trace = "".join(traceback.format_exception(error))
                self.summary.difference = Difference(this.number, f"an error:\n{trace}")
            if self.summary.difference is not None:
                break
        return self.summary

    def _play(self, this: RecordedRound) -> Difference | None:
        orders = [self._complete(received) for received in this.orders]
        self._count(orders)
        if self._follower is not None:
            self._follower.take_orders(orders)
        plan = self._scheduler.plan(orders)
        self._take_events()
        if this.works is None:
            self.summary.ended = "the plan"
            return None
        if shorten(plan.works) != this.works:
            if not self._reader.header.tokens and any(map(_guesses, this.works)):
                raise RecordError(
                    "tokens were looked up in texts, which takes real token ids: "
                    "record with --record-tokens"
                )
            what = "the plan is another"
            return Difference(this.number, what, this.works, shorten(plan.works))
        for work, result in zip(plan.works, this.results, strict=False):
            if self._follower is not None and (wrong := self._follower.follow(work, result)):
                return Difference(this.number, wrong)
            self._settle(work, result)
        if len(this.results) < len(plan.works):
            self.summary.ended = type(plan.works[len(this.results)]).__name__
        return None

    def _complete(self, received: Received) -> Received:
        """The order with the end tokens that its job has drawn, where these are pseudonyms."""
        order = received.order
        if self._reader.header.tokens or not isinstance(order, Submit):
            return received
        ends = frozenset(self._ends.get((received.client, order.job.id), ()))
        job = msgspec.structs.replace(order.job, end_tokens=ends)
        return Received(received.client, msgspec.structs.replace(order, job=job))

    def _count(self, orders: Iterable[Received]) -> None:
        self.summary.rounds += 1
        for received in orders:
            self.summary.jobs += isinstance(received.order, (Submit, Embed))
            if isinstance(received.order, Embed):
                self.summary.texts += len(received.order.texts)

    def _settle(self, work: Work, result: OutcomeLine) -> None:
        outcome = result.outcome
        self.summary.works += 1
        self.summary.seconds += outcome.seconds
        if outcome.fault is not None:
            self.summary.faults[outcome.fault.reason] += 1
        self._scheduler.settle(work, outcome)
        self._take_events()

    def _take_events(self) -> None:
        for _, events in self._scheduler.take_events():
            for event in events:
                self.summary.tokens += isinstance(event, Token)
                if isinstance(event, Failed):
                    self.summary.failures[event.reason] += 1
