"""`--rate-limit` for all replicas together: one small actor of Ray's counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Hashable
from typing import Any

import ray
from ray.exceptions import RayError

from mlxsrv.errors import StoreFailed
from mlxsrv.web.security.rates import Allowance, RateLimit

_ANSWER_SECONDS = 1.0
_START_SECONDS = 60.0  # for the counter's process
_ALONE_SECONDS = 300.0


@ray.remote(num_cpus=0, max_restarts=-1)
class RateCounter:
    """Counts. Ray starts it again if it dies; it ends itself when no replica is left."""

    def __init__(self, limit: int) -> None:
        self._rates = RateLimit(limit)
        self._end: threading.Timer | None = None
        self.note_alive()

    def count(self, client: Hashable) -> Allowance:
        return self._rates.take(client)

    def note_alive(self) -> None:
        """A replica serves."""
        if self._end is not None:
            self._end.cancel()
        own = ray.get_runtime_context().current_actor
        self._end = threading.Timer(_ALONE_SECONDS, ray.kill, [own])
        self._end.daemon = True
        self._end.start()


class SharedRates:
    """The counter of an application, for one replica.

    Args:
        limit: requests of each client in a minute.
        app: the application's name.
    """

    def __init__(self, limit: int, app: str) -> None:
        self._limit = limit
        self._name = f"mlxsrv-rates-{app}-{limit}"  # another limit begins to count anew
        self._counter: Any = None
        ray.get(self.note_alive(), timeout=_START_SECONDS)  # so that the first request is counted

    def note_alive(self) -> Any:
        """Have a counter, and have it stay. Returns Ray's reference to its answer. Blocks for some
        milliseconds."""
        self._counter = RateCounter.options(  # type: ignore[attr-defined]
            name=self._name,
            namespace="serve",  # whatever program deploys the replicas
            lifetime="detached",  # it outlives the replica that has made it
            get_if_exists=True,
        ).remote(self._limit)
        return self._counter.note_alive.remote()

    async def count(self, client: Hashable) -> Allowance:
        """Count a request of a client. Raises StoreFailed if the counter does not answer."""
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                allowance: Allowance = await self._counter.count.remote(client)
        except (RayError, TimeoutError) as error:
            raise StoreFailed(
                "--rate-limit: the counter of all replicas, one of Ray's actors, does not answer: "
                f"{str(error).partition(chr(10))[0] or 'it takes too long'}"
            ) from None
        return allowance
