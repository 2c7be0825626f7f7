"""Clients of the device thread, on a loop of their own, and jobs that are heard to their end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import Failed, JobEvent, Token
from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import WorkItem
from mlxsrv.engine.runner import Runner
from mlxsrv.generation.parameters import Sampling
from tests.support.serving import PATIENCE

numbers = itertools.count(1)


class Gate:
    """Holds the device thread at the work items of some kind, from the first until it is opened."""

    def __init__(self) -> None:
        self._reached, self._opened = threading.Event(), threading.Event()

    async def reached(self) -> None:
        """Wait until the device thread is held."""
        assert await asyncio.to_thread(self._reached.wait, PATIENCE), "no such work was begun"

    def open(self) -> None:
        self._opened.set()

    def hold(self) -> None:
        """Wait until it is opened, on the device thread."""
        self._reached.set()
        assert self._opened.wait(PATIENCE), "the gate was never opened"


@contextmanager
def gate(kind: type[WorkItem]) -> Iterator[Gate]:
    """A gate before work items of this kind. It is open at the latest when the test is over."""
    made, run_work = Gate(), Runner.run

    def hold_and_run(runner: Runner, work: WorkItem) -> Outcome:
        if isinstance(work, kind):
            made.hold()
        return run_work(runner, work)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Runner, "run", hold_and_run)
        try:
            yield made
        finally:
            made.open()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(_await(test), 60))


async def _await(test: Callable[[], Awaitable[None]]) -> None:
    await test()


@asynccontextmanager
async def open_client() -> AsyncIterator[EngineClient]:
    client = EngineClient.open()
    try:
        yield client
    finally:
        client.close()


def load(folder: Path, name: str = "m", **more: Any) -> Load:
    settings = {"max_rows": 4, "prefill_chunk": 64, "max_gap": 0.2, "prompt_cache_bytes": 0} | more
    return Load(model=name, path=str(folder), **settings)


def job(max_tokens: int = 8, model: str = "m", prompt: tuple[int, ...] = (5, 6, 7)) -> Job:
    greedy = Sampling(temperature=0)
    return Job(next(numbers), model, prompt, max_tokens, frozenset(), greedy)


class Listener:
    """Keeps what it hears and tells when the job has ended."""

    def __init__(self) -> None:
        self.events: list[JobEvent] = []
        self.began = asyncio.Event()
        self.ended = asyncio.Event()

    def __call__(self, event: JobEvent) -> None:
        self.events.append(event)
        if isinstance(event, Token):
            self.began.set()
        if isinstance(event, Failed) or (isinstance(event, Token) and event.finish):
            self.ended.set()

    @property
    def tokens(self) -> list[int]:
        return [event.id for event in self.events if isinstance(event, Token)]


async def generate(client: EngineClient, asked: Job) -> Listener:
    heard = Listener()
    client.submit(asked, heard)
    await heard.ended.wait()
    return heard
