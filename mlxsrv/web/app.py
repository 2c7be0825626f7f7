"""The app: its routes in one list, its errors in one shape, its lifespan.

Mounted in another app, it needs nothing from its parent: a sub-app's lifespan does not run there,
so the service starts with the first request and ends with the process. A parent that wants to
start and stop it in time enters `app.lifespan`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from typing import Any

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

from mlxsrv.errors import MethodNotAllowed, RouteNotFound, ServeError
from mlxsrv.models.catalogue.catalogue import Catalogue
from mlxsrv.service.observing import Operation
from mlxsrv.service.reply import Reply
from mlxsrv.service.service import Service
from mlxsrv.service.steering.attachments import check_steering
from mlxsrv.settings import Settings, load_settings
from mlxsrv.web import management
from mlxsrv.web.bodies import Bodies, Ignored, read_body, share_of
from mlxsrv.web.middleware import RequestLog, request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.observability.telemetry import make_telemetry
from mlxsrv.web.responses import (
    Fold,
    JSONResponse,
    ReplyBody,
    ReplyStream,
    refusal,
    unless_gone,
)
from mlxsrv.web.routing import Alias, aliases, place
from mlxsrv.web.security.guard import Cors, Guard, is_verbose, load_keys
from mlxsrv.wire import openai, openapi, requests, streams
from mlxsrv.wire.decoding import RequestDecoder, read_query
from mlxsrv.wire.embeddings import EMBEDDING_REQUESTS, RERANK_REQUESTS, SCORE_REQUESTS
from mlxsrv.wire.infill import INFILL_REQUESTS, InfillStream, infill_completion
from mlxsrv.wire.sse import encode_json
from mlxsrv.wire.tokens import DETOKENIZE_REQUESTS, TOKENIZE_REQUESTS, TokenizerQuery


class App(Starlette):
    """The ASGI app. Use `create_app`."""

    def __init__(self, settings: Settings, *, local: bool) -> None:
        # Made here so that a wrong model is told now, and not by the first request.
        catalogue = Catalogue(settings)
        check_steering(settings, catalogue)
        self.default_model = catalogue.default
        keys = load_keys(settings)
        self.keys = len(keys)
        telemetry = make_telemetry(settings)
        versioned = [
            Route("/v1/chat/completions", chat_completions, methods=["POST"]),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/embeddings", embed, methods=["POST"]),
            Route("/v1/rerank", rerank, methods=["POST"]),
            Route("/v1/score", score, methods=["POST"]),
            Route("/v1/models", list_models),
            Route("/v1/models/{id:path}", get_model),
        ]
        super().__init__(
            routes=[
                *versioned,
                *aliases(versioned),
                Route("/infill", infill, methods=["POST"]),
                Route("/tokenize", tokenize, methods=["POST"]),
                Route("/detokenize", detokenize, methods=["POST"]),
                Route("/tokenizer_info", tokenizer_info),
                Route("/apply-template", apply_template, methods=["POST"]),
                *management.ROUTES,
                Route("/health", health),
                Route("/health/live", live),
                *telemetry.routes,
                Route("/openapi.json", describe_api),
            ],
            middleware=[
                *([Middleware(Cors, settings)] if settings.allowed_origin else []),
                Middleware(RequestLog, telemetry.observers),
                Middleware(Guard, settings, keys, local=local),
            ],
            exception_handlers={ServeError: _serve_error, HTTPException: _http_error},
            lifespan=type(self).lifespan,
        )
        self.router.redirect_slashes = False  # a wrong path is a 404 in our shape
        self.settings = settings
        self.ignored = Ignored()
        self.bodies = Bodies(settings.max_bodies or 4 * settings.max_body)
        self._observers = telemetry.observers
        self._service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            share = self.bodies.share()
            scope = {**scope, **place(scope, self.settings.root_path), "mlxsrv.body": share}
            try:
                await super().__call__(scope, receive, send)
            finally:
                share.release()
        else:
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
                self._service.abandon()
            self._service, self._loop = Service(self.settings, self._observers), loop
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
            for observer in self._observers:
                await observer.close()
            self._service = None

    @property
    def failed(self) -> bool:
        """Whether the inference engine has failed, which only a new process can mend."""
        return self._service is not None and self._service.failure is not None

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones, at most `shutdown_grace` seconds."""
        if self._service is not None:
            await self._service.drain()


def create_app(settings: Settings | None = None, *, local: bool = False) -> App:
    """The server as an ASGI app, to run or to mount.

    Args:
        settings: None reads `MLXSRV_*` variables, as for `uvicorn --factory mlxsrv:create_app`.
        local: whether who serves it listens on loopback only; Host must name this machine then.

    Raises:
        SettingsError: a setting is wrong; the message names it.
    """
    return App(load_settings() if settings is None else settings, local=local)


# Routes.


class Form(msgspec.Struct, frozen=True):
    """What sets one kind of completion apart: how it is read, served and written."""

    requests: RequestDecoder[Any]
    serve: Callable[[Service, Any, str], Awaitable[Reply]]
    stream: type[streams.Stream]
    fold: Fold
    operation: Operation


CHAT = Form(
    requests.CHAT_REQUESTS,
    Service.chat,
    streams.ChatStream,
    openai.chat_completion,
    "chat",
)
TEXT = Form(
    requests.COMPLETION_REQUESTS,
    Service.complete,
    streams.CompletionStream,
    openai.text_completion,
    "text_completion",
)


