"""The app of one replica, as a part of one server.

What a replica holds for all is repeated at the others: a request that has changed it is written to
the shared file before it is answered, and every replica repeats what is new there before its next
request. What is asked about the server is asked of all replicas, and their answers are merged.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from starlette.types import Receive, Scope, Send

from mlxsrv.replicas.change_notes import ChangeNotes
from mlxsrv.replicas.front import SESSION
from mlxsrv.replicas.gathering import AskOthers, GatherAnswers
from mlxsrv.replicas.merging import ReplicaAnswer
from mlxsrv.replicas.own_requests import request_of
from mlxsrv.replicas.repeating import ChangeRepeater
from mlxsrv.replicas.shared_file import SharedFile
from mlxsrv.service.service import Service
from mlxsrv.settings import Settings
from mlxsrv.web.app import App
from mlxsrv.web.completions import CONVERSATION
from mlxsrv.web.paths import path_below_mount

_KEY = re.compile(rb"[0-9a-f]{16}")
_HEALTH = "/health"  # does not wait for changes that take long


class ReplicaApp:
    """The app, with what it shares with the other replicas.

    Args:
        id: of this replica.
        path: of the shared file.
        local: Serve listens on loopback only.
        ask_others: asks the other replicas.

    Raises:
        SettingsError: a setting is wrong, or the shared file cannot be opened.
    """

    def __init__(
        self, settings: Settings, id: str, path: Path, *, local: bool, ask_others: AskOthers
    ) -> None:
        self._id = id
        self._shared = SharedFile(path, settings, id)
        self._app = App(
            settings,
            local=local,
            responses=self._shared.responses,
            rates=self._shared.rates,
            behind_guard=[
                partial(ChangeNotes, shared=self._shared),
                partial(GatherAnswers, id=id, ask=self._answer, ask_others=ask_others),
            ],
        )
        self._changes = ChangeRepeater(self._app, self._shared)

    @property
    def service(self) -> Service:
        return self._app.service

    async def ask(self, path: str, query: bytes) -> ReplicaAnswer:
        """Answer a GET for a replica, which has checked that it is allowed."""
        if not path.startswith(_HEALTH):
            await self._changes.catch_up()
        return await self._answer(path, query)

    async def _answer(self, path: str, query: bytes) -> ReplicaAnswer:
        status, body = await request_of(self._app, "GET", path, query)
        return ReplicaAnswer(self._id, status, body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] == "http":
            scope = {**scope, CONVERSATION: _conversation(scope)}
            if not path_below_mount(scope).startswith(_HEALTH):
                await self._changes.catch_up()
        await self._app(scope, receive, send)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The replica is ready when its models are loaded and it has the others' state."""
        await receive()
        async with self._app.lifespan():
            await self._app.service.preload()
            await self._changes.repeat()
            await self._changes.loaded()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._app.drain()
            await self._changes.close()
        self._shared.close()
        await send({"type": "lifespan.shutdown.complete"})


def _conversation(scope: Scope) -> str:
    """The key that the front has found; empty if it has found none."""
    session = dict(scope["headers"]).get(SESSION, b"")
    return session.decode() if _KEY.fullmatch(session) else ""
