"""Handlers of the routes about the server: its models and its health."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.generation.status import Health, ModelObject
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.observability.totals import Totals
from mlxsrv.web.paths import Endpoint, is_verbose, speaks_anthropic
from mlxsrv.web.reading import service_of
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire.anthropic.answers import (
    AnthropicModel,
    AnthropicModelList,
    anthropic_model,
    anthropic_models,
)
from mlxsrv.wire.anthropic.errors import REQUEST_ID
from mlxsrv.wire.openai.answers import ModelList


@Endpoint(
    "GET",
    "/v1/models",
    "listModels",
    "List the models",
    "With the header `anthropic-version`, in Anthropic's dialect.",
    answer=ModelList,
    other_answer=AnthropicModelList,
)
async def list_models(request: Request) -> Response:
    models = await service_of(request).models()
    if speaks_anthropic(request.scope):
        return JSONResponse(anthropic_models(models), headers=_anthropic_headers(request))
    return JSONResponse(ModelList(data=models))


@Endpoint(
    "GET",
    "/v1/models/{id:path}",
    "getModel",
    "Get one model",
    "Slashes in the id stand as they are. With the header `anthropic-version`, in Anthropic's "
    "dialect.",
    answer=ModelObject,
    other_answer=AnthropicModel,
    fails=(404,),
)
async def get_model(request: Request) -> Response:
    model = await service_of(request).model(request.path_params["id"])
    if speaks_anthropic(request.scope):
        return JSONResponse(anthropic_model(model), headers=_anthropic_headers(request))
    return JSONResponse(model)


def _anthropic_headers(request: Request) -> dict[str, str]:
    return {REQUEST_ID: request_id(request.scope)}


@Endpoint(
    "GET",
    "/health",
    "getHealth",
    "Check readiness",
    "Readiness, for load balancers: 200 when requests would be served, else 503 with the status "
    "`loading`, `draining`, `failed` or `stalled`. With the query `verbose=1` also what the server "
    "holds and does; that needs the key, where there is one.",
    answer=Health,
    fails=(401, 429),
    open=True,
)
async def health(request: Request) -> Response:
    """Whether requests would be served: for load balancers."""
    record_of(request.scope).quiet = True
    service = service_of(request)
    # Names and numbers are for who has a key, and this route asks for none.
    open_to_all = not request.app.key_count
    answer = service.brief_health() if open_to_all else Health(status=service.health)
    if is_verbose(request.scope):
        totals: Totals = request.app.totals
        state = await service.full_health()
        answer = replace(state, requests=totals.requests, errors=totals.errors)
        if (membership := request.app.membership) is not None:
            answer = replace(answer, replica=membership.replica)
    return JSONResponse(answer, status_code=200 if answer.status == "ok" else 503)


@Endpoint(
    "GET",
    "/health/live",
    "getLiveness",
    "Check liveness",
    "Liveness, for supervisors: 503 once the engine has `failed`, or is `stalled` in a step longer "
    "than `--step-timeout`; else 200, whatever the status.",
    answer=Health,
    open=True,
)
async def live(request: Request) -> Response:
    """Whether a restart would help: for supervisors."""
    record_of(request.scope).quiet = True
    service = service_of(request)
    return JSONResponse(Health(status=service.health), status_code=200 if service.alive else 503)
