"""One request, from a validated Struct to what it generates.

A Reply is made synchronously, so that everything known at once (an unknown model, a full queue, a
server that is shutting down) is an error before anything has been spent on it. Its `admit` then
does the waiting: for the model, for the tokenizer, for a row. Whoever answers the client reads
`outputs`, in the same task group, and ends it with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
import uuid
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio
import anyio.to_thread
import msgspec

from mlxsrv.engine.device import JobEvent, Port
from mlxsrv.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    ServeError,
    ShuttingDown,
)
from mlxsrv.events import (
    Channel,
    Failed,
    FinishReason,
    Job,
    PromptRead,
    Sampling,
    Started,
    Token,
    Usage,
)
from mlxsrv.logs import log
from mlxsrv.models.catalogue import Catalogue
from mlxsrv.models.pool import Lease, Model, Pool
from mlxsrv.models.prompts import chat_messages, encode_prompt, render_chat, single_prompt
from mlxsrv.settings import Settings
from mlxsrv.version import __version__
from mlxsrv.wire.openai import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Identity,
    ModelObject,
)

if TYPE_CHECKING:
    from mlxsrv.engine.tokenizer import Prompt, Tokenizer
    from mlxsrv.text.pipeline import TextPipeline

_log = logging.getLogger("mlxsrv.service")

# What a reply gives, in order: Opened, any number of Texts, Done. Failures are raised.


class Opened(msgspec.Struct, frozen=True):
    """The engine has the job."""


class Text(msgspec.Struct, frozen=True):
    channel: Channel
    text: str


class Done(msgspec.Struct, frozen=True):
    reason: FinishReason
    usage: Usage


Output = Opened | Text | Done

Prepare = Callable[["Tokenizer"], "Prompt"]


class Reply:
    """One request being answered. Lives on the event loop; whoever makes it must `close` it.

    The device thread's events arrive through `_receive`, a callback on the loop that only notes
    them; `outputs` turns them into text on its reader's time. The timers for silence and for the
    deadline wake the reader too, so no read lasts longer than `keepalive` seconds.
    """

    def __init__(
        self,
        service: Service,
        lease: Lease,
        request: GenerationRequest,
        *,
        prepare: Prepare,
        limit: int | None,
        chat: bool,
        request_id: str,
    ) -> None:
        self.who = Identity(
            id=f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=lease.model.entry.name,
            system_fingerprint=service.fingerprint,
        )
        self._service = service
        self._lease = lease
        self._request = request
        self._prepare = prepare
        self._limit = limit
        self._chat = chat
        self._request_id = request_id
        self._job_id = service.next_job_id()
        self._closed = False

        # What has arrived and was not read yet.
        self._started = False
        self._tokens: list[int] = []
        self._finish: FinishReason | None = None
        self._error: ServeError | None = None
        self._silent = False

        # What has been read.
        self._opened = False
        self._port: Port | None = None  # set: the job was submitted
        self._pipeline: TextPipeline | None = None
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._end_tokens = 0
        self._thinks = False
        self._first_text: float | None = None

        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._begun = self._last_read = self._loop.time()
        settings = service.settings
        self._deadline = self._loop.call_later(settings.request_timeout, self._expire)
        self._keepalive = self._loop.call_later(settings.keepalive, self._check_silence)

    # Admission.

    async def admit(self) -> None:
        """Wait for all that the job needs, then submit it. Failures come out of `outputs`."""
        try:
            await self._submit()
        except ServeError as error:
            self.fail(error)
        except Exception:
            _log.exception("admission failed")
            self.fail(ServeError(self._internal("could not take this request")))

    async def _submit(self) -> None:
        tokenizer = await self._lease.tokenizer()
        prompt = await anyio.to_thread.run_sync(
            self._prepare, tokenizer, limiter=self._lease.model.tokenizing
        )
        job = self._job(tokenizer, prompt)
        self._prompt_tokens = len(prompt.tokens)
        self._thinks = tokenizer.thinks
        self._pipeline = tokenizer.pipeline(
            stops=self._request.stops, chat=self._chat, thinking=prompt.thinking
        )
        await self._lease.borrow_row()
        if self._error is not None:
            # It failed while it was queued, and a client that reads nothing has not heard so yet.
            self._lease.release()
            return
        # No await from here on: a cancellation finds the row either not borrowed or the job
        # submitted, and close() undoes both.
        self._port = self._service.pool.port
        self._port.submit(job, self._receive)
        log(_log, logging.INFO, "stream start", **self._fields(), prompt_tokens=len(job.prompt))

    def _job(self, tokenizer: Tokenizer, prompt: Prompt) -> Job:
        request, given = self._request, tokenizer.defaults
        return Job(
            id=self._job_id,
            model=self.who.model,
            prompt=prompt.tokens,
            max_tokens=self._max_tokens(tokenizer.context_length, len(prompt.tokens)),
            end_tokens=tokenizer.end_tokens,
            checkpoint=prompt.checkpoint,
            sampling=Sampling(
                temperature=_first(request.temperature, given.temperature, 1.0),
                top_p=_first(request.top_p, given.top_p, 1.0),
                top_k=_first(request.top_k, given.top_k, 0),
                min_p=_first(request.min_p, given.min_p, 0.0),
                seed=_first(request.seed, random.getrandbits(63)),
            ),
        )

    def _max_tokens(self, context: int | None, prompt_tokens: int) -> int:
        """How many tokens may be drawn. Raises ContextLengthExceeded."""
        default = self._service.settings.default_max_tokens
        if context is None:
            return self._limit or default
        left = context - prompt_tokens
        if left < (self._limit or 1):
            asked = f" and max_tokens is {self._limit}" if self._limit else ""
            raise ContextLengthExceeded(
                f"the context of {self.who.model} is {context} tokens; the prompt has "
                f"{prompt_tokens}{asked}, and {max(left, 0)} are left for the answer",
                param="messages" if self._chat else "prompt",
            )
        return self._limit or min(left, default)

    # What arrives, from the device thread and from timers; all on the loop.

    def fail(self, error: ServeError) -> None:
        """End the reply with `error`. What was generated before is given first."""
        if self._finish is None and self._error is None:
            self._error = error
            self._free_early()
            self._wake()

    def _receive(self, event: JobEvent) -> None:
        match event:
            case Token():
                if event.finish == "stop":
                    self._end_tokens = 1  # counts as sampled, but is no text
                else:
                    self._tokens.append(event.id)
                self._finish = self._finish or event.finish
            case PromptRead():
                self._cached_tokens = event.cached
                return
            case Started():
                self._started = True
            case Failed():
                log(_log, logging.ERROR, "stream error", **self._fields(), reason=event.reason)
                self.fail(
                    EngineFailed("the inference engine has failed; restart the server")
                    if self._service.pool.failure
                    else ServeError(self._internal("failed while generating"))
                )
        self._wake()

    def _expire(self) -> None:
        if self._finish is not None or self._error is not None:
            return
        if self._first_text is not None:
            self._finish = "timeout"
            self._free_early()
            self._wake()
        else:
            seconds = self._service.settings.request_timeout
            self.fail(DeadlineExceeded(f"no text within the {seconds:g} s a request may take"))

    def _check_silence(self) -> None:
        interval = self._service.settings.keepalive
        now = self._loop.time()
        if now >= self._last_read + interval:
            self._silent = True
            self._last_read = now
            self._wake()
        self._keepalive = self._loop.call_at(self._last_read + interval, self._check_silence)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Reading.

    async def outputs(self) -> list[Output]:
        """What is ready, waiting for the first of it. Empty: silence for `keepalive` seconds.

        Raises:
            ServeError: the reply failed; there is nothing more to read.
        """
        while True:
            outputs = self._read()
            if outputs:
                self._last_read = self._loop.time()
                return outputs
            if self._error is not None:
                raise self._error
            if self._silent:
                self._silent = False
                return []
            self._waiter = self._loop.create_future()
            await self._waiter

    def _read(self) -> list[Output]:
        outputs: list[Output] = []
        if self._started and not self._opened:
            self._opened = True
            outputs.append(Opened())
        if self._pipeline is None:
            return outputs
        tokens, self._tokens = self._tokens, []
        pieces = self._pipeline.feed(tokens)
        if self._finish is not None:
            pieces += self._pipeline.flush()  # which may complete a stop string, too
        if self._pipeline.stopped:
            self._finish, self._end_tokens = "stop", 0
        if pieces and self._first_text is None:
            self._first_text = self._loop.time()
        outputs += [Text(channel, text) for channel, text in pieces]
        if self._finish is not None:
            self._free_early()
            outputs.append(Done(self._finish, self._usage(self._pipeline)))
        return outputs

    def _usage(self, pipeline: TextPipeline) -> Usage:
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=pipeline.tokens + self._end_tokens,
            reasoning_tokens=pipeline.reasoning_tokens if self._thinks else None,
            cached_tokens=self._cached_tokens,
        )

    # The end.

    def close(self) -> None:
        """Give back all that the reply holds: its row, its place, its timers. Only the first call
        counts. A reply closed before it was done was left by its client."""
        if self._closed:
            return
        self._closed = True
        self._deadline.cancel()
        self._keepalive.cancel()
        self._free_row()
        self._service.forget(self)
        self._log_end()

    def _free_early(self) -> None:
        """The job is over, but its client may read slowly, or never: others need not wait for it.

        A job that was not submitted yet is still being admitted, and close() frees what that holds.
        """
        if self._port is not None:
            self._free_row()

    def _free_row(self) -> None:
        if self._port is not None:
            self._port.cancel(self._job_id)
        self._lease.release()

    def _log_end(self) -> None:
        now = self._loop.time()
        tokens = self._pipeline.tokens + self._end_tokens if self._pipeline is not None else 0
        ttft = rate = None
        if self._first_text is not None:
            ttft = self._first_text - self._begun
            # A clock may tick in milliseconds, and an answer be shorter.
            decoding = now - self._first_text
            rate = (tokens - 1) / decoding if tokens > 1 and decoding > 0 else None
        log(
            _log,
            logging.INFO,
            "stream end",
            **self._fields(),
            finish=self._error.code if self._error is not None else self._finish or "disconnected",
            prompt_tokens=self._prompt_tokens,
            tokens=tokens,
            ttft=ttft,
            tokens_per_second=rate,
            seconds=now - self._begun,
        )

    def _fields(self) -> dict[str, Any]:
        return {"request": self._request_id, "model": self.who.model, "user": self._request.user}

    def _internal(self, what: str) -> str:
        return f"the server {what}; its log says why under request id {self._request_id}"


HealthStatus = Literal["ok", "loading", "draining", "failed"]


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
            request,
            prepare=partial(render_chat, request, chat_messages(request.messages)),
            limit=request.limit,
            chat=True,
            request_id=request_id,
        )

    def complete(self, request: CompletionRequest, request_id: str) -> Reply:
        """Raises ServeError for all that can be known at once."""
        return self._reply(
            request,
            prepare=partial(encode_prompt, single_prompt(request.prompt)),
            limit=request.limit,
            chat=False,
            request_id=request_id,
        )

    def _reply(self, request: GenerationRequest, **details: Any) -> Reply:
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        if self.pool.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")
        reply = Reply(self, self.pool.lease(request.model), request, **details)
        self._replies.add(reply)
        return reply

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

V = TypeVar("V")


def _first(*values: V | None) -> V:
    """The first that is given; the last always is."""
    return next(value for value in values if value is not None)


def _model_object(model: Model) -> ModelObject:
    return ModelObject(
        id=model.entry.name,
        created=model.entry.created,
        owned_by="mlxsrv",
        loaded=model.loaded,
        context_length=model.tokenizer.context_length if model.tokenizer is not None else None,
    )
