"""One replica: the app, in a process of Ray Serve, as a part of one server.

What a replica holds for all is repeated at the others: a request that has changed it is written to
the shared file before it is answered, and every replica repeats what is new there before its next
request. What is asked about the server is asked of all replicas, and their answers are merged.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable, MutableMapping
from functools import partial
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from mlxsrv.errors import StoreFailed
from mlxsrv.logs import configure, log
from mlxsrv.replicas.change_notes import BodyTap, ChangeNotes
from mlxsrv.replicas.front import SESSION
from mlxsrv.replicas.gathering import Gathering, gathering_of
from mlxsrv.replicas.merging import ReplicaAnswer
from mlxsrv.replicas.shared_file import SharedFile, shared_path
from mlxsrv.settings import Settings
from mlxsrv.web.app import App
from mlxsrv.web.completions import CONVERSATION
from mlxsrv.web.paths import path_below_mount
from mlxsrv.web.security.guard import INTERNAL

_log = logging.getLogger("mlxsrv.replicas")

_ASK_SECONDS = 5.0
"""For the answers of the other replicas; one that takes longer is left out."""

_KEY = re.compile(rb"[0-9a-f]{16}")

_Message = MutableMapping[str, Any]
_Scope = MutableMapping[str, Any]
_Receive = Any
_Send = Any


class Replica:
    """The deployment's class.

    Args:
        local: Serve listens on loopback only.
    """

    def __init__(self, settings: Settings, local: bool) -> None:
        configure(settings.log_level, settings.log_format)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._shared = SharedFile(shared_path(settings, context.deployment), settings, self._id)
        self._app = App(
            settings,
            local=local,
            responses=self._shared.responses,
            rates=self._shared.rates,
            behind_guard=[partial(ChangeNotes, shared=self._shared)],
        )
        self._repeated = 0
        self._up_to_date = True  # as far as the shared file can be read
        self._repeating = asyncio.Lock()
        self._handle: Any = None
        self._place = context.deployment, context.app_name

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: _Scope, receive: _Receive, send: _Send) -> None:
            await self._serve(scope, receive, send)

        return app  # a function: uvicorn takes a method for an app of ASGI 2

    async def check_health(self) -> None:
        """Have Serve replace this replica. Raises RuntimeError if only a restart may help."""
        if not self._app.service.alive:
            raise RuntimeError(f"the inference engine is {self._app.service.health}")

    async def ask(self, path: str, query: bytes) -> ReplicaAnswer:
        """Answer a GET for a replica, which has checked that it is allowed."""
        await self._catch_up()
        status, body = await self._request("GET", path, query, b"")
        return ReplicaAnswer(self._id, status, body)

    # ASGI.

    async def _serve(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, CONVERSATION: _conversation(scope)}
        await self._catch_up()
        gather = gathering_of(scope, path_below_mount(scope))
        if gather is None:
            await self._app(scope, receive, send)
        else:
            await self._ask_all(scope, receive, send, gather)

    async def _live(self, receive: _Receive, send: _Send) -> None:
        """The replica is ready when its models are loaded and it has the others' state."""
        await receive()
        async with self._app.lifespan():
            await self._app.service.preload()
            await self._repeat()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._app.drain()
        self._shared.close()
        await send({"type": "lifespan.shutdown.complete"})

    # Changes.

    async def _catch_up(self) -> None:
        """Make the changes that other replicas have made. Without the shared file there are none:
        most requests need nothing of it."""
        try:
            await self._repeat()
        except StoreFailed as error:
            if self._up_to_date:
                log(_log, logging.ERROR, "changes of others not known", reason=error.message)
            self._up_to_date = False
        else:
            self._up_to_date = True

    async def _repeat(self) -> None:
        """Make the changes that other replicas have made."""
        async with self._repeating:
            for number, change in self._shared.changes_after(self._repeated):
                if change is not None:
                    status, _ = await self._request(
                        change.method, change.path, change.query, change.body
                    )
                    level = logging.INFO if status < 400 else logging.ERROR
                    log(_log, level, "change repeated", path=change.path, status=status)
                self._repeated = number

    async def _request(
        self, method: str, path: str, query: bytes, body: bytes
    ) -> tuple[int, bytes]:
        """Make a request of the own app. Returns its status and its answer."""
        messages = deque[_Message]([{"type": "http.request", "body": body, "more_body": False}])
        answer: list[_Message] = []

        async def receive() -> _Message:
            if messages:
                return messages.popleft()
            await asyncio.Event().wait()
            raise AssertionError("it waits until it is cancelled")

        async def send(message: _Message) -> None:
            answer.append(message)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query,
            "headers": [(b"content-type", b"application/json")],
            "client": None,
            "server": None,
            INTERNAL: True,
        }
        await self._app(scope, receive, send)
        return answer[0]["status"], b"".join(each.get("body", b"") for each in answer[1:])

    # Gatherings.

    async def _ask_all(
        self, scope: _Scope, receive: _Receive, send: _Send, gather: Callable[[bytes], Gathering]
    ) -> None:
        """Send all replicas' answers, merged, instead of this one's."""
        tap = BodyTap(receive)
        started: list[_Message] = []
        parts: list[bytes] = []

        async def send_merged(message: _Message) -> None:
            if message["type"] == "http.response.start":
                started.append(message)
                return
            parts.append(message.get("body", b""))
            if message.get("more_body", False):
                return
            [start], body = started, b"".join(parts)
            gathering = gather(tap.body)
            if start["status"] in gathering.statuses:
                own = ReplicaAnswer(self._id, start["status"], body)
                if gathering.path != path_below_mount(scope):
                    own = await self.ask(gathering.path, gathering.query)
                body = gathering.merge(own, await self._ask_others(gathering))
                headers = [each for each in start["headers"] if each[0] != b"content-length"]
                length = (b"content-length", str(len(body)).encode())
                start = {**start, "headers": [*headers, length]}
            await send(start)
            await send({"type": "http.response.body", "body": body})

        await self._app(scope, tap.receive, send_merged)

    async def _ask_others(self, gathering: Gathering) -> list[ReplicaAnswer]:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(*self._place)
        try:
            found = await self._handle.broadcast(
                "ask", gathering.path, gathering.query
            ).results_async(timeout_s=_ASK_SECONDS, return_exceptions=True)
        except (RayServeException, TimeoutError) as error:
            log(_log, logging.WARNING, "replicas do not answer", reason=str(error))
            return []
        return [each for each in found if isinstance(each, ReplicaAnswer) and each.id != self._id]


def _conversation(scope: _Scope) -> str:
    """The key that the front has found; empty if it has found none."""
    session = dict(scope["headers"]).get(SESSION, b"")
    return session.decode() if _KEY.fullmatch(session) else ""
