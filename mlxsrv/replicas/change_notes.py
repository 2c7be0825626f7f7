"""Middleware behind the guard: a change is in the shared file before its client is told of it."""

from __future__ import annotations

import asyncio
import logging

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.errors import StoreFailed
from mlxsrv.logs import log
from mlxsrv.replicas.body_tap import BodyTap
from mlxsrv.replicas.shared_file import SharedFile, StateChange
from mlxsrv.replicas.subjects import subject_of
from mlxsrv.web.paths import path_below_mount
from mlxsrv.web.responses import refusal
from mlxsrv.web.security.guard import INTERNAL

_log = logging.getLogger("mlxsrv.replicas")


class ChangeNotes:
    """Writes down the requests that have changed what a replica holds for all.

    If that fails, the client is told so; the change is made here, and is written down as soon as
    that can be done. A client that goes away ends no change half-way, nor keeps it from its note.

    Args:
        app: makes the changes.
        shared: takes them.
    """

    def __init__(self, app: ASGIApp, shared: SharedFile) -> None:
        self._app = app
        self._shared = shared
        self._running: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get(INTERNAL):
            await self._app(scope, receive, send)
            return
        path = path_below_mount(scope)
        subject = subject_of(scope["method"], path)
        if subject is None:
            await self._app(scope, receive, send)
            return
        after = self._shared.made

        def change_of(body: bytes) -> StateChange | None:
            change = subject(scope["method"], path, scope["query_string"], body)
            return change and msgspec.structs.replace(change, after=after)

        tap = BodyTap(receive, change_of)
        refused = False

        async def send_noted(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] < 400:
                change = tap.finish()
                try:
                    if change is not None:
                        self._shared.add_change(change)
                except StoreFailed as error:
                    refused = True
                    log(_log, logging.ERROR, "change not shared", path=path, reason=error.message)
                    await refusal(scope, error)(scope, receive, send)
            if not refused:
                await send(message)

        async def change() -> None:
            await self._app(scope, tap.receive, send_noted)

        # Serve cancels the caller when the client leaves; a change that has begun goes on.
        task = asyncio.create_task(change())
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if not tap.whole or tap.finish() is None:  # half a body, or a request for a text
                task.cancel()
            raise
