"""Replicas in one process: the apps that Ray would run, with one shared file, on one event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from mlxsrv.replicas.merging import ReplicaAnswer
from mlxsrv.replicas.replica_app import ReplicaApp
from mlxsrv.settings import Settings


class Replicas:
    """Replicas that ask each other, with a client of each.

    Attributes:
        apps: of the replicas, in their order.
        clients: of each.
        left_out: numbers of replicas that do not answer others.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.clients: list[httpx.AsyncClient] = []
        self.left_out: set[int] = set()
        self._settings = settings
        self._path = folder / "shared"
        self.apps: list[ReplicaApp] = []

    def start(self) -> httpx.AsyncClient:
        """Start one more, and return its client."""
        own = len(self.apps)

        async def ask_others(path: str, query: bytes) -> Sequence[ReplicaAnswer]:
            others = [n for n in range(len(self.apps)) if n not in (own, *self.left_out)]
            return [await self.apps[number].ask(path, query) for number in others]

        app = ReplicaApp(self._settings, str(own), self._path, local=False, ask_others=ask_others)
        self.apps.append(app)
        transport = httpx.ASGITransport(app)
        self.clients.append(httpx.AsyncClient(transport=transport, base_url="http://x", timeout=60))
        return self.clients[-1]

    async def close(self) -> None:
        for client, app in zip(self.clients, self.apps, strict=True):
            await client.aclose()
            await app.service.close()
            app._shared.close()


@asynccontextmanager
async def replicas(folder: Path, count: int, **settings: Any) -> AsyncIterator[Replicas]:
    """So many replicas of the demo model, or of what the settings name."""
    started = Replicas(Settings(data_dir=str(folder), **settings), folder)
    for _ in range(count):
        started.start()
    try:
        yield started
    finally:
        await started.close()
