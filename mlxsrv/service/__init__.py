"""All that one app serves: its models, and the replies that are under way.

A Reply is made synchronously, so that everything known at once (an unknown model, a full queue, a
server that is shutting down) is an error before anything has been spent on it. Its `admit` then
does the waiting: for the model, for the tokenizer, for a row. Whoever answers the client reads
`outputs`, in the same task group, and ends it with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from mlxsrv.engine.device import Port
from mlxsrv.errors import EngineFailed, InvalidRequest, ServeError, ShuttingDown
from mlxsrv.models.catalogue import Catalogue
from mlxsrv.models.pool import Model, Pool
from mlxsrv.models.prompts import (
    chat_messages,
    detokenize,
    plan_chat,
    plan_completion,
    tokenize,
)
from mlxsrv.service.reply import Asked, Reply
from mlxsrv.settings import Settings
from mlxsrv.version import __version__
from mlxsrv.wire.openai import (
    DetokenizeResponse,
    HealthStatus,
    ModelObject,
    TokenizeResponse,
)
from mlxsrv.wire.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

if TYPE_CHECKING:
    from mlxsrv.engine.tokenizer import Tokenizer

V = TypeVar("V")


class Service:
    """All that one app serves: its models and the replies that are under way."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pool(Catalogue(settings.model), settings)
        self.fingerprint = f"mlxsrv-{__version__}-mlx-{version('mlx')}-mlx-lm-{version('mlx-lm')}"
        self._replies: set[Reply] = set()
        self._job_ids = count(1)
        self._draining = False
        self._idle = asyncio.Event()

    # Requests.

    def chat(self, request: ChatRequest, request_id: str) -> Reply:
        """Raises ServeError for all that can be known at once."""
        return self._reply(
            request.model,
            Asked(
                request,
                partial(plan_chat, request, chat_messages(request.messages)),
                choices=self._choices(request.choices, "n"),
                limit=request.limit,
                likeliest=request.likeliest,
                chat=True,
                request_id=request_id,
            ),
        )

    def complete(self, request: CompletionRequest, request_id: str) -> Reply:
        """Raises ServeError for all that can be known at once."""
        prompts = request.prompts
        return self._reply(
            request.model,
            Asked(
                request,
                partial(plan_completion, request, prompts),
                choices=self._choices(
                    request.choices * len(prompts), "prompt" if len(prompts) > 1 else "n"
                ),
                limit=request.limit,
                likeliest=request.likeliest,
                chat=False,
                request_id=request_id,
                echo=bool(request.echo),
            ),
        )

    def _choices(self, asked: int, param: str) -> int:
        most = self.settings.max_choices
        if asked > most:
            raise InvalidRequest(
                f"{param}: {asked} choices are asked for, prompts times n; at most {most} are made "
                "for one request",
                param=param,
            )
        return asked

    def _reply(self, model: str | None, asked: Asked) -> Reply:
        self._require_serving()
        reply = Reply(self, self.pool.lease(model), asked)
        self._replies.add(reply)
        return reply

    def _require_serving(self) -> None:
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        if self.pool.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")

    async def tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """Raises ServeError."""
        return await self._with_tokenizer(request.model, partial(tokenize, request))

    async def detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """Raises ServeError."""
        return await self._with_tokenizer(request.model, partial(detokenize, request))

    async def _with_tokenizer(self, model: str | None, work: Callable[[Tokenizer], V]) -> V:
        """Do `work` in a worker thread, with the model's tokenizer to itself."""
        self._require_serving()
        lease = self.pool.lease(model)
        try:
            tokenizer = await lease.tokenizer()
            return await anyio.to_thread.run_sync(work, tokenizer, limiter=lease.model.tokenizing)
        finally:
            lease.release()

    @property
    def port(self) -> Port:
        return self.pool.port

    @property
    def failure(self) -> str | None:
        return self.pool.failure

    def next_job_id(self) -> int:
        return next(self._job_ids)

    def forget(self, reply: Reply) -> None:
        self._replies.discard(reply)
        if not self._replies:
            self._idle.set()

    # The catalogue.

    def models(self) -> list[ModelObject]:
        """Loaded models first, then by name."""
        known = [_model_object(model) for model in self.pool]
        return sorted(known, key=lambda model: (not model.loaded, model.id))

    def model(self, name: str) -> ModelObject:
        return _model_object(self.pool.model(name))

    # Life.

    @property
    def health(self) -> HealthStatus:
        if self.pool.failure is not None:
            return "failed"
        if self._draining:
            return "draining"
        default = self.pool.model(None)
        return "loading" if default.loading is not None and not default.loaded else "ok"

    async def preload(self) -> None:
        """Have the default model loaded. A failure is logged; the next request tries again."""
        model = self.pool.model(None)
        if not model.loaded:
            with contextlib.suppress(ServeError):
                await self.pool.load(model)

    async def drain(self) -> None:
        """Refuse new requests; let running ones finish for `shutdown_grace` seconds, then end them
        with an error of their own form. Cancelling it skips the rest of the grace."""
        self._draining = True
        try:
            await self._wait_idle(self.settings.shutdown_grace)
        finally:
            for reply in list(self._replies):
                reply.fail(ShuttingDown("the server is shutting down"))
        await self._wait_idle(_FAREWELL_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        if self._replies:
            self._idle.clear()
            with anyio.move_on_after(seconds):
                await self._idle.wait()

    async def close(self) -> None:
        """End what is still there and leave the device thread."""
        self._draining = True
        for reply in list(self._replies):
            reply.fail(ShuttingDown("the server is shutting down"))
        await self.pool.close()


_FAREWELL_SECONDS = 2.0  # for the last frames to reach clients that read them


def _model_object(model: Model) -> ModelObject:
    return ModelObject(
        id=model.entry.name,
        created=model.entry.created,
        owned_by="mlxsrv",
        loaded=model.loaded,
        context_length=model.tokenizer.context_length if model.tokenizer is not None else None,
    )
