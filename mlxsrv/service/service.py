"""All that one app serves: its models, and the replies that are under way.

A Reply is made synchronously, so that everything known at once (an unknown model, a full queue, a
server that is shutting down) is an error before anything has been spent on it. Its `admit` then
does the waiting: for the model, for the tokenizer, for a row. Whoever answers the client reads
`outputs`, in the same task group, and ends it with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import msgspec

from mlxsrv.engine.events import Report
from mlxsrv.errors import (
    EngineFailed,
    InvalidRequest,
    ServeError,
    ShuttingDown,
    UnsupportedParameter,
)
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.model import Model, ModelStatistics
from mlxsrv.models.pool.model_files import capped
from mlxsrv.models.pool.pool import Pool, PoolStatistics
from mlxsrv.models.profile_store import ProfileStore
from mlxsrv.prompts.messages import chat_messages
from mlxsrv.prompts.tokens import apply_template, detokenize, tokenize, tokenizer_info
from mlxsrv.service.embedding import EmbeddingTask
from mlxsrv.service.lifecycle import State
from mlxsrv.service.observing import Observer
from mlxsrv.service.planning import PromptRequest
from mlxsrv.service.reply import Reply
from mlxsrv.service.resources import Resources
from mlxsrv.service.steering.attachments import SAEs
from mlxsrv.service.steering.profiles import Profiles
from mlxsrv.service.steering.registry import SteeringRegistry
from mlxsrv.service.timed_work import TimedWork
from mlxsrv.settings import Settings
from mlxsrv.version import __version__
from mlxsrv.wire.embeddings import (
    EmbeddingList,
    EmbeddingRequest,
    RerankRequest,
    RerankResponse,
    ScoreList,
    ScoreRequest,
)
from mlxsrv.wire.infill import InfillRequest
from mlxsrv.wire.openai import (
    EngineState,
    Health,
    HealthStatus,
    MemoryState,
    ModelDetails,
    ModelObject,
    ModelState,
)
from mlxsrv.wire.requests import (
    ChatRequest,
    CompletionRequest,
)
from mlxsrv.wire.tokens import (
    AppliedTemplate,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
    TokenizerQuery,
)

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

V = TypeVar("V")


class Service:
    """All that one app serves: its models and the replies that are under way."""

    def __init__(self, settings: Settings, observers: Sequence[Observer] = ()) -> None:
        self.settings = settings
        self.pool = Pool(Catalogue(settings), settings, observers)
        self.saes = SAEs(self.pool, settings)
        store = ProfileStore(Path(settings.data_dir))
        self.steering = SteeringRegistry(self.pool, self.saes, store)
        self.profiles = Profiles(self.steering, store)
        self._resources = Resources(
            settings,
            self.pool,
            self.steering,
            observers,
            f"mlxsrv-{__version__}-mlx-{version('mlx')}-mlx-lm-{version('mlx-lm')}",
            count(1),
        )
        self._replies: set[Reply] = set()
        self._embeddings: set[EmbeddingTask] = set()
        self._tokenizing: set[TimedWork] = set()
        self._starting = False  # the default model is loaded for the first time
        self._draining = False
        self._idle = asyncio.Event()

    # Requests that generate text.

    async def chat(self, request: ChatRequest, request_id: str) -> Reply:
        """Raises ServeError for all that can be known before anything is waited for."""
        self._check_template(request)
        chat_messages(request.messages)  # raises for what cannot be read
        return await self._reply(request, request_id, "n")

    async def complete(self, request: CompletionRequest, request_id: str) -> Reply:
        """Raises ServeError for all that can be known before anything is waited for."""
        return await self._reply(request, request_id, "prompt" if len(request.prompts) > 1 else "n")

    async def infill(self, request: InfillRequest, request_id: str) -> Reply:
        """Raises ServeError for all that can be known before anything is waited for."""
        return await self._reply(request, request_id, "n")

    async def _reply(self, request: PromptRequest, request_id: str, param: str) -> Reply:
        """`param` is the field to blame for too many choices."""
        most = self.settings.max_choices
        if request.all_choices > most:
            raise InvalidRequest(
                f"{param}: the request asks for {request.all_choices} choices, prompts times n; a "
                f"request may have at most {most}",
                param=param,
            )
        lease = await self._lease(request.model)
        reply = Reply(self._resources, lease, request, request_id, self._forget)
        self._replies.add(reply)
        return reply

    def _forget(self, reply: Reply) -> None:
        self._replies.discard(reply)
        self._note_idle()

    def _check_template(self, request: ChatRequest) -> None:
        """Raises UnsupportedParameter: a template is a program, and the operator's to allow."""
        if request.chat_template is not None and not self.settings.allow_chat_template:
            raise UnsupportedParameter(
                "chat_template: this server runs the models' own templates only; its operator may "
                "allow others with --allow-chat-template",
                param="chat_template",
            )

    # Requests that compute numbers.

    async def embed(self, request: EmbeddingRequest, request_id: str) -> EmbeddingList:
        """Raises ServeError."""
        with await self._embedding(request.model, request_id) as embedding:
            return await embedding.embed(request)

    async def rerank(self, request: RerankRequest, request_id: str) -> RerankResponse:
        """Raises ServeError."""
        with await self._embedding(request.model, request_id) as embedding:
            return await embedding.rerank(request)

    async def score(self, request: ScoreRequest, request_id: str) -> ScoreList:
        """Raises ServeError."""
        with await self._embedding(request.model, request_id) as embedding:
            return await embedding.score(request)

    async def _embedding(
        self, model: str | None, request_id: str
    ) -> AbstractContextManager[EmbeddingTask]:
        return self._under_way(EmbeddingTask(self._resources, await self._lease(model), request_id))

    @contextlib.contextmanager
    def _under_way(self, embedding: EmbeddingTask) -> Iterator[EmbeddingTask]:
        self._embeddings.add(embedding)
        try:
            yield embedding
        finally:
            embedding.close()
            self._embeddings.discard(embedding)
            self._note_idle()

    async def _lease(self, model: str | None) -> Lease:
        """A claim on the model of this name, which may have to be looked for first."""
        entry = await self.pool.catalogue.find(model)
        self._require_serving()
        return self.pool.lease(entry)

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

    async def apply_template(self, request: ChatRequest) -> AppliedTemplate:
        """Raises ServeError."""
        self._check_template(request)
        return await self._with_tokenizer(request.model, partial(apply_template, request))

    async def tokenizer_info(self, request: TokenizerQuery) -> TokenizerInfo:
        """Raises ServeError."""
        return await self._with_tokenizer(request.model, tokenizer_info)

    async def _with_tokenizer(self, model: str | None, work: Callable[[Tokenizer], V]) -> V:
        """Do `work` in a worker thread, with the model's tokenizer to itself.

        Raises:
            DeadlineExceeded, Overloaded, ShuttingDown: it was ended before it was done.
        """
        lease = await self._lease(model)
        timed = TimedWork(
            self.settings,
            loading=lambda: lease.model.progressing,
            heard=lambda: self.pool.engine.heard,
        )
        self._tokenizing.add(timed)
        try:
            with timed.run():
                tokenizer = await lease.tokenizer()
                timed.enter(State.PREPARING)
                return await lease.model.tokenizer_lock.run(partial(work, tokenizer))
        finally:
            self._tokenizing.discard(timed)
            lease.release()
            self._note_idle()
        raise AssertionError("it was done, or ended with an error")

    # The requests that are under way.

    @property
    def failure(self) -> str | None:
        """Why the inference engine has failed, if it has."""
        return self.pool.failure

    def _note_idle(self) -> None:
        if not self._busy:
            self._idle.set()

    @property
    def _busy(self) -> bool:
        return bool(self._replies or self._embeddings or self._tokenizing)

    # The catalogue.

    async def models(self) -> list[ModelObject]:
        """Loaded models first, then by name."""
        catalogue = self.pool.catalogue
        await catalogue.refresh()
        known = [self._model_object(entry) for entry in catalogue if entry.problem is None]
        return sorted(known, key=lambda model: (not model.loaded, model.id))

    async def model(self, name: str) -> ModelObject:
        """Raises ModelNotFound."""
        catalogue = self.pool.catalogue
        await catalogue.refresh()
        return self._model_object(await catalogue.find(name, download=False))

    def _model_object(self, entry: ModelEntry) -> ModelObject:
        model = self.pool.model(entry.name)
        shown = ModelObject(
            id=entry.name,
            created=entry.created,
            owned_by=entry.name.rpartition("/")[0] or "mlxsrv",
            loaded=model is not None and model.loaded is not None,
            aliases=entry.aliases,
        )
        said = entry.description
        if said is None:
            return shown
        return msgspec.structs.replace(
            shown,
            type=said.type,
            context_length=capped(said.context_length, self.settings),
            details=ModelDetails(
                said.family, said.parameter_size, said.quantization_level, said.format
            ),
            size=said.size,
            modified_at=datetime.fromtimestamp(said.modified_at, UTC),
            capabilities=_capabilities(said.capabilities, model),
        )

    # Life.

    @property
    def health(self) -> HealthStatus:
        """Whether requests would be served. Takes nothing of the device thread."""
        if not self.alive:
            return "failed" if self.pool.failure is not None else "stalled"
        if self._draining:
            return "draining"
        return "loading" if self._starting else "ok"

    @property
    def alive(self) -> bool:
        """False once only a restart may help: the device thread is dead, or has been in one step
        for longer than `step_timeout`."""
        return self.pool.failure is None and not self.pool.stalled

    async def state(self) -> Health:
        """The health, with what every model and the memory are at. A device thread that is dead,
        or in a step that lasts, has no part in it."""
        status = self.health  # before the wait, in which a stall may end
        report, engine = None, EngineState(stalled_seconds=self.pool.stalled)
        with contextlib.suppress(ServeError), anyio.move_on_after(_REPORT_SECONDS):
            report = await self.pool.engine.report()
        if report is None:
            return Health(status=status, engine=engine)
        pool = self.pool.statistics()
        return Health(
            status=status,
            engine=engine,
            models=[_model_state(model, report) for model in pool.models],
            memory=MemoryState(
                limit=pool.limit,
                weights=pool.used,
                active=report.active_bytes,
                cached=report.cache_bytes,
                peak=report.peak_bytes,
            ),
        )

    def statistics(self) -> PoolStatistics:
        """The state of all models, without the device thread."""
        return self.pool.statistics()

    def label(self, name: str | None) -> str:
        """The catalogue's name for what a request names, or "": see `Catalogue.label`."""
        return self.pool.catalogue.label(name)

    def abandon(self) -> None:
        """Leave the device thread without waiting for anything: the loop is gone."""
        self.pool.abandon()

    async def preload(self) -> None:
        """Load the default model and those that `--preload` names, then attach SAEs. A failure is
        logged; the next request tries again to load its model."""
        self._starting = True
        try:
            await self._preload(None)
        finally:
            self._starting = False
        for name in self.settings.preload:
            await self._preload(name)
        await self.saes.begin()

    async def _preload(self, name: str | None) -> None:
        with contextlib.suppress(ServeError):
            await self.pool.preload(await self.pool.catalogue.find(name))

    async def drain(self) -> None:
        """Refuse new requests; let running ones finish for `shutdown_grace` seconds, then end them
        with an error of their own form. Cancelling it skips the rest of the grace."""
        self._draining = True
        try:
            await self._wait_idle(self.settings.shutdown_grace)
        finally:
            self._end_all()
        await self._wait_idle(_FAREWELL_SECONDS)

    async def _wait_idle(self, seconds: float) -> None:
        if self._busy:
            self._idle.clear()
            with anyio.move_on_after(seconds):
                await self._idle.wait()

    async def close(self) -> None:
        """End what is still there and leave the device thread."""
        self._draining = True
        self._end_all()
        await self.saes.close()
        await self.pool.close()

    def _end_all(self) -> None:
        for reply in list(self._replies):
            reply.fail(ShuttingDown("the server is shutting down"))
        for embedding in list(self._embeddings):
            embedding.stop()
        for timed in self._tokenizing:
            timed.end(ShuttingDown("the server is shutting down"))


_REPORT_SECONDS = 2.0
_FAREWELL_SECONDS = 2.0  # for the last frames to reach clients that read them


def _model_state(model: ModelStatistics, report: Report) -> ModelState:
    return ModelState(
        id=model.name,
        state=model.status,
        pinned=model.pinned,
        requests=model.leases,
        rows=model.rows,
        max_rows=model.max_rows,
        bytes=model.bytes,
        idle_seconds=model.idle_seconds,
        engine=report.models.get(model.name, {}),
    )


def _capabilities(said: tuple[str, ...], model: Model | None) -> tuple[str, ...]:
    """What the files say, and what only the tokenizer's whole vocabulary tells once it is there."""
    tokenizer = None if model is None else model.tokenizer
    if tokenizer is None or not tokenizer.thinks or "chat" not in said or "thinking" in said:
        return said
    return (*said, "thinking")