INFILL = Form(
    INFILL_REQUESTS,
    Service.infill,
    InfillStream,
    infill_completion,
    "text_completion",
)


async def chat_completions(request: Request) -> Response:
    return await _generate(request, CHAT)


async def completions(request: Request) -> Response:
    return await _generate(request, TEXT)


async def infill(request: Request) -> Response:
    return await _generate(request, INFILL)


async def _generate(request: Request, form: Form) -> Response:
    app: App = request.app
    body = await read_body(request, app.settings.max_body)
    record = record_of(request.scope)
    record.operation = form.operation
    asked, ignored = form.requests.decode(body)
    record.asked, record.model = asked, app.service.label(asked.model)
    headers = app.ignored.header(ignored)
    reply = record.reply = await form.serve(app.service, asked, request_id(request.scope))
    # Its answer may take long; what it holds from then on are the tokens of a prompt that fits.
    reply.when_tokenized(share_of(request.scope).release)
    if not asked.stream:
        return ReplyBody(reply, form.fold, headers=headers)
    frames = form.stream(
        reply.who,
        streams.usage_mode(asked.stream_options),
        choices=asked.all_choices,
        scored=asked.likeliest is not None,
        timed=bool(asked.timings_per_token),
    )
    return ReplyStream(reply, frames, headers=headers)


async def embed(request: Request) -> Response:
    return await _compute(request, EMBEDDING_REQUESTS, Service.embed, "embeddings")


async def rerank(request: Request) -> Response:
    return await _compute(request, RERANK_REQUESTS, Service.rerank, "rerank")


async def score(request: Request) -> Response:
    return await _compute(request, SCORE_REQUESTS, Service.score, "score")


async def _compute(
    request: Request,
    requests: RequestDecoder[Any],
    serve: Callable[[Service, Any, str], Coroutine[Any, Any, Any]],
    operation: Operation,
) -> Response:
    app: App = request.app
    record = record_of(request.scope)
    record.operation = operation
    body = await read_body(request, app.settings.max_body)
    asked, ignored = requests.decode(body)
    record.asked, record.model = asked, app.service.label(asked.model)
    work = serve(app.service, asked, request_id(request.scope))
    answer = await unless_gone(request.receive, work)
    record.model, record.tokens = answer.model, answer.usage.prompt_tokens
    return await _numbers(answer, app.ignored.header(ignored))


async def _numbers(answer: object, headers: Mapping[str, str]) -> Response:
    """An answer of perhaps millions of numbers, which would hold up every stream."""
    text = await anyio.to_thread.run_sync(encode_json, answer)
    return Response(text, headers=headers, media_type="application/json")


async def tokenize(request: Request) -> Response:
    return await _spell(request, TOKENIZE_REQUESTS, Service.tokenize, _MOST_TEXT)


async def detokenize(request: Request) -> Response:
    return await _spell(request, DETOKENIZE_REQUESTS, Service.detokenize, _MOST_IDS)


async def apply_template(request: Request) -> Response:
    most: int = request.app.settings.max_body
    return await _spell(request, requests.CHAT_REQUESTS, Service.apply_template, most)


async def tokenizer_info(request: Request) -> Response:
    app: App = request.app
    query = read_query(TokenizerQuery, request.query_params)
    work = app.service.tokenizer_info(query)
    return JSONResponse(await unless_gone(request.receive, work))


# Bytes of a body whose text is told in tokens, and of one that holds a million ids.
_MOST_TEXT = 8 * 1024 * 1024
_MOST_IDS = 16 * 1024 * 1024


async def _spell(
    request: Request,
    requests: RequestDecoder[Any],
    serve: Callable[[Service, Any], Coroutine[Any, Any, Any]],
    most: int,
) -> Response:
    app: App = request.app
    body = await read_body(request, min(app.settings.max_body, most))
    asked, ignored = requests.decode(body)
    answer = await unless_gone(request.receive, serve(app.service, asked))
    return await _numbers(answer, app.ignored.header(ignored))


async def list_models(request: Request) -> Response:
    return JSONResponse(openai.ModelList(data=await request.app.service.models()))


async def get_model(request: Request) -> Response:
    return JSONResponse(await request.app.service.model(request.path_params["id"]))


async def health(request: Request) -> Response:
    service: Service = request.app.service
    verbose = is_verbose(request.scope)
    told = await service.state() if verbose else openai.Health(status=service.health)
    return JSONResponse(told, status_code=200 if told.status == "ok" else 503)


async def live(request: Request) -> Response:
    service: Service = request.app.service
    told = openai.Health(status=service.health)
    return JSONResponse(told, status_code=200 if service.alive else 503)


async def describe_api(request: Request) -> Response:
    """The OpenAPI document, made from the routes that there are."""
    served = [
        (method, route.path)
        for route in request.app.routes
        if not isinstance(route, Alias)
        for method in sorted(route.methods - {"HEAD"})
    ]
    return JSONResponse(openapi.document(served, prefix=request.scope.get("root_path", "")))


# What routes share.


async def _serve_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServeError)
    return refusal(request.scope, error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals, in our shapes."""
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 405:
        why: ServeError = MethodNotAllowed(f"{path} does not answer {method}")
    else:
        why = RouteNotFound(f"there is no {method} {path} here")
    return refusal(request.scope, why, error.headers)
