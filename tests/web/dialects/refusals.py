"""Refusals as a client is told of them, before a stream and within one."""

from __future__ import annotations

import json

from mlxsrv import errors
from mlxsrv.errors import ServeError
from tests.support.anthropic_streams import check_type, read_events
from tests.support.client import Body, check_schema
from tests.support.ollama import read_lines
from tests.web.dialects.spoken import Response, Spoken
from tests.wire.responses.asking import read_events as read_responses

ANTHROPICS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The types of Anthropic's errors. Its SDK chooses the class by the status, as OpenAI's does."""


def anthropics_status(error: type[ServeError]) -> int:
    """Its API has no 503 but when it has too much to do, and no 507."""
    if error in (errors.Overloaded, errors.ShuttingDown):
        return 529
    return 500 if error.status in (503, 507) else error.status


def told(spoken: Spoken, response: Response, error: type[ServeError]) -> str:
    """The message of a refusal, which must be this error, in the shape of its dialect."""
    status = anthropics_status(error) if spoken.name == "messages" else error.status
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    if error.retry_after is not None:
        assert int(response.headers["retry-after"]) >= 1
    body = response.json()
    match spoken.name:
        case "ollama":
            assert body.keys() == {"error"}
            return str(body["error"])
        case "messages":
            if status != 413:  # in Anthropic's documents, and not in the SDK's types
                check_type(body, "ErrorResponse")
            assert body["request_id"] == response.headers["request-id"]
            return _anthropics(body, error)
    check_schema(body, "ErrorResponse")
    told = body["error"]
    assert (told["type"], told["code"]) == (error.type, error.code)
    if error is errors.ContextLengthExceeded:
        assert told["param"] == ("input" if spoken.name == "responses" else "messages")
    elif told["param"] is not None:
        assert told["param"] in told["message"]
    return str(told["message"])


def _anthropics(body: Body, error: type[ServeError]) -> str:
    assert body["type"] == "error"
    assert body["error"]["type"] == ANTHROPICS[anthropics_status(error)]
    assert body["error"]["details"] == {"error_code": error.code}
    return str(body["error"]["message"])


def told_within(spoken: Spoken, response: Response, error: type[ServeError]) -> str:
    """The message of a stream's end, which must be this error."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == spoken.stream_type
    data: bytes = response.content
    match spoken.name:
        case "ollama":
            *lines, last = read_lines(data)
            assert not any(line["done"] for line in lines)
            assert last.keys() == {"error"}
            return str(last["error"])
        case "messages":
            last = read_events(data)[-1]
            check_type(last, "ErrorResponse")
            return _anthropics(last, error)
        case "responses":
            last = read_responses(data)[-1]
            assert last["type"] == "response.failed"
            assert last["response"]["status"] == "failed"
            assert last["response"]["error"]["code"] == "server_error"
            return str(last["response"]["error"]["message"])
    *_, chunk_line, done = data.decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    chunk = json.loads(chunk_line.removeprefix("data: "))
    assert {choice["finish_reason"] for choice in chunk["choices"]} == {"error"}
    assert (chunk["error"]["type"], chunk["error"]["code"]) == (error.type, error.code)
    return str(chunk["error"]["message"])
