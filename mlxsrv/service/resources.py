"""The parts of the service that every request uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mlxsrv.models.pool.pool import Pool
from mlxsrv.service.observing import Observer
from mlxsrv.service.steering.registry import SteeringRegistry
from mlxsrv.settings import Settings


@dataclass(frozen=True)
class Resources:
    """Made once for each app, and given to each of its requests.

    Attributes:
        fingerprint: names the versions that answer, for `system_fingerprint`.
        job_ids: counts up; an id is used once in the life of the app.
    """

    settings: Settings
    pool: Pool
    steering: SteeringRegistry
    observers: Sequence[Observer]
    fingerprint: str
    job_ids: Iterator[int]
