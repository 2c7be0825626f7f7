"""Middleware behind the guard: a change is in the shared file before its client is told of it."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxsrv.errors import StoreFailed
from mlxsrv.logs import log
from mlxsrv.replicas.shared_file import SharedFile
from mlxsrv.replicas.subjects import subject_of
from mlxsrv.web.paths import path_below_mount
from mlxsrv.web.responses import refusal
from mlxsrv.web.security.guard import INTERNAL

_log = logging.getLogger("mlxsrv.replicas")


class ChangeNotes:
    """Writes down the requests that have changed what a replica holds for all.

    If that fails, the client is refused, and may ask again: such changes set a state, so it makes
    no difference that one is made twice.

    Args:
        app: makes the changes.
        shared: takes them.
    """

    def __init__(self, app: ASGIApp, shared: SharedFile) -> None:
        self._app = app
        self._shared = shared

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get(INTERNAL):
            await self._app(scope, receive, send)
            return
        path = path_below_mount(scope)
        subject = subject_of(scope["method"], path)
        if subject is None:
            await self._app(scope, receive, send)
            return
        tap = BodyTap(receive)
        refused = False

        async def send_noted(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start" and message["status"] < 400:
                change = subject(scope["method"], path, scope["query_string"], tap.body)
                try:
                    if change is not None:
                        self._shared.add_change(change)
                except StoreFailed as error:
                    refused = True
                    log(_log, logging.ERROR, "change not shared", path=path, reason=error.message)
                    await refusal(scope, error)(scope, receive, send)
            if not refused:
                await send(message)

        await self._app(scope, tap.receive, send_noted)


class BodyTap:
    """Passes a request's body on and keeps it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.body = b""

    async def receive(self) -> Message:
        message = await self._receive()
        self.body += message.get("body", b"")
        return message
