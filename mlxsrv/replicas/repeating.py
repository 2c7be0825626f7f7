"""Repeat at one replica the changes that others have made."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from time import monotonic

import msgspec
from starlette.types import ASGIApp

from mlxsrv.errors import StoreFailed
from mlxsrv.logs import log
from mlxsrv.replicas.own_requests import request_of
from mlxsrv.replicas.shared_file import BUSY, NotedChange, SharedFile, StateChange
from mlxsrv.replicas.subjects import is_load

_log = logging.getLogger("mlxsrv.replicas")

_ATTACH = re.compile(r"/api/saes/([^/]+)/attach")
_DOWNLOAD_SECONDS = 300.0  # that a replica waits for an SAE before it goes on without it
_LOOK_SECONDS = 0.1

_LOOK_BUSY = 0.05  # seconds for which a look waits for other replicas; all streams wait with it
_LOOK_PAUSE = 1.0  # seconds without a look after one that has failed

_LONGEST_REASON = 500  # characters of a refusal, in the log


class ChangeRepeater:
    """Makes the changes of the shared file at one replica, in their order.

    A change that was made here is skipped, unless another one was repeated here between its
    beginning and its note: that one was made here after it, or will be.

    Args:
        app: of this replica.
        shared: has the changes.
    """

    def __init__(self, app: ASGIApp, shared: SharedFile) -> None:
        self._app = app
        self._shared = shared
        self._last_repeated = 0
        self._next_look = 0.0
        self._up_to_date = True  # as far as the shared file can be read
        self._repeating: asyncio.Task[None] | None = None
        self._loads: dict[str, asyncio.Task[None]] = {}  # the last one of each subject

    async def catch_up(self) -> None:
        """Make the changes that others have made. Without the shared file there are none: most
        requests need nothing of it."""
        if monotonic() < self._next_look:
            return
        try:
            await self.repeat(_LOOK_BUSY)
        except StoreFailed as error:
            if self._up_to_date:
                log(_log, logging.ERROR, "changes of others not known", reason=error.message)
            self._up_to_date = False
            self._next_look = monotonic() + _LOOK_PAUSE
        else:
            self._up_to_date = True

    async def repeat(self, busy: float = BUSY) -> None:
        """As `catch_up`, waiting `busy` seconds for the shared file. Raises StoreFailed.

        The task that makes the changes is not the caller's: one that goes away must not cancel a
        change half-way.
        """
        while True:
            if self._repeating is None:
                changes = self._shared.changes_after(self._shared.made, busy)
                if not changes:
                    return
                self._repeating = asyncio.create_task(self._make_all(changes))
            await asyncio.shield(self._repeating)

    async def loaded(self) -> None:
        """Wait for the loads that are under way."""
        await asyncio.gather(*self._loads.values())

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [*self._loads.values(), *([self._repeating] if self._repeating else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make_all(self, changes: Sequence[NotedChange]) -> None:
        try:
            for noted in changes:
                if not noted.own or self._last_repeated > noted.change.after:
                    self._last_repeated = noted.number
                    await self._begin(noted.change)
                self._shared.made = noted.number
        finally:
            self._repeating = None

    async def _begin(self, change: StateChange) -> None:
        """Make a change; a load is only begun. Other requests need not wait for it, as they do not
        where a client asks for it."""
        if not is_load(change.path):
            await self._make(change)
            return
        before = self._loads.get(change.subject)
        self._loads[change.subject] = asyncio.create_task(self._make(change, before))

    async def _make(self, change: StateChange, before: asyncio.Task[None] | None = None) -> None:
        """Make a change once another is over. If that fails, the replica goes on without it: it
        would fail again, and hold up all requests."""
        if before is not None:
            await asyncio.wait([before])
        try:
            if attach := _ATTACH.fullmatch(change.path):
                await self._wait_for_sae(attach[1])
            status, body = await request_of(
                self._app, change.method, change.path, change.query, change.body
            )
        except Exception:
            log(_log, logging.ERROR, "change not repeated", traceback=True, path=change.path)
            return
        if status < 400 or (change.method, status) == ("DELETE", 404):  # it is gone already
            log(_log, logging.INFO, "change repeated", path=change.path, status=status)
        else:
            reason = body.decode(errors="replace")[:_LONGEST_REASON]
            log(_log, logging.ERROR, "change not repeated", path=change.path, reason=reason)

    async def _wait_for_sae(self, id: str) -> None:
        """Wait while an SAE is downloaded: where it was attached, it was there."""
        for _ in range(int(_DOWNLOAD_SECONDS / _LOOK_SECONDS)):
            status, body = await request_of(self._app, "GET", f"/api/saes/{id}", b"")
            if status != 200 or msgspec.json.decode(body)["data"]["state"] != "downloading":
                return
            await asyncio.sleep(_LOOK_SECONDS)
