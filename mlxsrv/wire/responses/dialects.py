"""The endpoint of the Responses API that generates text."""

from __future__ import annotations

from collections.abc import Sequence

from mlxsrv.generation.outputs import Answer, Identity, Usage
from mlxsrv.generation.spec import GenerationSpec
from mlxsrv.wire.dialect import Dialect
from mlxsrv.wire.responses.answers import ResponseObject, fold_response
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past, ResponsesRequest
from mlxsrv.wire.responses.streams import KeepResponse, ResponsesStream


class ResponsesDialect(Dialect[ResponsesRequest]):
    """Made for one request.

    Args:
        past: what the store has for the request. It is let go once the messages are made of it.
        keep: called with the response at its end, unless it failed.
    """

    requests = RESPONSES_REQUESTS
    id_prefix = "resp_"

    def __init__(self, past: Past, keep: KeepResponse) -> None:
        self._past = past
        self._keep = keep

    def spec(self, request: ResponsesRequest) -> GenerationSpec:
        past, self._past = self._past, Past()
        return request.spec(past)

    def stream(self, request: ResponsesRequest, identity: Identity) -> ResponsesStream:
        return ResponsesStream(request, identity, self._keep)

    def fold(
        self,
        request: ResponsesRequest,
        identity: Identity,
        answers: Sequence[Answer],
        usage: Usage,
    ) -> ResponseObject:
        response = fold_response(request, identity, answers[0], usage)
        self._keep(response)
        return response
