"""Handlers of the Responses API."""

from __future__ import annotations

from functools import partial

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.errors import UnsupportedParameter
from mlxsrv.service.response_store import Responses, StoredItem, StoredResponse
from mlxsrv.web.bodies import share_of
from mlxsrv.web.completions import answer, start_reply
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.reading import read_request, service_of
from mlxsrv.web.responses import JSONResponse, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import read_query, uncollected
from mlxsrv.wire.responses.answers import DeletedResponse, InputTokens, ItemList, ResponseObject
from mlxsrv.wire.responses.dialects import ResponsesDialect
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past, ResponsesRequest
from mlxsrv.wire.responses.storing import (
    ItemQuery,
    ResponseQuery,
    page_of,
    stored_input,
    stored_output,
)
from mlxsrv.wire.sse import encode_json


async def create_response(request: Request) -> Response:
    """Answer, and keep the response unless the client does not want that."""
    record_of(request.scope).operation = "chat"
    asked, headers = await read_request(request, RESPONSES_REQUESTS)
    store = _store(request)
    past = _past(store, asked)
    dialect = ResponsesDialect(past, partial(_keep, store, asked, past))
    reply = await start_reply(request, dialect, asked)
    return answer(dialect, asked, reply, headers)


async def count_input_tokens(request: Request) -> Response:
    asked, headers = await read_request(request, RESPONSES_REQUESTS)
    past = _past(_store(request), asked)
    with uncollected(share_of(request.scope).size):
        spec = asked.spec(past)
    work = service_of(request).count_tokens(spec, client_of(request, spec.user))
    count = await unless_gone(request.receive, work)
    return JSONResponse(InputTokens(input_tokens=count), headers=headers)


def _past(store: Responses, asked: ResponsesRequest) -> Past:
    """Raises PreviousResponseNotFound, StoredItemNotFound."""
    return Past(
        [item.body for item in store.conversation(asked.previous_response_id)],
        {id: store.item(id, path).body for id, path in asked.references.items()},
    )


def _keep(store: Responses, asked: ResponsesRequest, past: Past, response: ResponseObject) -> None:
    if asked.stored:
        store.put(
            StoredResponse(
                id=response.id,
                body=encode_json(response),
                input=[StoredItem(id, body) for id, body in stored_input(asked, past)],
                output=[StoredItem(id, body) for id, body in stored_output(response)],
                previous=asked.previous_response_id,
            )
        )


async def get_response(request: Request) -> Response:
    query = read_query(ResponseQuery, request.query_params)
    if query.stream:
        raise UnsupportedParameter(
            "stream: a stored response is not streamed again; leave it out", param="stream"
        )
    stored = _store(request).get(request.path_params["id"])
    return JSONResponse(Raw(stored.body))


async def delete_response(request: Request) -> Response:
    id = request.path_params["id"]
    _store(request).delete(id)
    return JSONResponse(DeletedResponse(id=id))


async def list_input_items(request: Request) -> Response:
    query = read_query(ItemQuery, request.query_params)
    stored = _store(request).get(request.path_params["id"])
    page, more = page_of([(item.id, item.body) for item in stored.input], query)
    return JSONResponse(
        ItemList(
            data=[Raw(body) for _, body in page],
            first_id=page[0][0] if page else None,
            last_id=page[-1][0] if page else None,
            has_more=more,
        )
    )


def _store(request: Request) -> Responses:
    return service_of(request).responses
