"""One replica in a process of Ray Serve."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from typing import TYPE_CHECKING, Any

import anyio.to_thread
from ray import serve
from ray.serve.metrics import Gauge
from starlette.types import Message, Receive, Scope, Send

from mlxsrv.errors import StoreFailed
from mlxsrv.logs import configure, log
from mlxsrv.replicas.front import SESSION
from mlxsrv.replicas.rates import SharedRates
from mlxsrv.replicas.response_files import ResponseFiles, responses_folder
from mlxsrv.settings import Settings
from mlxsrv.web.app import App, Membership
from mlxsrv.web.completions import CONVERSATION

if TYPE_CHECKING:
    from prometheus_client.registry import CollectorRegistry

_log = logging.getLogger("mlxsrv.replicas")

_KEY = re.compile(rb"[0-9a-f]{16}")
_METRICS_SECONDS = 5.0


class Replica:
    """The deployment's class.

    Args:
        local: Serve listens on loopback only.
    """

    def __init__(self, settings: Settings, local: bool) -> None:
        configure(settings.log_level, settings.log_format)
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._responses = ResponseFiles(
            settings.max_responses,
            settings.max_responses_bytes,
            responses_folder(settings, context.deployment),
            self._id,
        )
        limit = settings.rate_limit
        self._rates = None if limit is None else SharedRates(limit, context.app_name)
        take = None if self._rates is None else self._rates.count
        self._app = App(
            settings, local=local, membership=Membership(self._id, self._responses, take)
        )
        self._gauges: dict[str, Gauge] = {}

    def __serve_build_asgi_app__(self) -> Any:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "lifespan":
                await self._live(receive, send)
            else:
                await self._answer(scope, receive, send)

        return app  # a function: uvicorn takes a method for an app of ASGI 2

    async def check_health(self) -> None:
        """Have Serve replace this replica. Raises RuntimeError if only a restart may help."""
        with contextlib.suppress(StoreFailed):  # requests say so
            self._responses.note_alive()
        if self._rates is not None:
            await asyncio.to_thread(self._rates.note_alive)
        if not self._app.service.alive:
            raise RuntimeError(f"the inference engine is {self._app.service.health}")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = dict(scope["headers"]).get(SESSION, b"")
        conversation = session.decode() if _KEY.fullmatch(session) else ""
        own = (b"x-mlxsrv-replica", self._id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], own]}
            await send(message)

        await self._app({**scope, CONVERSATION: conversation}, receive, send_with_id)

    async def _live(self, receive: Receive, send: Send) -> None:
        """The replica is ready when its models are loaded."""
        await receive()
        async with self._app.lifespan():
            await self._app.loaded()
            metrics = asyncio.create_task(self._publish())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._app.drain()
            metrics.cancel()
            await asyncio.gather(metrics, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _publish(self) -> None:
        """Have Ray's metrics show ours, again and again."""
        while self._app.metrics is not None:
            try:
                registry = await self._app.metrics.collect(self._app.service)
                await anyio.to_thread.run_sync(self._hand_over, registry)
            except Exception:
                log(_log, logging.ERROR, "metrics not published", traceback=True)
            await asyncio.sleep(_METRICS_SECONDS)

    def _hand_over(self, registry: CollectorRegistry) -> None:
        """Set a gauge of Ray's for each sample. Sums, counts and buckets (with `le`) are gauges as
        well: Ray's histograms take single observations only, and its counters differences."""
        for metric in registry.collect():
            for sample in metric.samples:
                name = sample.name.replace(":", "_")
                if name not in self._gauges:
                    self._gauges[name] = Gauge(name, metric.documentation, tuple(sample.labels))
                self._gauges[name].set(sample.value, dict(sample.labels))
