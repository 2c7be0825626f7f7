"""Handlers of Ollama's API. Those that generate text share what `completions.py` has."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from time import monotonic
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from mlxsrv.errors import ActionNotAllowed, ServeError
from mlxsrv.generation.texts import EmbeddingSpec, TextVectors
from mlxsrv.models.catalogue.progress import PulledFile
from mlxsrv.models.catalogue.pulls import PullWatch
from mlxsrv.service.observing import OperationName
from mlxsrv.web.completions import answer, start_reply
from mlxsrv.web.embeddings import compute
from mlxsrv.web.middleware import request_id
from mlxsrv.web.observability.records import record_of
from mlxsrv.web.paths import Endpoint, Handler, OperationRoute
from mlxsrv.web.reading import note_asked, read_request, service_of
from mlxsrv.web.responses import (
    STREAM_HEADERS,
    JSONResponse,
    cancel_on_disconnect,
    large_json,
    refusal,
    unless_gone,
)
from mlxsrv.web.security.clients import client_of
from mlxsrv.wire.decoding import RequestDecoder
from mlxsrv.wire.dialect import Dialect, ErrorShape
from mlxsrv.wire.ollama.answers import (
    CHATS,
    ERRORS,
    MEDIA_TYPE,
    TEXTS,
    DoneReason,
    OllamaAnswer,
    OllamaChatAnswer,
    OllamaEmbedding,
    OllamaEmbeddings,
    OllamaTextAnswer,
    line,
    nanoseconds,
    ollama_error,
    ollama_time,
)
from mlxsrv.wire.ollama.models import (
    PULL_BEGINS,
    PULL_ENDS,
    OllamaModels,
    OllamaProgress,
    OllamaRunning,
    OllamaShown,
    OllamaVersion,
    file_progress,
    ollama_model,
    running_model,
    shown_model,
)
from mlxsrv.wire.ollama.requests import (
    OLLAMA_COPIES,
    OLLAMA_CREATES,
    OLLAMA_EMBEDS,
    OLLAMA_NAMES,
    OLLAMA_OLD_EMBEDS,
    OLLAMA_PULLS,
    OLLAMA_SHOWS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    read_keep_alive,
)

R = TypeVar("R", OllamaChatRequest, OllamaGenerateRequest)


_REFUSED = "This server does not change the models that its operator gives it."


class _OllamaEndpoint(Endpoint, frozen=True):
    """An endpoint that writes errors and streams as Ollama does."""

    stream_media: str = MEDIA_TYPE
    refuses: ErrorShape = ERRORS


# Texts.


def _generating(
    dialect: Dialect[R], operation: OperationName, empty: Callable[..., OllamaAnswer]
) -> Handler:
    """Return the handler of a route that generates text.

    Args:
        empty: makes the answer to a request that only loads or unloads a model.
    """

    async def endpoint(request: Request) -> Response:
        record = record_of(request.scope)
        record.operation = operation
        asked, headers = await read_request(request, dialect.requests)
        if asked.is_empty:
            record.operation = None  # it asks for no text
            reason = await _load(request, asked.model, read_keep_alive(asked.keep_alive))
            done = empty(model=asked.model, created_at=ollama_time(), done=True, done_reason=reason)
            return JSONResponse(done, headers=headers)
        reply = await start_reply(request, dialect, asked.spec)
        return answer(reply, dialect.builder(asked, reply.identity), headers)

    return endpoint


async def _load(request: Request, model: str, keep_alive: float | None) -> DoneReason:
    """Load a model or, if it is to be kept for no time, unload it. Raises ServeError."""
    service = service_of(request)
    if keep_alive == 0:
        await service.unload(model)
        return "unload"
    await unless_gone(request.receive, service.load(model, client_of(request), keep_alive))
    return "load"


chat = _OllamaEndpoint(
    "POST",
    "/api/chat",
    "ollamaChat",
    "Answer a chat",
    "Streamed as lines of JSON, unless `stream` is false.",
    body=CHATS.requests,
    answer=OllamaChatAnswer,
    chunk=OllamaChatAnswer,
    fails=(507,),
)(_generating(CHATS, "chat", OllamaChatAnswer))

generate = _OllamaEndpoint(
    "POST",
    "/api/generate",
    "ollamaGenerate",
    "Answer a prompt, or complete a text",
    "Streamed as lines of JSON, unless `stream` is false.",
    body=TEXTS.requests,
    answer=OllamaTextAnswer,
    chunk=OllamaTextAnswer,
    fails=(507,),
)(_generating(TEXTS, "text_completion", OllamaTextAnswer))

# Embeddings.


@_OllamaEndpoint(
    "POST",
    "/api/embed",
    "ollamaEmbed",
    "Embed texts",
    body=OLLAMA_EMBEDS,
    answer=OllamaEmbeddings,
    fails=(507,),
)
async def embed(request: Request) -> Response:
    begun = monotonic()
    asked, headers = await read_request(request, OLLAMA_EMBEDS)
    vectors: list[list[float]] = []
    tokens, load = 0, 0.0
    if asked.is_empty:
        await _load(request, asked.model, read_keep_alive(asked.keep_alive))
    else:
        made = await _embed(request, asked.to_spec())
        vectors = await anyio.to_thread.run_sync(made.vectors.tolist)
        tokens, load = made.tokens, made.load_seconds
    embeddings = OllamaEmbeddings(
        model=asked.model,
        embeddings=vectors,
        total_duration=nanoseconds(monotonic() - begun),
        load_duration=nanoseconds(load),
        prompt_eval_count=tokens,
    )
    return await large_json(embeddings, headers)


@_OllamaEndpoint(
    "POST",
    "/api/embeddings",
    "ollamaEmbeddings",
    "Embed one text, in the older format",
    body=OLLAMA_OLD_EMBEDS,
    answer=OllamaEmbedding,
    fails=(507,),
)
async def embed_one(request: Request) -> Response:
    asked, headers = await read_request(request, OLLAMA_OLD_EMBEDS)
    if asked.is_empty:
        await _load(request, asked.model, read_keep_alive(asked.keep_alive))
        return JSONResponse(OllamaEmbedding([]), headers=headers)
    made = await _embed(request, asked.to_spec())
    return JSONResponse(OllamaEmbedding(made.vectors[0].tolist()), headers=headers)


async def _embed(request: Request, spec: EmbeddingSpec) -> TextVectors:
    record_of(request.scope).operation = "embeddings"
    note_asked(request, spec)
    work = service_of(request).embed(spec, request_id(request.scope), client_of(request))
    return await compute(request, work)


# Models.


@_OllamaEndpoint("GET", "/api/tags", "ollamaTags", "List the models", answer=OllamaModels)
async def list_models(request: Request) -> Response:
    models = await service_of(request).models()
    return JSONResponse(OllamaModels([ollama_model(model) for model in models]))


@_OllamaEndpoint(
    "GET",
    "/api/version",
    "ollamaVersion",
    "Get the version of Ollama whose API this is",
    answer=OllamaVersion,
)
async def get_version(request: Request) -> Response:
    return JSONResponse(OllamaVersion())


@_OllamaEndpoint(
    "POST", "/api/show", "ollamaShow", "Get one model", body=OLLAMA_SHOWS, answer=OllamaShown
)
async def show_model(request: Request) -> Response:
    asked, headers = await read_request(request, OLLAMA_SHOWS)
    described, facts = await service_of(request).show(asked.named)
    return JSONResponse(shown_model(described, facts), headers=headers)


@_OllamaEndpoint("GET", "/api/ps", "ollamaPs", "List the models in memory", answer=OllamaRunning)
async def list_running(request: Request) -> Response:
    return JSONResponse(
        OllamaRunning([running_model(each) for each in service_of(request).running()])
    )


@_OllamaEndpoint(
    "POST",
    "/api/pull",
    "ollamaPull",
    "Download a model",
    "From the Hugging Face hub, with `--allow-download` only. The progress is streamed as lines of "
    "JSON, unless `stream` is false. A model that is here is not downloaded again.",
    body=OLLAMA_PULLS,
    answer=OllamaProgress,
    chunk=OllamaProgress,
    fails=(403,),
)
async def pull_model(request: Request) -> Response:
    service = service_of(request)
    asked, headers = await read_request(request, OLLAMA_PULLS)
    watch = await service.pull(asked.named)
    if asked.stream is not False:
        if watch is not None:
            return PullStream(watch, service.settings.keepalive, headers=headers)
        lines = line(PULL_BEGINS) + line(PULL_ENDS[-1])
        return Response(lines, headers={**STREAM_HEADERS, **headers}, media_type=MEDIA_TYPE)
    if watch is not None:
        await unless_gone(request.receive, _finish(watch))
    return JSONResponse(PULL_ENDS[-1], headers=headers)


async def _finish(watch: PullWatch) -> bool:
    """Wait for the end of a download. Raises ServeError."""
    with watch:
        while await watch.changes():
            pass
    return True


class PullStream(StreamingResponse):
    """The progress of a download.

    Status 200 goes out with the first progress or, if that takes long, with the first keep-alive. A
    failure before that is answered with its own status.
    """

    def __init__(self, watch: PullWatch, keepalive: float, *, headers: Mapping[str, str]) -> None:
        super().__init__(
            self._lines(), headers={**STREAM_HEADERS, **headers}, media_type=MEDIA_TYPE
        )
        self._watch = watch
        self._keepalive = keepalive
        self._first: list[PulledFile] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watch:
            async with anyio.create_task_group() as group:
                group.start_soon(cancel_on_disconnect, receive, group.cancel_scope)
                try:
                    self._first = await self._changes()
                except ServeError as error:
                    await refusal(scope, error)(scope, receive, send)
                else:
                    await self.stream_response(send)
                group.cancel_scope.cancel()

    async def _changes(self) -> list[PulledFile] | None:
        """Return the files that have changed; None if none has for the time of a keep-alive."""
        with anyio.move_on_after(self._keepalive):
            return await self._watch.changes()
        return None

    async def _lines(self) -> AsyncIterator[bytes]:
        last = line(PULL_BEGINS)
        yield last
        changed = self._first
        try:
            while changed is None or changed:
                lines = [line(file_progress(f.checksum, f.size, f.done)) for f in changed or ()]
                last = lines[-1] if lines else last
                yield b"".join(lines) or last
                changed = await self._changes()
            yield b"".join(map(line, PULL_ENDS))
        except ServeError as error:
            yield line(ollama_error(error))


# What is refused.


def _refusing(
    method: str, path: str, id: str, what: str, body: RequestDecoder[Any] | None = None
) -> OperationRoute:
    """Return a route that is there only to say that the server does not do this."""

    async def refuse(request: Request) -> Response:
        raise ActionNotAllowed(f"this server does not {what}")

    return _OllamaEndpoint(method, path, id, "Refused", _REFUSED, body=body, status=403)(refuse)


delete = _refusing(
    "DELETE", "/api/delete", "ollamaDelete", "delete models; remove their files on its machine"
)
copy = _refusing(
    "POST",
    "/api/copy",
    "ollamaCopy",
    "copy models; its operator can give a model more names",
    OLLAMA_COPIES,
)
create = _refusing(
    "POST",
    "/api/create",
    "ollamaCreate",
    "create models; its operator can add folders of models",
    OLLAMA_CREATES,
)
push = _refusing("POST", "/api/push", "ollamaPush", "push models", OLLAMA_NAMES)


@_OllamaEndpoint(
    "GET",
    "/",
    "ollamaRoot",
    "Say that Ollama is running",
    "With `--ollama-root` only.",
    answer=str,
    media="text/plain",
    open=True,
)
async def root(request: Request) -> Response:
    return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})
