"""The app: its routes in one list, its errors in one shape, its lifespan.

Mounted in another app, it needs nothing from its parent: a sub-app's lifespan does not run there,
so the service starts with the first request and ends with the process. A parent that wants to
start and stop it in time enters `app.lifespan`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any
from urllib.parse import quote

import anyio
import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from mlxsrv.errors import MethodNotAllowed, RequestTooLarge, RouteNotFound, ServeError
from mlxsrv.models.catalogue import Catalogue
from mlxsrv.service import Service
from mlxsrv.service.reply import Reply
from mlxsrv.settings import Settings, load_settings
from mlxsrv.web.middleware import RequestLog, request_id
from mlxsrv.web.responses import (
    Fold,
    JSONResponse,
    ReplyBody,
    ReplyStream,
    error_response,
    stream_error_response,
    unanswered,
    unless_gone,
)
from mlxsrv.wire import openai, openapi, requests
from mlxsrv.wire.embeddings import EMBEDDING_REQUESTS, RERANK_REQUESTS
from mlxsrv.wire.sse import encode_json

_LONGEST_HEADER = 2048


class App(Starlette):
    """The ASGI app. Use `create_app`."""

    def __init__(self, settings: Settings) -> None:
        # Made here so that a wrong model is told now, and not by the first request.
        self.default_model = Catalogue(settings).default
        super().__init__(
            routes=[
                Route("/v1/chat/completions", chat_completions, methods=["POST"]),
                Route("/v1/completions", completions, methods=["POST"]),
                Route("/v1/embeddings", embed, methods=["POST"]),
                Route("/v1/rerank", rerank, methods=["POST"]),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/detokenize", detokenize, methods=["POST"]),
                Route("/v1/models", list_models),
                Route("/v1/models/{id:path}", get_model),
                Route("/health", health),
                Route("/openapi.json", describe_api),
            ],
            middleware=[Middleware(RequestLog)],
            exception_handlers={ServeError: _serve_error, HTTPException: _http_error},
            lifespan=type(self).lifespan,
        )
        self.router.redirect_slashes = False  # a wrong path is a 404 in our shape
        self.settings = settings
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Litestar hands a mounted app every path with a slash at its end.
        if scope["type"] == "http" and len(scope["path"]) > 1:
            scope = {**scope, "path": scope["path"].rstrip("/")}
        await super().__call__(scope, receive, send)

    @property
    def service(self) -> Service:
        """The service of the running event loop, made on first use.

        Its limiters and its port belong to a loop, so a new loop (a test client's, say) gets a new
        one, and what the old one had loaded is dropped.
        """
        loop = asyncio.get_running_loop()
        if self._service is None or self._loop is not loop:
            if self._service is not None:
                self._service.pool.abandon()
            self._service, self._loop = Service(self.settings), loop
        return self._service

    @contextlib.asynccontextmanager
    async def lifespan(self, parent: object = None) -> AsyncIterator[None]:
        """Start loading the default model; on exit, end what runs and free what is loaded.

        Takes and ignores the parent app, so that it can be a parent's `lifespan=` as it is.
        """
        service = self.service
        loading = asyncio.create_task(service.preload())
        try:
            yield
        finally:
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await service.close()
            self._service = None

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones, at most `shutdown_grace` seconds."""
        if self._service is not None:
            await self._service.drain()


def create_app(settings: Settings | None = None) -> App:
    """The server as an ASGI app, to run or to mount.

    Args:
        settings: None reads `MLXSRV_*` variables, as for `uvicorn --factory mlxsrv:create_app`.

    Raises:
        SettingsError: a setting is wrong; the message names it.
    """
    return App(load_settings() if settings is None else settings)


# Routes.


class Form(msgspec.Struct, frozen=True):
    """What sets one kind of completion apart: how it is read, served and written."""

    requests: requests.RequestDecoder[Any]
    serve: Callable[[Service, Any, str], Awaitable[Reply]]
    stream: type[openai.Stream]
    fold: Fold
    id_prefix: str


CHAT = Form(
    requests.CHAT_REQUESTS, Service.chat, openai.ChatStream, openai.chat_completion, "chatcmpl"
)
TEXT = Form(
    requests.COMPLETION_REQUESTS,
    Service.complete,
    openai.CompletionStream,
    openai.text_completion,
    "cmpl",
)


async def chat_completions(request: Request) -> Response:
    return await _generate(request, CHAT)


async def completions(request: Request) -> Response:
    return await _generate(request, TEXT)


async def _generate(request: Request, form: Form) -> Response:
    app: App = request.app
    body = await _read_body(request, app.settings.max_body)
    accept = request.headers.get("accept", "")
    try:
        asked, ignored = form.requests.decode(body)
        headers = _ignored_header(ignored)
        reply = await form.serve(app.service, asked, request_id(request.scope))
    except ServeError as error:
        return _refuse(error, form, body, accept)
    if not asked.stream:
        return ReplyBody(reply, form.fold, headers=headers)
    frames = form.stream(
        reply.who,
        openai.usage_mode(asked.stream_options),
        choices=reply.choices,
        scored=reply.scored,
    )
    return ReplyStream(reply, frames, accept=accept, headers=headers)


async def embed(request: Request) -> Response:
    return await _compute(request, EMBEDDING_REQUESTS, Service.embed)


async def rerank(request: Request) -> Response:
    return await _compute(request, RERANK_REQUESTS, Service.rerank)


async def _compute(
    request: Request,
    requests: requests.RequestDecoder[Any],
    serve: Callable[[Service, Any, str], Coroutine[Any, Any, Any]],
) -> Response:
    app: App = request.app
    body = await _read_body(request, app.settings.max_body)
    asked, ignored = requests.decode(body)
    work = serve(app.service, asked, request_id(request.scope))
    answer = await unless_gone(request.receive, work)
    # Millions of numbers would hold up every stream.
    text = await anyio.to_thread.run_sync(encode_json, answer)
    return Response(text, headers=_ignored_header(ignored), media_type="application/json")


async def tokenize(request: Request) -> Response:
    app: App = request.app
    body = await _read_body(request, app.settings.max_body)
    asked, ignored = requests.TOKENIZE_REQUESTS.decode(body)
    return JSONResponse(await app.service.tokenize(asked), headers=_ignored_header(ignored))


async def detokenize(request: Request) -> Response:
    app: App = request.app
    body = await _read_body(request, app.settings.max_body)
    asked, ignored = requests.DETOKENIZE_REQUESTS.decode(body)
    return JSONResponse(await app.service.detokenize(asked), headers=_ignored_header(ignored))


async def list_models(request: Request) -> Response:
    return JSONResponse(openai.ModelList(data=await request.app.service.models()))


async def get_model(request: Request) -> Response:
    return JSONResponse(await request.app.service.model(request.path_params["id"]))


async def health(request: Request) -> Response:
    service: Service = request.app.service
    verbose = request.query_params.get("verbose", "0") not in ("", "0", "false")
    told = await service.state() if verbose else openai.Health(status=service.health)
    return JSONResponse(told, status_code=200 if told.status == "ok" else 503)


async def describe_api(request: Request) -> Response:
    """The OpenAPI document, made from the routes that there are."""
    served = [
        (method, route.path)
        for route in request.app.routes
        for method in sorted(route.methods - {"HEAD"})
    ]
    return JSONResponse(openapi.document(served, prefix=request.scope.get("root_path", "")))


# What routes share.


async def _read_body(request: Request, limit: int) -> bytes:
    """The body, refused as soon as it is known to be over `limit` bytes."""
    too_large = RequestTooLarge(f"the body is larger than {limit} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


def _ignored_header(names: list[str]) -> dict[str, str]:
    """The header that names ignored fields, whose names may be anything and any number."""
    if not names:
        return {}
    text = ", ".join(quote(name, safe=" ") for name in names)
    return {"X-Ignored-Params": text[:_LONGEST_HEADER]}


class _Peek(msgspec.Struct):
    stream: Any = None
    model: Any = None


_peek = msgspec.json.Decoder(_Peek).decode


def _refuse(error: ServeError, form: Form, body: bytes, accept: str) -> Response:
    """Refuse a request in the form that it asked for, as far as that can be read."""
    asked = _Peek()
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        asked = _peek(body)
    if asked.stream is not True:
        return error_response(error)
    model = asked.model if isinstance(asked.model, str) else None
    frames = form.stream(unanswered(form.id_prefix, model), "never")
    return stream_error_response(error, frames, accept)


async def _serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in our shape."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        refusal: ServeError = MethodNotAllowed(f"{path} does not answer {method}")
    else:
        refusal = RouteNotFound(f"there is no {method} {path} here")
    return error_response(refusal, error.headers)
