"""Handlers of the routes that tell about the server: its models and its health."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.generation.status import Health
from mlxsrv.web import messages
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.observability.totals import Totals
from mlxsrv.web.paths import is_verbose, speaks_anthropic
from mlxsrv.web.reading import service_of
from mlxsrv.web.responses import JSONResponse
from mlxsrv.wire.openai.answers import ModelList


async def list_models(request: Request) -> Response:
    if speaks_anthropic(request.scope):
        return await messages.list_models(request)
    return JSONResponse(ModelList(data=await service_of(request).models()))


async def get_model(request: Request) -> Response:
    if speaks_anthropic(request.scope):
        return await messages.get_model(request)
    return JSONResponse(await service_of(request).model(request.path_params["id"]))


async def health(request: Request) -> Response:
    """Whether requests would be served: for load balancers."""
    record_of(request.scope).quiet = True
    service = service_of(request)
    # Names and numbers are for who has a key, and this route asks for none.
    open_to_all = not request.app.key_count
    answer = service.tell_health() if open_to_all else Health(status=service.health)
    if is_verbose(request.scope):
        totals: Totals = request.app.totals
        state = await service.state()
        answer = replace(state, requests=totals.requests, errors=totals.errors)
    return JSONResponse(answer, status_code=200 if answer.status == "ok" else 503)


async def live(request: Request) -> Response:
    """Whether a restart would help: for supervisors."""
    record_of(request.scope).quiet = True
    service = service_of(request)
    return JSONResponse(Health(status=service.health), status_code=200 if service.alive else 503)
