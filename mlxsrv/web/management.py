"""The routes under `/api` that manage SAEs, steering, profiles and monitoring.

A handler returns the `data` of the envelope. It gets the service, then `asked` if the route reads
something: the body of a POST or a PATCH, else the query. The values in the path come by name. The
types in its signature are those of `/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.errors import InvalidFeatureIndex, SetAtStart
from mlxsrv.generation import steering
from mlxsrv.service.service import Service
from mlxsrv.web.paths import OperationRoute
from mlxsrv.web.reading import read_request, service_of
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire import management as wire
from mlxsrv.wire.decoding import RequestDecoder, read_query
from mlxsrv.wire.operation import Operation

_SET_AT_START: Mapping[str, str] = {
    "/api/saes/steering": "--profile sets the default steering of all at start",
    "/api/saes": "--sae-dir and --attach-sae say at start which SAEs all have",
    "/api/profiles": "one process with the same --data-dir changes profiles, and --profile makes "
    "them the default steering of all at start",
    "/api/monitoring": "monitor features with a server of one process",
}
"""Remedies for changes that only one of several replicas would make, by the beginnings of paths."""


def _one_replica_only(method: str, path: str) -> SetAtStart:
    """The error for a change while several replicas serve."""
    remedy = next(text for begin, text in _SET_AT_START.items() if path.startswith(begin))
    return SetAtStart(
        f"{method} {path} would change one replica only, so no replica does it: {remedy}"
    )


def _managed(
    method: str,
    path: str,
    id: str,
    summary: str,
    description: str = "",
    *,
    status: int = 200,
    fails: tuple[int, ...] = (),
    reads: bool = False,
) -> Callable[[Callable[..., Awaitable[object]]], OperationRoute]:
    """Make a route of its handler.

    Args:
        reads: whether it changes nothing though its method is not GET; for the others see
            `Operation`.
    """
    changes = method != "GET" and not reads

    def declare(handler: Callable[..., Awaitable[object]]) -> OperationRoute:
        types = get_type_hints(handler)
        kind, has_body = types.get("asked"), method in ("POST", "PATCH")
        body = None if kind is None or not has_body else RequestDecoder(kind)
        query = None if has_body else kind

        async def endpoint(request: Request) -> Response:
            if changes and request.app.membership is not None:
                raise _one_replica_only(method, path)
            headers: Mapping[str, str] | None = None
            given: dict[str, object] = dict(request.path_params)
            if body is not None:
                given["asked"], headers = await read_request(request, body, empty=b"{}")
            elif query is not None:
                given["asked"] = read_query(query, request.query_params)
            data = await handler(service_of(request), **given)
            return JSONResponse(wire.success(data), status_code=status, headers=headers)

        operation = Operation(
            method,
            path,
            id,
            summary,
            description,
            query=query,
            body=body,
            answer=types["return"],
            status=status,
            fails=fails,
            refuses=wire.ERRORS,
        )
        return OperationRoute(operation, endpoint)

    return declare


@_managed("GET", "/api/saes", "listSAEs", "List the SAEs")
async def list_saes(service: Service) -> list[steering.SAEObject]:
    return await service.saes.all()


@_managed(
    "POST",
    "/api/saes",
    "registerSAE",
    "Register an SAE",
    "From a repository, which is downloaded, or below an `--sae-dir`.",
    status=202,
    fails=(409,),
)
async def register_sae(service: Service, asked: wire.RegisterRequest) -> steering.SAEObject:
    return await service.saes.register(
        repository=asked.repository_id,
        path=asked.path,
        revision=asked.revision,
        file_path=asked.file_path,
        id=asked.id,
    )


@_managed("GET", "/api/saes/attachment", "getAttachment", "Get the SAE of a model")
async def get_attachment(service: Service, asked: wire.ModelQuery) -> steering.AttachmentObject:
    return await service.saes.attachment(asked.model)


@_managed("GET", "/api/saes/steering", "getSteering", "Get the default steering")
async def get_steering(service: Service, asked: wire.ModelQuery) -> steering.SteeringObject:
    return (await service.steering.find(asked.model)).as_object


@_managed("POST", "/api/saes/steering", "setFeature", "Set one feature of the default steering")
async def set_feature(service: Service, asked: wire.FeatureRequest) -> steering.SteeringObject:
    attached = await service.steering.find(asked.model)
    attached.set_features({asked.feature_idx: asked.value}, asked.mode, "feature_idx")
    return attached.as_object


@_managed("DELETE", "/api/saes/steering", "clearSteering", "Clear the default steering")
async def clear_steering(service: Service, asked: wire.ModelQuery) -> steering.SteeringObject:
    attached = await service.steering.find(asked.model)
    attached.remove_features(None)
    return attached.as_object


@_managed(
    "POST",
    "/api/saes/steering/batch",
    "setFeatures",
    "Set several features of the default steering",
    "All of them or none; other features stay as they are.",
)
async def set_features(service: Service, asked: wire.FeaturesRequest) -> steering.SteeringObject:
    attached = await service.steering.find(asked.model)
    attached.set_features(asked.steering, asked.mode, "steering")
    return attached.as_object


@_managed("POST", "/api/saes/steering/enable", "enableSteering", "Turn the default steering on")
async def enable_steering(service: Service, asked: wire.ModelRequest) -> steering.SteeringObject:
    attached = await service.steering.find(asked.model)
    attached.enabled = True
    return attached.as_object


@_managed(
    "POST",
    "/api/saes/steering/disable",
    "disableSteering",
    "Turn the default steering off, and keep its values",
)
async def disable_steering(service: Service, asked: wire.ModelRequest) -> steering.SteeringObject:
    attached = await service.steering.find(asked.model)
    attached.enabled = False
    return attached.as_object


@_managed(
    "DELETE",
    "/api/saes/steering/{idx}",
    "removeFeature",
    "Remove one feature from the default steering",
)
async def remove_feature(
    service: Service, asked: wire.ModelQuery, idx: str
) -> steering.SteeringObject:
    attached = await service.steering.find(asked.model)
    if not (idx.isascii() and idx.isdecimal() and len(idx) < 10):
        raise InvalidFeatureIndex(f"{idx!r:.40} is no feature", param="idx")
    attached.require_features([int(idx)], "idx")
    attached.remove_features([int(idx)])
    return attached.as_object


@_managed("GET", "/api/saes/{id}", "getSAE", "Get one SAE")
async def get_sae(service: Service, id: str) -> steering.SAEObject:
    return await service.saes.one(id)


@_managed(
    "DELETE",
    "/api/saes/{id}",
    "forgetSAE",
    "Remove an SAE from the list",
    "Its files stay. An attached SAE is a 409.",
    fails=(409,),
)
async def forget_sae(service: Service, id: str) -> None:
    return await service.saes.forget(id)


@_managed(
    "GET",
    "/api/saes/{id}/compatibility",
    "getCompatibility",
    "Check whether an SAE fits a model",
    "Only files are read; nothing is loaded.",
)
async def get_compatibility(
    service: Service, asked: wire.CompatibilityQuery, id: str
) -> steering.Compatibility:
    return await service.saes.compatibility(id, asked.model, asked.layer)


@_managed(
    "POST",
    "/api/saes/{id}/attach",
    "attachSAE",
    "Attach an SAE to a model",
    "Loads the model, and keeps it loaded.",
    fails=(409, 507),
)
async def attach_sae(
    service: Service, asked: wire.AttachRequest, id: str
) -> steering.AttachmentObject:
    return await service.saes.attach(id, asked.model, asked.layer)


@_managed(
    "POST",
    "/api/saes/{id}/detach",
    "detachSAE",
    "Detach an SAE",
    "Its default steering and monitoring end; running requests are not affected.",
)
async def detach_sae(
    service: Service, asked: wire.ModelRequest, id: str
) -> steering.AttachmentObject:
    return await service.saes.detach(id, asked.model)


@_managed("GET", "/api/profiles", "listProfiles", "List the profiles")
async def list_profiles(service: Service) -> list[steering.ProfileObject]:
    return await service.profiles.all()


@_managed("POST", "/api/profiles", "createProfile", "Create a profile", status=201, fails=(409,))
async def create_profile(service: Service, asked: wire.ProfileRequest) -> steering.ProfileObject:
    return await service.profiles.create(asked.content)


@_managed(
    "GET",
    "/api/profiles/active",
    "getActiveProfile",
    "Get the active profile of a model",
)
async def get_active_profile(
    service: Service, asked: wire.ModelQuery
) -> steering.ProfileObject | None:
    return await service.profiles.active(asked.model)


@_managed(
    "POST",
    "/api/profiles/import",
    "importProfile",
    "Import a profile",
    status=201,
    fails=(409,),
)
async def import_profile(service: Service, asked: wire.ImportRequest) -> steering.ProfileObject:
    return await service.profiles.create(asked.profile.content)


@_managed(
    "POST",
    "/api/profiles/deactivate",
    "deactivateProfiles",
    "Deactivate the active profile of a model",
)
async def deactivate_profiles(
    service: Service, asked: wire.ModelRequest
) -> steering.SteeringObject:
    return await service.profiles.deactivate(asked.model)


@_managed("GET", "/api/profiles/{id}", "getProfile", "Get one profile")
async def get_profile(service: Service, id: str) -> steering.ProfileObject:
    return await service.profiles.one(id)


@_managed(
    "PATCH",
    "/api/profiles/{id}",
    "updateProfile",
    "Change a profile",
    "If the profile is active, the default steering changes with it.",
    fails=(409,),
)
async def update_profile(
    service: Service, asked: wire.ProfileUpdate, id: str
) -> steering.ProfileObject:
    given = msgspec.structs.asdict(asked)
    changes = {name: value for name, value in given.items() if value is not None}
    return await service.profiles.update(id, changes)


@_managed("DELETE", "/api/profiles/{id}", "deleteProfile", "Delete a profile")
async def delete_profile(service: Service, id: str) -> None:
    return await service.profiles.remove(id)


@_managed(
    "POST",
    "/api/profiles/{id}/activate",
    "activateProfile",
    "Make a profile the default steering of its model",
)
async def activate_profile(service: Service, id: str) -> steering.SteeringObject:
    return await service.profiles.activate(id)


@_managed("POST", "/api/profiles/{id}/deactivate", "deactivateProfile", "Deactivate a profile")
async def deactivate_profile(service: Service, id: str) -> steering.SteeringObject:
    return await service.profiles.deactivate_one(id)


@_managed(
    "GET",
    "/api/profiles/{id}/export",
    "exportProfile",
    "Export a profile",
    "`import` accepts the value of `data`.",
)
async def export_profile(service: Service, id: str) -> wire.ProfileExport:
    profile = await service.profiles.one(id)
    content = msgspec.convert(profile, steering.ProfileContent, from_attributes=True)
    return wire.ProfileExport(profile=content)


@_managed("GET", "/api/monitoring", "getMonitor", "Get what is monitored")
async def get_monitor(service: Service, asked: wire.ModelQuery) -> steering.MonitorObject:
    return (await service.steering.find(asked.model)).monitor.report


@_managed("POST", "/api/monitoring/configure", "configureMonitor", "Choose the features to monitor")
async def configure_monitor(service: Service, asked: wire.MonitorRequest) -> steering.MonitorObject:
    return await service.steering.configure(
        asked.model,
        enabled=asked.enabled,
        features=asked.features,
        top=asked.top_k,
        history_size=asked.history_size,
    )


@_managed(
    "GET",
    "/api/monitoring/history",
    "getHistory",
    "Get the activations of the last tokens, the newest first",
)
async def get_history(service: Service, asked: wire.HistoryQuery) -> list[steering.HistoryEntry]:
    monitor = (await service.steering.find(asked.model)).monitor
    return monitor.history(asked.limit, asked.request_id)


@_managed("DELETE", "/api/monitoring/history", "clearHistory", "Clear the history")
async def clear_history(service: Service, asked: wire.ForgetQuery) -> steering.MonitorObject:
    monitor = (await service.steering.find(asked.model)).monitor
    monitor.clear_history(asked.request_id)
    return monitor.report


@_managed("GET", "/api/monitoring/statistics", "getStatistics", "Get statistics of features")
async def get_statistics(
    service: Service, asked: wire.StatisticsQuery
) -> list[steering.FeatureStatistics]:
    return (await service.steering.find(asked.model)).monitor.statistics(asked.chosen)


@_managed("DELETE", "/api/monitoring/statistics", "clearStatistics", "Reset the statistics")
async def clear_statistics(service: Service, asked: wire.StatisticsQuery) -> steering.MonitorObject:
    monitor = (await service.steering.find(asked.model)).monitor
    monitor.clear_statistics(asked.chosen)
    return monitor.report


@_managed(
    "POST",
    "/api/monitoring/statistics/top",
    "getHighest",
    "Get the features with the highest values",
    reads=True,
)
async def get_highest(service: Service, asked: wire.TopRequest) -> list[steering.FeatureStatistics]:
    monitor = (await service.steering.find(asked.model)).monitor
    return monitor.highest(asked.k, asked.metric)
