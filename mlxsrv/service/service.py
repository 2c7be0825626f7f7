"""The service of one app: its models, and the requests that are under way.

Making a Reply raises all that is known before anything is waited for: an unknown model, a full
queue, a server that is shutting down. Its `admit` then waits for the tokenizer and the model, and
its jobs wait for their turns in the engine's line.
The caller reads its `outputs` in the same task group, and ends it with `release`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread
from msgspec import UNSET
from msgspec.structs import replace

from mlxsrv.engine.device import DeviceThread
from mlxsrv.errors import (
    EngineFailed,
    InvalidRequest,
    ServeError,
    ShuttingDown,
    UnsupportedParameter,
)
from mlxsrv.generation.spec import ChatPrompt, GenerationSpec
from mlxsrv.generation.status import (
    EngineState,
    Health,
    HealthStatus,
    LoadedModel,
    ModelFacts,
    ModelObject,
)
from mlxsrv.generation.texts import (
    EmbeddingSpec,
    PairScores,
    PairsSpec,
    TextTokens,
    TextVectors,
    TokenizerInfo,
    TokensSpec,
)
from mlxsrv.models.catalogue.catalogue import Catalogue, ModelEntry
from mlxsrv.models.catalogue.pulls import Pulls, PullWatch
from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.observing import LoadProblems
from mlxsrv.models.pool.pool import Pool
from mlxsrv.models.profile_store import ProfileStore
from mlxsrv.options import SettingsError
from mlxsrv.prompts.tokens import (
    apply_template,
    count_tokens,
    detokenize,
    tokenize,
    tokenizer_info,
)
from mlxsrv.service.embedding import EmbeddingTask
from mlxsrv.service.lifecycle import State, TimedWork
from mlxsrv.service.observing import Observer
from mlxsrv.service.reply import Reply
from mlxsrv.service.resources import Resources
from mlxsrv.service.response_store import ResponseStore
from mlxsrv.service.status import model_object, model_states, read_facts
from mlxsrv.service.steering.attachments import SAEs, check_steering_settings
from mlxsrv.service.steering.profiles import Profiles
from mlxsrv.service.steering.registry import SteeringRegistry
from mlxsrv.settings import Settings
from mlxsrv.version import __version__

if TYPE_CHECKING:
    from mlxsrv.prompts.tokenizer import Tokenizer

V = TypeVar("V")


def check_models(settings: Settings) -> str:
    """Check what the settings say about models and steering; nothing is loaded.

    Returns:
        The name of the default model.

    Raises:
        SettingsError: a model, an adapter, an SAE or a control vector cannot be used, or an extra
            is not installed.
    """
    if settings.parallel is not None and not DeviceThread.joins_ranks():
        raise SettingsError(
            "parallel: an app in a server of another's is one process; start ranks with "
            "mlx.launch -n 2 -- python -m mlxsrv ..."
        )
    catalogue = Catalogue(settings)
    check_steering_settings(settings, catalogue)
    if settings.tool_grammar:
        check_llguidance("--tool-grammar")
    return catalogue.default


def check_llguidance(option: str) -> None:
    """Raise SettingsError if the library that an option needs is not installed."""
    try:
        importlib.import_module("llguidance")
    except ImportError:
        raise SettingsError(
            f"{option} needs llguidance, which is not installed: pip install 'mlxsrv[structured]'"
        ) from None


class Service:
    """The models of one app, and the requests that are under way. Used on one event loop.

    Args:
        responses: where they are stored; None: in memory.
    """

    def __init__(
        self,
        settings: Settings,
        observers: Sequence[Observer] = (),
        responses: ResponseStore | None = None,
    ) -> None:
        self.settings = settings
        self._problems = LoadProblems()
        self.pool = Pool(Catalogue(settings), settings, (*observers, self._problems))
        self._pulls = Pulls(self.pool.catalogue, settings)
        self.saes = SAEs(self.pool, settings)
        store = ProfileStore(Path(settings.data_dir))
        self.steering = SteeringRegistry(self.pool, self.saes, store)
        self.profiles = Profiles(self.steering, store)
        self.responses = responses or ResponseStore(
            settings.max_responses, settings.max_responses_bytes
        )
        self._resources = Resources(
            settings,
            self.pool,
            self.steering,
            observers,
            f"mlxsrv-{__version__}-mlx-{version('mlx')}-mlx-lm-{version('mlx-lm')}",
            count(1),
        )
        self.reading = anyio.Lock()  # held while a large request is read
        self._replies: set[Reply] = set()
        self._work: set[TimedWork] = set()
        self._starting = False  # while the default model is loaded at start
        self._draining = False
        self._idle = asyncio.Event()

    # Requests that generate text.

    async def generate(
        self, spec: GenerationSpec, request_id: str, id: str, client: Client
    ) -> Reply:
        """Make the reply to a request.

        Args:
            id: the response's.

        Raises:
            ServeError: all that can be known before anything is waited for.
        """
        self._check_template(spec)
        self._check_choices(spec)
        lease = await self._lease(spec.model, client)
        lease.keep_alive = spec.keep_alive
        reply = Reply(self._resources, lease, spec, request_id, id, self._discard)
        self._replies.add(reply)
        return reply

    def _check_choices(self, spec: GenerationSpec) -> None:
        """Raises InvalidRequest if there are too many."""
        most = self.settings.max_choices
        if spec.all_choices > most:
            param = spec.path("n" if spec.all_choices == spec.choices else "prompt")
            raise InvalidRequest(
                f"{param}: the request asks for {spec.all_choices} choices, prompts times n; a "
                f"request may have at most {most}",
                param=param,
            )

    def _discard(self, reply: Reply) -> None:
        self._replies.discard(reply)
        self._note_idle()

    def _check_template(self, spec: GenerationSpec) -> None:
        """Raises UnsupportedParameter: a template is a program, which the operator must allow."""
        prompt, allowed = spec.prompt, self.settings.allow_chat_template
        if isinstance(prompt, ChatPrompt) and prompt.template is not None and not allowed:
            path = spec.path("chat_template")
            raise UnsupportedParameter(
                f"{path}: this server runs only the models' own templates; its operator can "
                "allow others with --allow-chat-template",
                param=path,
            )

    async def _lease(self, model: str | None, client: Client) -> Lease:
        """A claim on the model of this name, which may have to be looked for first."""
        entry = await self.pool.catalogue.find(model)
        if self._draining:
            raise ShuttingDown("the server is shutting down")
        if self.pool.failure is not None:
            raise EngineFailed("the inference engine has failed; restart the server")
        return self.pool.lease(entry, client)

    # Requests that compute numbers. All raise ServeError.

    async def embed(self, spec: EmbeddingSpec, request_id: str, client: Client) -> TextVectors:
        async with self._timed_work(spec.model, client) as (lease, work):
            lease.keep_alive = spec.keep_alive
            return await EmbeddingTask(self._resources, lease, work, request_id).embed(spec)

    async def score(self, spec: PairsSpec, request_id: str, client: Client) -> PairScores:
        async with self._timed_work(spec.model, client) as (lease, work):
            return await EmbeddingTask(self._resources, lease, work, request_id).score(spec)

    # Requests that need a tokenizer only. All raise ServeError.

    async def tokenize(self, spec: TokensSpec, client: Client) -> TextTokens:
        return await self._with_tokenizer(spec.model, client, partial(tokenize, spec))

    async def detokenize(self, ids: Sequence[int], model: str | None, client: Client) -> str:
        return await self._with_tokenizer(model, client, partial(detokenize, ids))

    async def apply_template(self, spec: GenerationSpec, client: Client) -> str:
        self._check_template(spec)
        return await self._with_tokenizer(spec.model, client, partial(apply_template, spec))

    async def count_tokens(self, spec: GenerationSpec, client: Client) -> int:
        """Return how many tokens the prompt of a chat has; nothing is generated."""
        return await self._with_tokenizer(spec.model, client, partial(count_tokens, spec))

    async def tokenizer_info(self, model: str | None, client: Client) -> TokenizerInfo:
        return await self._with_tokenizer(model, client, tokenizer_info)

    async def _with_tokenizer(
        self, model: str | None, client: Client, function: Callable[[Tokenizer], V]
    ) -> V:
        """Call `function` in a worker thread."""
        async with self._timed_work(model, client) as (lease, work):
            tokenizer = await lease.tokenizer()
            work.enter(State.PREPARING)
            return await lease.run_in_worker(function, tokenizer)

    @contextlib.asynccontextmanager
    async def _timed_work(
        self, model: str | None, client: Client
    ) -> AsyncIterator[tuple[Lease, TimedWork]]:
        """A claim on a model, and a block that a time limit or a shutdown may end."""
        lease = await self._lease(model, client)
        work = TimedWork(self.settings, lease.model, lambda: self.pool.engine.heard)
        self._work.add(work)
        try:
            with work.run():
                yield lease, work
        finally:
            lease.release()
            self._work.discard(work)
            self._note_idle()

    # Requests that only load or unload a model. Both raise ServeError.

    async def load(self, model: str | None, client: Client, keep_alive: float | None) -> float:
        """Have a model in memory.

        Args:
            keep_alive: seconds that it stays there without a user; None: as before.

        Returns:
            The seconds that its load took.
        """
        async with self._timed_work(model, client) as (lease, work):
            lease.keep_alive = keep_alive
            await lease.tokenizer()
            work.enter(State.PREPARING)
            await lease.enter()
            return lease.load_seconds

    async def unload(self, model: str | None) -> None:
        """Unload a model once nobody uses it, unless it is pinned or has an SAE."""
        self.pool.unload((await self.pool.catalogue.find(model, download=False)).name)

    # The requests that are under way.

    def _note_idle(self) -> None:
        if not self._busy:
            self._idle.set()

    @property
    def _busy(self) -> bool:
        return bool(self._replies or self._work)

    # The catalogue.

    async def models(self) -> list[ModelObject]:
        """Loaded models first, then by name. The default model is always among them."""
        catalogue = self.pool.catalogue
        await catalogue.refresh()
        default = catalogue.default
        listed = [each for each in catalogue if each.problem is None or each.name == default]
        known = [self._describe(entry) for entry in listed]
        return sorted(known, key=lambda model: (not model.loaded, model.id))

    async def model(self, name: str) -> ModelObject:
        """Raises ModelNotFound."""
        catalogue = self.pool.catalogue
        await catalogue.refresh()
        return self._describe(await catalogue.find(name, download=False))

    async def show(self, name: str) -> tuple[ModelObject, ModelFacts]:
        """A model with all that its files say. Raises ModelNotFound."""
        described = await self.model(name)
        entry = self.pool.catalogue.known(described.id)
        facts = ModelFacts() if entry is None else await anyio.to_thread.run_sync(read_facts, entry)
        return described, facts

    def running(self) -> list[LoadedModel]:
        """The models in memory."""
        return [
            LoadedModel(
                self._describe(self.pool.catalogue.known(model.name) or model.entry),
                model.loaded.bytes,
                self.pool.seconds_left(model),
            )
            for model in self.pool
            if model.loaded is not None
        ]

    async def pull(self, name: str) -> PullWatch | None:
        """Begin or join the download of a model; None if it is here. Raises ServeError."""
        return await self._pulls.watch(name)

    def _describe(self, entry: ModelEntry) -> ModelObject:
        reason = self._problems.reasons.get(entry.name)
        return model_object(entry, self.pool.model(entry.name), self.settings, reason)

    # Life.

    @property
    def health(self) -> HealthStatus:
        """Whether requests would be served. Does not ask the device thread."""
        if not self.alive:
            return "failed" if self.pool.failure is not None else "stalled"
        if self._draining:
            return "draining"
        if self._starting:
            return "loading"
        return "ok" if self._start_problem is None else "failed"

    @property
    def _start_problem(self) -> str | None:
        """Why the default model could not be loaded. Once it has been, what fails is the affair of
        the requests that wanted it: another model may have the memory."""
        default = self.pool.catalogue.default
        return None if default in self._problems.proven else self._problems.reasons.get(default)

    def brief_health(self) -> Health:
        """The health, with why it is not well, or how far the default model is on its way."""
        health = Health(status=self.health)
        model = self.pool.model(self.pool.catalogue.default)
        reason = self.pool.failure or self._start_problem
        if health.status == "failed" and reason is not None:
            return replace(health, reason=reason)
        if health.status == "loading" and model is not None:
            arrived, read = model.arrived, model.weights_read
            return replace(
                health,
                download=UNSET if arrived is None else arrived,
                load=UNSET if read is None else read,
            )
        return health

    @property
    def alive(self) -> bool:
        """False if only a restart may help: the device thread is dead, or has been in one step for
        longer than `step_timeout`."""
        return self.pool.failure is None and not self.pool.stalled

    async def full_health(self) -> Health:
        """The health, with the state of each model and of the memory. Those are left out if the
        device thread is dead or does not answer in time."""
        brief = self.brief_health()  # before the wait, in which a stall may end
        report, engine = None, EngineState(stalled_seconds=self.pool.stalled)
        with contextlib.suppress(ServeError), anyio.move_on_after(_REPORT_SECONDS):
            report = await self.pool.engine.report()
        if report is None:
            return replace(brief, engine=engine)
        models, memory = model_states(self.pool, report)
        return replace(brief, engine=engine, models=models, memory=memory)

    async def preload(self) -> None:
        """Load the default model and those that `--preload` names, then attach SAEs and
        activate profiles. A failure is logged; the next request tries again to load its model."""
        self._starting = True
        try:
            await self._preload(None)
        finally:
            self._starting = False
        for name in self.settings.preload:
            await self._preload(name)
        await self.saes.begin()
        await self.profiles.activate_all(self.settings.profile)

    async def _preload(self, name: str | None) -> None:
        with contextlib.suppress(ServeError):
            await self.pool.preload(await self.pool.catalogue.find(name))

    async def drain(self) -> None:
        """Refuse new requests, and give running ones `shutdown_grace` seconds to finish; then end
        them with an error. Cancelling it skips the rest of that time."""
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
        """End the requests that are left, and leave the device thread."""
        self._draining = True
        self._end_all()
        await self.saes.shut_down()
        await self.pool.shut_down()

    def _end_all(self) -> None:
        self._pulls.stop_all()
        for reply in list(self._replies):
            reply.fail(ShuttingDown("the server is shutting down"))
        for work in self._work:
            work.end(ShuttingDown("the server is shutting down"))


_REPORT_SECONDS = 2.0
_FAREWELL_SECONDS = 2.0  # in which the last frames reach clients that read them
