"""One replica in a process of Ray Serve."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.exceptions import RayServeException

from mlxsrv.logs import configure, log
from mlxsrv.replicas.merging import ReplicaAnswer
from mlxsrv.replicas.replica_app import ReplicaApp
from mlxsrv.replicas.shared_file import shared_path
from mlxsrv.replicas.waiting import results_in_time
from mlxsrv.settings import Settings

_log = logging.getLogger("mlxsrv.replicas")

_ASK_SECONDS = 5.0
"""For the answers of the other replicas; one that takes longer is left out."""


class Replica:
    """The deployment's class.

    Args:
        local: Serve listens on loopback only.
    """

    def __init__(self, settings: Settings, local: bool) -> None:
        configure(settings.log_level, settings.log_format)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._handle: Any = None
        self._place = context.deployment, context.app_name
        path = shared_path(settings, context.deployment)
        self._app = ReplicaApp(settings, self._id, path, local=local, ask_others=self._ask_others)

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self._app(scope, receive, send)

        return app  # a function: uvicorn takes a method for an app of ASGI 2

    async def check_health(self) -> None:
        """Have Serve replace this replica. Raises RuntimeError if only a restart may help."""
        if not self._app.service.alive:
            raise RuntimeError(f"the inference engine is {self._app.service.health}")

    async def ask(self, path: str, query: bytes) -> ReplicaAnswer:
        """Answer a GET for a replica, which has checked that it is allowed."""
        return await self._app.ask(path, query)

    async def _ask_others(self, path: str, query: bytes) -> list[ReplicaAnswer]:
        if self._handle is None:
            self._handle = serve.get_deployment_handle(*self._place)
        asked = self._handle.broadcast("ask", path, query)
        try:
            # Not `results_async`: if one replica is late, it gives the answers of none.
            async with asyncio.timeout(_ASK_SECONDS):
                answers = await asked._fetch_replica_results_async()
        except (RayServeException, TimeoutError) as error:
            log(_log, logging.WARNING, "replicas do not answer", reason=str(error))
            return []
        found = await results_in_time([each.get_async() for each in answers], _ASK_SECONDS)
        for each in found:
            if not isinstance(each, ReplicaAnswer):
                log(_log, logging.WARNING, "replica left out", path=path, reason=each)
        return [each for each in found if isinstance(each, ReplicaAnswer) and each.id != self._id]
