"""The routes under `/api`: what the service does for each of them.

The handler of a route gets the path parameters and the decoded request: the body or, if the route
has no body, the query. It returns the `data` of the envelope.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.errors import InvalidFeatureIndex
from mlxsrv.generation.steering import ProfileContent
from mlxsrv.service.service import Service
from mlxsrv.web.paths import OperationRoute
from mlxsrv.web.reading import read_request, service_of
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import management as wire
from mlxsrv.wire.decoding import read_query
from mlxsrv.wire.management_operations import MANAGEMENT
from mlxsrv.wire.operation import Operation

PathParams = Mapping[str, str]
Handler = Callable[[Service, PathParams, Any], Awaitable[object]]


class _NoQuery(msgspec.Struct, frozen=True):
    pass


def _make_route(operation: Operation, handler: Handler) -> OperationRoute:
    async def endpoint(request: Request) -> Response:
        headers: Mapping[str, str] | None = None
        asked: Any
        if operation.body is None:
            asked = read_query(operation.query or _NoQuery, request.query_params)
        else:
            asked, headers = await read_request(request, operation.body, empty=b"{}")
        data = await handler(service_of(request), request.path_params, asked)
        return JSONResponse(wire.success(data), status_code=operation.status, headers=headers)

    return OperationRoute(operation, endpoint)


# The default steering.


async def _get_steering(service: Service, path: PathParams, asked: wire.ModelQuery) -> object:
    return (await service.steering.find(asked.model)).as_object


async def _set_feature(service: Service, path: PathParams, asked: wire.FeatureRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.set_features({asked.feature_idx: asked.value}, asked.mode, "feature_idx")
    return attached.as_object


async def _set_features(service: Service, path: PathParams, asked: wire.FeaturesRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.set_features(asked.steering, asked.mode, "steering")
    return attached.as_object


async def _enable(service: Service, path: PathParams, asked: wire.ModelRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.enabled = True
    return attached.as_object


async def _disable(service: Service, path: PathParams, asked: wire.ModelRequest) -> object:
    attached = await service.steering.find(asked.model)
    attached.enabled = False
    return attached.as_object


async def _clear_steering(service: Service, path: PathParams, asked: wire.ModelQuery) -> object:
    attached = await service.steering.find(asked.model)
    attached.remove_features(None)
    return attached.as_object


async def _remove_feature(service: Service, path: PathParams, asked: wire.ModelQuery) -> object:
    attached = await service.steering.find(asked.model)
    text = path["idx"]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidFeatureIndex(f"{text!r:.40} is no feature", param="idx")
    attached.require_features([int(text)], "idx")
    attached.remove_features([int(text)])
    return attached.as_object


# SAEs and profiles.


async def _register(service: Service, path: PathParams, asked: wire.RegisterRequest) -> object:
    return await service.saes.register(
        repository=asked.repository_id,
        path=asked.path,
        revision=asked.revision,
        file_path=asked.file_path,
        id=asked.id,
    )


async def _update_profile(service: Service, path: PathParams, asked: wire.ProfileUpdate) -> object:
    given = msgspec.structs.asdict(asked)
    changes = {name: value for name, value in given.items() if value is not None}
    return await service.profiles.update(path["id"], changes)


async def _export_profile(service: Service, path: PathParams, _: object) -> object:
    profile = await service.profiles.one(path["id"])
    return wire.ProfileExport(
        profile=msgspec.convert(profile, ProfileContent, from_attributes=True)
    )


# Monitoring.


async def _get_monitor(service: Service, path: PathParams, asked: wire.ModelQuery) -> object:
    return (await service.steering.find(asked.model)).monitor.state


async def _configure(service: Service, path: PathParams, asked: wire.MonitorRequest) -> object:
    return await service.steering.configure(
        asked.model,
        enabled=asked.enabled,
        features=asked.features,
        top=asked.top_k,
        history_size=asked.history_size,
    )


async def _get_history(service: Service, path: PathParams, asked: wire.HistoryQuery) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    return monitor.history(asked.limit, asked.request_id)


async def _clear_history(service: Service, path: PathParams, asked: wire.ForgetQuery) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    monitor.clear_history(asked.request_id)
    return monitor.state


async def _get_statistics(
    service: Service, path: PathParams, asked: wire.StatisticsQuery
) -> object:
    return (await service.steering.find(asked.model)).monitor.statistics(asked.chosen)


async def _clear_statistics(
    service: Service, path: PathParams, asked: wire.StatisticsQuery
) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    monitor.clear_statistics(asked.chosen)
    return monitor.state


async def _get_highest(service: Service, path: PathParams, asked: wire.TopRequest) -> object:
    monitor = (await service.steering.find(asked.model)).monitor
    return monitor.highest(asked.k, asked.metric)


_HANDLERS: Mapping[str, Handler] = {
    "listSAEs": lambda service, path, _: service.saes.all(),
    "registerSAE": _register,
    "getAttachment": lambda service, path, asked: service.saes.attachment(asked.model),
    "getSteering": _get_steering,
    "setFeature": _set_feature,
    "clearSteering": _clear_steering,
    "setFeatures": _set_features,
    "enableSteering": _enable,
    "disableSteering": _disable,
    "removeFeature": _remove_feature,
    "getSAE": lambda service, path, _: service.saes.one(path["id"]),
    "forgetSAE": lambda service, path, _: service.saes.forget(path["id"]),
    "getCompatibility": lambda service, path, asked: service.saes.compatibility(
        path["id"], asked.model, asked.layer
    ),
    "attachSAE": lambda service, path, asked: service.saes.attach(
        path["id"], asked.model, asked.layer
    ),
    "detachSAE": lambda service, path, asked: service.saes.detach(path["id"], asked.model),
    "listProfiles": lambda service, path, _: service.profiles.all(),
    "createProfile": lambda service, path, asked: service.profiles.create(asked.content),
    "getActiveProfile": lambda service, path, asked: service.profiles.active(asked.model),
    "importProfile": lambda service, path, asked: service.profiles.create(asked.profile.content),
    "deactivateProfiles": lambda service, path, asked: service.profiles.deactivate(asked.model),
    "getProfile": lambda service, path, _: service.profiles.one(path["id"]),
    "updateProfile": _update_profile,
    "deleteProfile": lambda service, path, _: service.profiles.remove(path["id"]),
    "activateProfile": lambda service, path, _: service.profiles.activate(path["id"]),
    "deactivateProfile": lambda service, path, _: service.profiles.deactivate_one(path["id"]),
    "exportProfile": _export_profile,
    "getMonitor": _get_monitor,
    "configureMonitor": _configure,
    "getHistory": _get_history,
    "clearHistory": _clear_history,
    "getStatistics": _get_statistics,
    "clearStatistics": _clear_statistics,
    "getHighest": _get_highest,
}
"""The handler of the service for each operation, by its id."""

ROUTES = [_make_route(operation, _HANDLERS[operation.id]) for operation in MANAGEMENT]
