"""Clients of the device thread, on a loop of their own, and jobs that are heard to their end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import Failed, JobEvent, Token
from mlxsrv.engine.orders import Job, Load
from mlxsrv.generation.parameters import Sampling

numbers = itertools.count(1)


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
