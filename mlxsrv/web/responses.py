"""Responses that send themselves: JSON, errors, and replies of the engine, streamed or whole."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from uuid import uuid4

import anyio
import anyio.to_thread
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxsrv.errors import InvalidAPIKey, InvalidHTTP, RequestTimeout, ServeError
from mlxsrv.generation.outputs import AnswerBuilder, Ended, Output
from mlxsrv.service.reply import Reply
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import find_operation, speaks_anthropic
from mlxsrv.wire.anthropic import errors as anthropic
from mlxsrv.wire.dialect import Builder, ErrorShape
from mlxsrv.wire.openai import answers as openai
from mlxsrv.wire.sse import encode_json

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}

T = TypeVar("T")


class JSONResponse(Response):
    """A Struct as JSON."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        return encode_json(content)


async def large_json(content: object, headers: Mapping[str, str]) -> Response:
    """A response of perhaps millions of numbers. A thread encodes them: on the event loop, that
    would hold up every stream."""
    text = await anyio.to_thread.run_sync(encode_json, content)
    return Response(text, headers=headers, media_type="application/json")


def refusal(scope: Scope, error: ServeError, headers: Mapping[str, str] | None = None) -> Response:
    """An error in the shape of its route. The request's record notes the error."""
    record_of(scope).error = error.code
    shape, request_id = _error_shape(scope), scope["mlxsrv.request_id"]
    identity = {} if shape.id_header is None else {shape.id_header: request_id}
    return JSONResponse(
        shape.body(error, request_id),
        status_code=shape.status(error),
        headers={**_headers(error), **identity, **(headers or {})},
    )


def last_refusal(error: ServeError) -> Response:
    """An error in OpenAI's shape that ends its connection, for what never became a request."""
    identity = {"X-Request-ID": uuid4().hex, "Connection": "close"}
    shape = openai.ERRORS
    return JSONResponse(
        shape.body(error, ""), status_code=shape.status(error), headers=_headers(error) | identity
    )


def _error_shape(scope: Scope) -> ErrorShape:
    operation = find_operation(scope)
    shape = openai.ERRORS if operation is None else operation.refuses
    return anthropic.ERRORS if shape is openai.ERRORS and speaks_anthropic(scope) else shape


def _headers(error: ServeError) -> dict[str, str]:
    """The headers that HTTP wants beside this error."""
    match error:
        case RequestTimeout() | InvalidHTTP():  # nobody knows where the next request begins
            return {"Connection": "close"}
        case InvalidAPIKey():
            return {"WWW-Authenticate": "Bearer"}
    return {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}


class ReplyStream(StreamingResponse):
    """A reply that is sent while it is generated.

    Status 200 goes out when the job has its turn or, if that takes long, with the first
    keep-alive. A failure before that is answered with its own status and JSON, whatever
    Accept says, because clients show an event to their users as it is.
    """

    def __init__(self, reply: Reply, builder: Builder, *, headers: Mapping[str, str]) -> None:
        super().__init__(
            self._frames(), headers={**STREAM_HEADERS, **headers}, media_type=builder.media_type
        )
        self._reply = reply
        self._builder = builder
        self._first: list[Output] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _answering(self._reply, receive):
            try:
                self._first = await self._reply.outputs()
            except ServeError as error:
                await refusal(scope, error)(scope, receive, send)
            else:
                scope["app"].ignored.add_to(self.headers, self._reply.ignored)
                await self.stream_response(send)

    async def _frames(self) -> AsyncIterator[bytes]:
        """Yield what is written at once: all frames that are ready, or a keep-alive."""
        outputs, builder = self._first, self._builder
        try:
            while True:
                if outputs and builder.live:
                    builder.carry(self._reply.usage())
                frames = b"".join(map(builder.write, outputs)) if outputs else builder.keepalive()
                if frames:
                    yield frames
                if outputs and isinstance(outputs[-1], Ended) and outputs[-1].usage is not None:
                    return
                outputs = await self._reply.outputs()
        except ServeError as error:
            yield builder.error(error)


class ReplyBody(Response):
    """A reply as one body, sent when it is complete."""

    def __init__(self, reply: Reply, builder: Builder, *, headers: Mapping[str, str]) -> None:
        super().__init__(headers=headers)
        self._reply = reply
        self._builder = builder
        self._given = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with _answering(self._reply, receive):
            try:
                response: Response = JSONResponse(await self._whole(), headers=self._given)
                scope["app"].ignored.add_to(response.headers, self._reply.ignored)
            except ServeError as error:
                response = refusal(scope, error)
            await response(scope, receive, send)

    async def _whole(self) -> object:
        spec = self._reply.spec
        answers = AnswerBuilder(spec.all_choices, scored=spec.logprobs is not None)
        while answers.usage is None:
            for output in await self._reply.outputs():
                answers.add(output)
        return self._builder.whole(answers.make(), answers.usage)


@asynccontextmanager
async def _answering(reply: Reply, receive: Receive) -> AsyncIterator[None]:
    """Admit `reply` while the block answers it, and release it however the block ends.

    Three tasks run in one group: the block; the admission, which waits for the model and submits;
    and a watch, which cancels the other two when the client goes away. `release` runs after all
    three have ended, so none of them can act on a released reply.
    """
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(cancel_on_disconnect, receive, group.cancel_scope)
            group.start_soon(reply.admit)
            yield
            group.cancel_scope.cancel()
    finally:
        reply.release()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled when the client goes away.

    Raises:
        ClientDisconnect: the client went away; also whatever `work` raises.
    """
    outcome: T | Exception | None = None
    async with anyio.create_task_group() as group:
        group.start_soon(cancel_on_disconnect, receive, group.cancel_scope)
        try:
            outcome = await work
        except Exception as error:  # raised outside the group, which would wrap it
            outcome = error
        group.cancel_scope.cancel()
    if outcome is None:
        raise ClientDisconnect
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


async def cancel_on_disconnect(receive: Receive, scope: anyio.CancelScope) -> None:
    """Cancel `scope` when the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
