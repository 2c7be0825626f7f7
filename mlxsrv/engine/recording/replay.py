"""Replay: gives recorded orders and outcomes to a scheduler, and compares its plans with those that
were recorded. A difference shows that the scheduler decides differently now.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable

import msgspec

from mlxsrv.engine.events import Failed, Token
from mlxsrv.engine.orders import Submit
from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import WorkItem
from mlxsrv.engine.recording.record_file import RecordedRound, RecordReader, shorten
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.errors import ServeError
from mlxsrv.version import __version__


class Difference(msgspec.Struct, frozen=True):
    """The first round that went otherwise: `what` is one sentence.

    `recorded` and `planned` are its plans, if they differ.
    """

    round: int
    what: str
    recorded: tuple[WorkItem, ...] = ()
    planned: tuple[WorkItem, ...] = ()


class ReplaySummary(msgspec.Struct):
    """The contents of the record, as far as it was replayed.

    Attributes:
        failures: how often jobs have failed, by reason.
        items: work items done.
        faults: how often work items have failed, by reason.
        ended: the work item that was next when the record ended; None if the last plan was done.
    """

    rounds: int = 0
    items: int = 0
    jobs: int = 0
    texts: int = 0
    tokens: int = 0
    seconds: float = 0.0
    faults: Counter[str] = msgspec.field(default_factory=Counter)
    failures: Counter[str] = msgspec.field(default_factory=Counter)
    ended: str | None = None
    difference: Difference | None = None


class Replay:
    """One replay of a record."""

    def __init__(self, reader: RecordReader) -> None:
        self._reader = reader
        self._scheduler = Scheduler()
        self.summary = ReplaySummary()

    def run(self) -> ReplaySummary:
        """Replay the record to its end, or to the first difference.

        Raises:
            RecordError: it cannot be read to its end.
        """
        for this in self._reader:
            try:
                self.summary.difference = self._play(this)
            except Exception as error:  # as it may have been when it was recorded: a bug is found
                trace = "".join(traceback.format_exception(error))
                self.summary.difference = Difference(this.number, f"an error:\n{trace}")
            if self.summary.difference is not None:
                break
        return self.summary

    def _play(self, this: RecordedRound) -> Difference | None:
        self._count(this.orders)
        plan = self._scheduler.plan(this.orders)
        self._take_events()
        if this.items is None:
            self.summary.ended = "the plan"
            return None
        planned = shorten(plan.items)
        if planned != this.items:
            return Difference(this.number, "the plan is another", this.items, planned)
        for work, outcome in zip(plan.items, this.outcomes, strict=False):
            self._settle(work, outcome)
        if len(this.outcomes) < len(plan.items):
            self.summary.ended = type(plan.items[len(this.outcomes)]).__name__
        return None

    def _count(self, orders: Iterable[Received]) -> None:
        self.summary.rounds += 1
        for received in orders:
            if isinstance(received.order, Submit):
                self.summary.jobs += 1
                self.summary.texts += len(received.order.job.texts)

    def _settle(self, work: WorkItem, outcome: Outcome) -> None:
        self.summary.items += 1
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


def replay_record(path: str) -> None:
    """Replay a record, and print what it has and the first difference.

    Raises:
        RecordError: the file is no record, or cannot be read to its end.
        ServeError: something differs.
    """
    reader = RecordReader(path)
    header = reader.header
    print(f"{header.system}; {_pairs(header.versions)}; {_pairs(header.device)}")
    print(f"options: {_pairs(header.options) or 'the defaults'}")
    if header.versions.get("mlxsrv") != __version__:
        print(f"This is mlxsrv {__version__}: another version may plan otherwise.")
    summary = Replay(reader).run()
    print(
        f"{summary.rounds} rounds, {summary.items} work items of {summary.seconds:.3f} s, "
        f"{summary.jobs} jobs ({summary.texts} texts to embed), {summary.tokens} tokens"
    )
    for what, reasons in (("work items", summary.faults), ("jobs", summary.failures)):
        for reason, count in reasons.most_common():
            print(f"{what} that failed: {count} times: {reason}")
    if reader.cut:
        print("the last line is not whole")
    if summary.ended is not None:
        print(f"the record ends before this was done: {summary.ended}")
    if (difference := summary.difference) is not None:
        print(f"round {difference.round}: {difference.what}")
        for name, items in (("recorded", difference.recorded), ("planned", difference.planned)):
            for work in items:
                print(f"  {name}: {work}")
        raise ServeError("the replay differs from the record")
    print("no difference")


def _pairs(values: dict[str, str] | dict[str, str | int] | dict[str, float | None]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
