"""Handlers of the Responses API."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from mlxsrv.errors import RequestTooLarge, UnsupportedParameter
from mlxsrv.service.response_store import (
    Recalled,
    ResponseStore,
    StoredItem,
    StoredReference,
    StoredResponse,
)
from mlxsrv.web.bodies import share_of
from mlxsrv.web.completions import answer, start_reply
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint
from mlxsrv.web.reading import read_aside, read_request, service_of
from mlxsrv.web.responses import JSONResponse, unless_gone
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import read_query
from mlxsrv.wire.responses.answers import (
    DeletedResponse,
    InputTokens,
    ItemList,
    ItemQuery,
    ResponseObject,
    ResponseQuery,
    page_of,
)
from mlxsrv.wire.responses.builder import responses_dialect
from mlxsrv.wire.responses.events import StreamedEvent
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past, ResponsesRequest
from mlxsrv.wire.sse import encode_json


@Endpoint(
    "POST",
    "/v1/responses",
    "createResponse",
    "Create a response",
    "With `stream`, as server-sent events; the last has the whole response.",
    body=RESPONSES_REQUESTS,
    answer=ResponseObject,
    chunk=StreamedEvent,
    fails=(507,),
)
async def create_response(request: Request) -> Response:
    """Answer, and keep the response unless the client does not want that."""
    record_of(request.scope).operation = "chat"
    asked, headers = await read_request(request, RESPONSES_REQUESTS)
    recalled = _recall(request, asked)
    places = {id: item.response for id, item in recalled.references.items()}
    keep = partial(_keep, _store(request), asked, client_of(request).id, places)
    dialect = responses_dialect(keep)
    reply = await start_reply(request, dialect, partial(asked.spec, _past(recalled)))
    return answer(reply, dialect.builder(asked, reply.identity), headers)


@Endpoint(
    "POST",
    "/v1/responses/input_tokens",
    "countInputTokens",
    "Count the tokens of a prompt",
    "The body is that of a response. Nothing is generated.",
    body=RESPONSES_REQUESTS,
    answer=InputTokens,
)
async def count_input_tokens(request: Request) -> Response:
    asked, headers = await read_request(request, RESPONSES_REQUESTS)
    past = _past(_recall(request, asked))
    spec = await read_aside(request, partial(asked.spec, past))
    work = service_of(request).count_tokens(spec, client_of(request, spec.user))
    count = await unless_gone(request.receive, work)
    response = JSONResponse(InputTokens(input_tokens=count), headers=headers)
    request.app.ignored.add_to(response.headers, spec.ignored)
    return response


def _recall(request: Request, asked: ResponsesRequest) -> Recalled:
    """Return what the request continues or refers to. Together with its body that has the bounds of
    a body, for a client could have sent it all.

    Raises:
        PreviousResponseNotFound, StoredItemNotFound, RequestTooLarge, Overloaded
    """
    share, limit = share_of(request.scope), request.app.settings.max_body

    def take(size: int, path: str) -> None:
        if share.size + size > limit:
            raise RequestTooLarge(
                f"{path}: with the stored items that it continues or refers to, the request is "
                f"larger than {limit} bytes; send fewer, or what is needed of them",
                param=path,
            )
        share.grow(share.size + size)

    owner = client_of(request).id
    return _store(request).recall(asked.previous_response_id, asked.references, owner, take)


def _past(recalled: Recalled) -> Past:
    return Past(
        [item.body for item in recalled.conversation],
        {id: item.body for id, item in recalled.references.items()},
    )


def _keep(
    store: ResponseStore,
    asked: ResponsesRequest,
    owner: str,
    places: Mapping[str, str],
    response: ResponseObject,
) -> None:
    """Store a response.

    Args:
        places: the responses that have the items to which the request refers, by the items' ids.
    """
    if not asked.stored:
        return
    store.put(
        StoredResponse(
            id=response.id,
            owner=owner,
            body=encode_json(response),
            input=[
                StoredReference(id, places[id])
                if body is None
                else StoredItem(id, response.id, body)
                for id, body in asked.stored_input()
            ],
            output=[
                StoredItem(item.id, response.id, encode_json(item)) for item in response.output
            ],
            previous=asked.previous_response_id,
        )
    )


@Endpoint(
    "GET",
    "/v1/responses/{id}",
    "getResponse",
    "Get a stored response",
    query=ResponseQuery,
    answer=ResponseObject,
    fails=(400, 404),
)
async def get_response(request: Request) -> Response:
    query = read_query(ResponseQuery, request.query_params)
    if query.stream:
        raise UnsupportedParameter(
            "stream: a stored response is not streamed again; leave it out", param="stream"
        )
    stored = _store(request).get(request.path_params["id"])
    return JSONResponse(Raw(stored.body))


@Endpoint(
    "DELETE",
    "/v1/responses/{id}",
    "deleteResponse",
    "Delete a stored response",
    answer=DeletedResponse,
    fails=(404,),
)
async def delete_response(request: Request) -> Response:
    id = request.path_params["id"]
    _store(request).delete(id)
    return JSONResponse(DeletedResponse(id=id))


@Endpoint(
    "GET",
    "/v1/responses/{id}/input_items",
    "listInputItems",
    "List the input items of a stored response",
    "The newest item first, unless `order` is `asc`.",
    query=ItemQuery,
    answer=ItemList,
    fails=(400, 404),
)
async def list_input_items(request: Request) -> Response:
    query = read_query(ItemQuery, request.query_params)
    store = _store(request)
    stored = store.get(request.path_params["id"])
    places, more = page_of([item.id for item in stored.input], query)
    found = [store.resolve(stored.input[place]) for place in places]
    page = [item for item in found if item is not None]  # others went with their responses
    share_of(request.scope).grow(sum(len(item.body) for item in page))
    return JSONResponse(
        ItemList(
            data=[Raw(item.body) for item in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=more,
        )
    )


def _store(request: Request) -> ResponseStore:
    return service_of(request).responses
