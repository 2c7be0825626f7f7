"""A scheduler and a runner with prompts on disk, driven by hand, and ended like a process."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from mlxsrv.engine.events import Failed, PromptRead, Token
from mlxsrv.engine.orders import (
    Ask,
    Cancel,
    Close,
    Fetched,
    Job,
    Load,
    Open,
    Order,
    StorageReport,
    Submit,
    Unload,
    Written,
)
from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import WorkItem
from mlxsrv.engine.recording.recorder import RecordedScheduler, Recorder, Recording
from mlxsrv.engine.runner import Runner
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.generation.parameters import Sampling
from tests.support.recording import BYTES
from tests.support.serving import PATIENCE


@contextmanager
def full() -> Iterator[None]:
    """For a time a file that grows beyond a few bytes is an error, as it is on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class StoringEngine:
    """One process's engine, as the device thread drives it.

    Args:
        folder: the model's.
        disk: the directory of prompts.
        record: the path of a record.
        change: makes other outcomes of those that work items have.
        more: of the load's order.
    """

    def __init__(
        self,
        folder: Path,
        disk: Path | None,
        *,
        record: Path | None = None,
        change: Callable[[WorkItem, Outcome], Outcome] = lambda _, outcome: outcome,
        **more: Any,
    ) -> None:
        recording = Recording(path=str(record), most_bytes=BYTES)
        self.scheduler = Scheduler() if record is None else RecordedScheduler(Recorder(recording))
        self._reported: SimpleQueue[StorageReport] = SimpleQueue()
        self.runner = Runner(self._reported.put)
        self._change = change
        self.events: list[Any] = []
        self.items: list[WorkItem] = []
        asked: dict[str, Any] = {
            "max_rows": 4,
            "prefill_chunk": 64,
            "max_gap": 0.2,
            "prompt_cache_bytes": 1 << 30,
            "prompt_cache_dir": None if disk is None else str(disk),
            "prompt_cache_disk_bytes": 1 << 30,
        }
        self.send(Open(), Ask(1, Load(model="m", path=str(folder), **(asked | more))))

    def send(self, *orders: Order) -> None:
        """Send orders, and do all that comes of them, writes to disk included."""
        received = [Received(1, order) for order in orders]
        while received or not self._at_rest:
            self.round(received)
            received = self._wait() if self.scheduler.idle and not self._at_rest else []

    def round(self, received: list[Received]) -> None:
        plan = self.scheduler.plan(received)
        for work in plan.items:
            self.items.append(work)
            outcome = self._change(work, self.runner.run(work))
            self.scheduler.settle(work, outcome)
            for _, events in self.scheduler.take_events():
                self.events += events

    @property
    def _at_rest(self) -> bool:
        storage = self.runner.storage
        busy = storage._reads or storage._writes or not self._reported.empty()
        return self.scheduler.idle and not busy

    def _wait(self) -> list[Received]:
        try:
            order = self._reported.get(timeout=PATIENCE)
        except Empty:
            raise AssertionError("the storage thread tells nothing") from None
        assert isinstance(order, (Fetched, Written))
        return [Received(0, order)] if self.runner.storage.accept(order) else []

    def ask(self, job: Job) -> tuple[list[int], int]:
        """Have a job done: the tokens that it draws, and how many of its prompt were cached."""
        self.events.clear()
        self.send(Submit(job))
        assert not any(isinstance(event, Failed) for event in self.events), self.events
        [cached] = [event.cached for event in self.events if isinstance(event, PromptRead)]
        return [event.id for event in self.events if isinstance(event, Token)], cached

    def cancel(self, job: int) -> None:
        self.send(Cancel(job))

    def unload(self) -> None:
        self.send(Unload("m"))

    def end(self) -> None:
        """End as a process does that is asked to."""
        self.send(Close())
        self.runner.storage.finish_writes()

    def find(self, kind: type[WorkItem]) -> list[Any]:
        return [work for work in self.items if isinstance(work, kind)]

    @property
    def numbers(self) -> dict[str, int]:
        [model] = self.scheduler._models.values()
        return model.statistics()


def make_job(number: int, prompt: tuple[int, ...], count: int = 12, **more: Any) -> Job:
    """Greedy, unless sampling is given."""
    asked: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "end_tokens": frozenset()}
    return Job(number, "m", prompt, count, **(asked | more))
