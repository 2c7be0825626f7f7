"""Choose what observes the requests of an app: totals and, as the settings say, metrics, traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec import Struct

from mlxsrv.options import SettingsError
from mlxsrv.service.observing import Observer
from mlxsrv.settings import Settings
from mlxsrv.web.observability.totals import Totals
from mlxsrv.web.paths import OperationRoute

if TYPE_CHECKING:
    from mlxsrv.web.observability.metrics import Metrics


class Telemetry(Struct, frozen=True):
    """The observers of an app, and the routes on which they publish. `totals` is one of them, and
    `metrics` where the settings ask for them."""

    totals: Totals
    metrics: Metrics | None
    observers: tuple[Observer, ...]
    routes: tuple[OperationRoute, ...]


def make_telemetry(settings: Settings) -> Telemetry:
    """Make the observers that the settings ask for; the libraries of the others are not imported.

    Raises:
        SettingsError: an extra is not installed.
    """
    totals = Totals()
    observers: list[Observer] = [totals]
    routes: list[OperationRoute] = []
    metrics: Metrics | None = None
    if settings.metrics:
        with _extra("metrics"):
            from mlxsrv.web.observability.metrics import Metrics
        metrics = Metrics()
        observers.append(metrics)
        routes.append(metrics.route)
    if settings.otel:
        with _extra("otel"):
            from mlxsrv.web.observability.tracing import Tracing
        observers.append(Tracing())
    return Telemetry(totals, metrics, tuple(observers), tuple(routes))


@contextmanager
def _extra(name: str) -> Iterator[None]:
    """Turn a failed import into an error that names the extra."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(
            f"--{name} needs {error.name}, which is not installed: pip install 'mlxsrv[{name}]'"
        ) from None
