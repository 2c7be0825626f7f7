"""The routes under `/api`: what the service does for each of them.

The work of a route gets the path parameters and the decoded request: the body or, if the route has
no body, the query. It returns the `data` of the envelope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxsrv.errors import InvalidFeatureIndex
from mlxsrv.service.service import Service
from mlxsrv.web.reading import read_request, service_of
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import management as wire
from mlxsrv.wire.decoding import read_query
from mlxsrv.wire.operation import Operation
from mlxsrv.wire.operations import MANAGEMENT

Path = Mapping[str, str]
Work = Callable[[Service, Path, Any], Awaitable[object]]


class _NoQuery(msgspec.Struct, frozen=True):
    pass


def _make_route(operation: Operation, work: Work) -> Route:
    async def endpoint(request: Request) -> Response:
        headers: Mapping[str, str] | None = None
        asked: Any
        if operation.body is None:
            asked = read_query(operation.query or _NoQuery, request.query_params)
        else:
            asked, headers = await read_request(request, operation.body, empty=b"{}")
        data = await work(service_of(request), request.path_params, asked)
        return JSONResponse(wire.success(data), status_code=operation.status, headers=headers)

    return Route(operation.path, endpoint, methods=[operation.method])


# The default steering.


async def _get_steering(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    return (await service.steering.find(asked.model)).as_object


async def _set_feature(service: Service, at: Path, asked: wire.FeatureRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.set_features({asked.feature_idx: asked.value}, asked.mode, "feature_idx")
    return attached.as_object


async def _set_features(service: Service, at: Path, asked: wire.FeaturesRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.set_features(asked.steering, asked.mode, "steering")
    return attached.as_object


async def _enable(service: Service, at: Path, asked: wire.ModelRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.enabled = True
    return attached.as_object


async def _disable(service: Service, at: Path, asked: wire.ModelRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.enabled = False
    return attached.as_object


async def _clear_steering(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    attached = await service.steering.find(asked.model)
    attached.remove_features(None)
    return attached.as_object


async def _remove_feature(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    attached = await service.steering.find(asked.model)
    text = at["idx"]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidFeatureIndex(f"{text!r:.40} is no feature", param="idx")
    attached.require_features([int(text)], "idx")
    attached.remove_features([int(text)])
    return attached.as_object


# Monitoring.


async def _get_monitor(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    return (await service.steering.find(asked.model)).monitor.state


async def _get_history(service: Service, at: Path, asked: wire.HistoryQuery) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    return monitor.history(asked.limit, asked.request_id)


async def _clear_history(service: Service, at: Path, asked: wire.ForgetQuery) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    monitor.clear_history(asked.request_id)
    return monitor.state


async def _get_statistics(service: Service, at: Path, asked: wire.StatisticsQuery) -> object:
    return (await service.steering.find(asked.model)).monitor.statistics(asked.chosen)


async def _clear_statistics(service: Service, at: Path, asked: wire.StatisticsQuery) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    monitor.clear_statistics(asked.chosen)
    return monitor.state


async def _get_highest(service: Service, at: Path, asked: wire.TopRequest) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    return monitor.highest(asked.k, asked.metric)


_WORK: Mapping[str, Work] = {
    "listSAEs": lambda service, at, _: service.saes.all(),
    "registerSAE": lambda service, at, asked: service.saes.register(asked),
    "getAttachment": lambda service, at, asked: service.saes.attachment(asked.model),
    "getSteering": _get_steering,
    "setFeature": _set_feature,
    "clearSteering": _clear_steering,
    "setFeatures": _set_features,
    "enableSteering": _enable,
    "disableSteering": _disable,
    "removeFeature": _remove_feature,
    "getSAE": lambda service, at, _: service.saes.one(at["id"]),
    "forgetSAE": lambda service, at, _: service.saes.forget(at["id"]),
    "getCompatibility": lambda service, at, asked: service.saes.compatibility(
        at["id"], asked.model, asked.layer
    ),
    "attachSAE": lambda service, at, asked: service.saes.attach(at["id"], asked.model, asked.layer),
    "detachSAE": lambda service, at, asked: service.saes.detach(at["id"], asked.model),
    "listProfiles": lambda service, at, _: service.profiles.all(),
    "createProfile": lambda service, at, asked: service.profiles.add(asked),
    "getActiveProfile": lambda service, at, asked: service.profiles.active(asked.model),
    "importProfile": lambda service, at, asked: service.profiles.add(asked.profile),
    "deactivateProfiles": lambda service, at, asked: service.profiles.deactivate(asked.model),
    "getProfile": lambda service, at, _: service.profiles.one(at["id"]),
    "updateProfile": lambda service, at, asked: service.profiles.update(at["id"], asked),
    "deleteProfile": lambda service, at, _: service.profiles.remove(at["id"]),
    "activateProfile": lambda service, at, _: service.profiles.activate(at["id"]),
    "deactivateProfile": lambda service, at, _: service.profiles.deactivate_one(at["id"]),
    "exportProfile": lambda service, at, _: service.profiles.export(at["id"]),
    "getMonitor": _get_monitor,
    "configureMonitor": lambda service, at, asked: service.steering.configure(asked),
    "getHistory": _get_history,
    "clearHistory": _clear_history,
    "getStatistics": _get_statistics,
    "clearStatistics": _clear_statistics,
    "getHighest": _get_highest,
}
"""The work of the service for each operation, by its id."""

ROUTES = [_make_route(operation, _WORK[operation.id]) for operation in MANAGEMENT]
