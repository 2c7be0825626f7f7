"""The routes under `/api`: one table of what each reads and what the service does for it.

A route's work gets the parts of the path and what was asked: the body or, where there is none, the
query. It gives what is to be told, which goes out in an Envelope.
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
from mlxsrv.wire.decoding import RequestDecoder, read_query

Path = Mapping[str, str]
Work = Callable[[Service, Path, Any], Awaitable[object]]


class _NoQuery(msgspec.Struct, frozen=True):
    pass


def _reads(method: str, path: str, work: Work, query: type[Any] = _NoQuery) -> Route:
    """A route without a body."""

    async def endpoint(request: Request) -> Response:
        asked = read_query(query, request.query_params)
        told = await work(service_of(request), request.path_params, asked)
        return JSONResponse(wire.success(told))

    return Route(path, endpoint, methods=[method])


def _asks(
    method: str, path: str, work: Work, bodies: RequestDecoder[Any], *, status: int = 200
) -> Route:
    """A route with a body; none is an empty object."""

    async def endpoint(request: Request) -> Response:
        asked, headers = await read_request(request, bodies, empty=b"{}")
        told = await work(service_of(request), request.path_params, asked)
        return JSONResponse(wire.success(told), status_code=status, headers=headers)

    return Route(path, endpoint, methods=[method])


# The default steering.


async def _get_steering(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    return (await service.steering.asked(asked.model)).shown


async def _set_feature(service: Service, at: Path, asked: wire.FeatureRequest) -> object:
    held = await service.steering.asked(asked.model)
    held.change({asked.feature_idx: asked.value}, asked.mode, "feature_idx")
    return held.shown


async def _set_features(service: Service, at: Path, asked: wire.FeaturesRequest) -> object:
    held = await service.steering.asked(asked.model)
    held.change(asked.steering, asked.mode, "steering")
    return held.shown


async def _enable(service: Service, at: Path, asked: wire.ModelRequest) -> object:
    held = await service.steering.asked(asked.model)
    held.enabled = True
    return held.shown


async def _disable(service: Service, at: Path, asked: wire.ModelRequest) -> object:
    held = await service.steering.asked(asked.model)
    held.enabled = False
    return held.shown


async def _clear_steering(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    held = await service.steering.asked(asked.model)
    held.drop(None)
    return held.shown


async def _remove_feature(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    held = await service.steering.asked(asked.model)
    text = at["idx"]
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise InvalidFeatureIndex(f"{text!r:.40} is no feature", param="idx")
    held.require([int(text)], "idx")
    held.drop([int(text)])
    return held.shown


# Monitoring.


async def _get_monitor(service: Service, at: Path, asked: wire.ModelQuery) -> object:
    return (await service.steering.asked(asked.model)).monitor.state


async def _get_history(service: Service, at: Path, asked: wire.HistoryQuery) -> object:
    monitor = (await service.steering.asked(asked.model)).monitor
    return monitor.history(asked.limit, asked.request_id)


async def _clear_history(service: Service, at: Path, asked: wire.ForgetQuery) -> object:
    monitor = (await service.steering.asked(asked.model)).monitor
    monitor.clear_history(asked.request_id)
    return monitor.state


async def _get_statistics(service: Service, at: Path, asked: wire.StatisticsQuery) -> object:
    return (await service.steering.asked(asked.model)).monitor.statistics(asked.chosen)


async def _clear_statistics(service: Service, at: Path, asked: wire.StatisticsQuery) -> object:
    monitor = (await service.steering.asked(asked.model)).monitor
    monitor.clear_statistics(asked.chosen)
    return monitor.state


async def _get_highest(service: Service, at: Path, asked: wire.TopRequest) -> object:
    monitor = (await service.steering.asked(asked.model)).monitor
    return monitor.highest(asked.k, asked.metric)


# Of paths that could be the same, the first counts.

_SAES = [
    _reads("GET", "/api/saes", lambda service, at, _: service.saes.all()),
    _asks(
        "POST",
        "/api/saes",
        lambda service, at, asked: service.saes.register(asked),
        wire.REGISTER_REQUESTS,
        status=202,
    ),
    _reads(
        "GET",
        "/api/saes/attachment",
        lambda service, at, asked: service.saes.attachment(asked.model),
        wire.ModelQuery,
    ),
]
_STEERING = [
    _reads("GET", "/api/saes/steering", _get_steering, wire.ModelQuery),
    _asks("POST", "/api/saes/steering", _set_feature, wire.FEATURE_REQUESTS),
    _reads("DELETE", "/api/saes/steering", _clear_steering, wire.ModelQuery),
    _asks("POST", "/api/saes/steering/batch", _set_features, wire.FEATURES_REQUESTS),
    _asks("POST", "/api/saes/steering/enable", _enable, wire.MODEL_REQUESTS),
    _asks("POST", "/api/saes/steering/disable", _disable, wire.MODEL_REQUESTS),
    _reads("DELETE", "/api/saes/steering/{idx}", _remove_feature, wire.ModelQuery),
]
_ONE_SAE = [
    _reads("GET", "/api/saes/{id}", lambda service, at, _: service.saes.one(at["id"])),
    _reads("DELETE", "/api/saes/{id}", lambda service, at, _: service.saes.forget(at["id"])),
    _reads(
        "GET",
        "/api/saes/{id}/compatibility",
        lambda service, at, asked: service.saes.compatibility(at["id"], asked.model, asked.layer),
        wire.CompatibilityQuery,
    ),
    _asks(
        "POST",
        "/api/saes/{id}/attach",
        lambda service, at, asked: service.saes.attach(at["id"], asked.model, asked.layer),
        wire.ATTACH_REQUESTS,
    ),
    _asks(
        "POST",
        "/api/saes/{id}/detach",
        lambda service, at, asked: service.saes.detach(at["id"], asked.model),
        wire.MODEL_REQUESTS,
    ),
]
_PROFILES = [
    _reads("GET", "/api/profiles", lambda service, at, _: service.profiles.all()),
    _asks(
        "POST",
        "/api/profiles",
        lambda service, at, asked: service.profiles.add(asked),
        wire.PROFILE_REQUESTS,
        status=201,
    ),
    _reads(
        "GET",
        "/api/profiles/active",
        lambda service, at, asked: service.profiles.active(asked.model),
        wire.ModelQuery,
    ),
    _asks(
        "POST",
        "/api/profiles/import",
        lambda service, at, asked: service.profiles.add(asked.profile),
        wire.IMPORT_REQUESTS,
        status=201,
    ),
    _asks(
        "POST",
        "/api/profiles/deactivate",
        lambda service, at, asked: service.profiles.deactivate(asked.model),
        wire.MODEL_REQUESTS,
    ),
    _reads("GET", "/api/profiles/{id}", lambda service, at, _: service.profiles.one(at["id"])),
    _asks(
        "PATCH",
        "/api/profiles/{id}",
        lambda service, at, asked: service.profiles.update(at["id"], asked),
        wire.PROFILE_UPDATES,
    ),
    _reads(
        "DELETE", "/api/profiles/{id}", lambda service, at, _: service.profiles.remove(at["id"])
    ),
    _reads(
        "POST",
        "/api/profiles/{id}/activate",
        lambda service, at, _: service.profiles.activate(at["id"]),
    ),
    _reads(
        "POST",
        "/api/profiles/{id}/deactivate",
        lambda service, at, _: service.profiles.deactivate_one(at["id"]),
    ),
    _reads(
        "GET",
        "/api/profiles/{id}/export",
        lambda service, at, _: service.profiles.export(at["id"]),
    ),
]
_MONITORING = [
    _reads("GET", "/api/monitoring", _get_monitor, wire.ModelQuery),
    _asks(
        "POST",
        "/api/monitoring/configure",
        lambda service, at, asked: service.steering.configure(asked),
        wire.MONITOR_REQUESTS,
    ),
    _reads("GET", "/api/monitoring/history", _get_history, wire.HistoryQuery),
    _reads("DELETE", "/api/monitoring/history", _clear_history, wire.ForgetQuery),
    _reads("GET", "/api/monitoring/statistics", _get_statistics, wire.StatisticsQuery),
    _reads("DELETE", "/api/monitoring/statistics", _clear_statistics, wire.StatisticsQuery),
    _asks("POST", "/api/monitoring/statistics/top", _get_highest, wire.TOP_REQUESTS),
]

ROUTES = [*_SAES, *_STEERING, *_ONE_SAE, *_PROFILES, *_MONITORING]
