"""A pool in a world without MLX, in which every order of events can be played."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import anyio.to_thread
import pytest

from mlxsrv.engine.events import Loaded, Report
from mlxsrv.engine.orders import Load
from mlxsrv.errors import ModelNotLoaded, ServeError
from mlxsrv.formats.files import UnusableFile
from mlxsrv.models.catalogue.catalogue import Catalogue
from mlxsrv.models.pool import preparing
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.model import FOLLOWING, LoadState, Model
from mlxsrv.models.pool.model_files import ModelFiles
from mlxsrv.models.pool.pool import Pool
from mlxsrv.settings import Settings

SIZES = {"a": 10, "b": 20, "c": 30, "broken": 10, "unhealthy": 10}
"""Bytes of the models that there are. The last two can never be loaded, one of them because of its
files."""

How = Literal["cancel", "end"]
Move = tuple[LoadState, LoadState]

TABLE = {(state, after) for state, states in FOLLOWING.items() for after in states}


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


# The cast.


class Engine:
    """The device thread's part. `held` are the leases that have entered, by model."""

    ranks = 1
    failure = None
    attached = 0
    budget: int | None = None

    def __init__(self, world: World) -> None:
        self._world = world
        self.loaded: set[str] = set()
        self.loading: set[str] = set()
        self.meeting: set[str] = set()
        self.loads: list[str] = []
        self.rows: dict[str, int] = {}  # bytes, by model
        self.wrong: list[str] = []

    async def memory(self) -> int:
        await self._world.pause()
        return 10**9

    async def import_model_code(self, path: str) -> None:
        self._require(path not in self.meeting, f"{path} is prepared twice")
        self.meeting.add(path)
        await self._world.pause()
        self.meeting.remove(path)

    async def load(self, command: Load, *_: object) -> Loaded:
        name = command.model
        self._require(name not in self.loaded | self.loading, f"{name} is loaded twice")
        self.loading.add(name)
        self.loads.append(name)
        self._check_limits()
        await self._world.pause()
        self.loading.remove(name)
        if self._world.fails(name):
            raise ModelNotLoaded("scripted")
        self.loaded.add(name)
        return Loaded(name, batched=True, cuts=True, bytes=SIZES[name])

    async def report(self) -> Report:
        await self._world.pause()
        taken = {name: {"row_bytes": bytes} for name, bytes in self.rows.items()}
        return Report(0, 0, 0, taken)

    def set_budget(self, bytes: int) -> None:
        self.budget = bytes
        self._check_budget()

    def _check_budget(self) -> None:
        """Check that models, loaded or on their way, fit together with what rows may take."""
        weights = sum(SIZES[name] for name in self.loaded | self.loading) + self.attached
        limit = self._world.settings.memory_limit
        if limit is not None:
            fits = self.budget is not None and self.budget + weights <= limit
            self._require(fits, f"rows may take {self.budget} beside {weights}")

    def unload(self, name: str) -> None:
        self._require(self._world.held[name] == 0, f"{name} is unloaded under a lease")
        self.loaded.remove(name)

    def close(self) -> None:
        self.loaded.clear()

    def _check_limits(self) -> None:
        here, settings = self.loaded | self.loading, self._world.settings
        self._require(len(here) <= (settings.max_models or len(here)), f"{here} are too many")
        size = sum(SIZES[name] for name in here)
        self._require(size <= (settings.memory_limit or size), f"{here} are too large")
        self._check_budget()

    def _require(self, right: bool, what: str) -> None:
        """The pool takes what is raised here for a load's failure; so it is told at the end."""
        if not right:
            self.wrong.append(what)


class World:
    """One pool with its engine, and all that is asked of it."""

    def __init__(
        self, folder: Path, dice: random.Random, *, calm: bool = False, **options: Any
    ) -> None:
        self.dice = dice
        self.calm = calm  # each pause is one turn
        self.failures = 0.0  # how often a load fails that need not
        self.keeps = False  # whether requests say how long their model stays
        self.settings = Settings(
            model=tuple(f"{name}={folder / name}" for name in SIZES),
            hf_cache=False,
            max_concurrency=2,
            **options,
        )
        self.held: Counter[str] = Counter()
        self.requests: list[Request] = []
        self.pool = Pool(Catalogue(self.settings), self.settings)
        self.engine = Engine(self)
        self.pool._engine = self.engine  # type: ignore[assignment]

    async def pause(self) -> None:
        """Some turns of the loop, or some time."""
        if self.calm:
            await turns(3)
        elif self.dice.random() < 0.7:
            await turns(self.dice.randrange(6))
        else:
            await asyncio.sleep(self.dice.random())

    def fails(self, name: str) -> bool:
        return name == "broken" or self.dice.random() < self.failures

    def request(self, name: str, *, refuse: bool = False) -> Request:
        request = Request(self, name, refuse)
        self.requests.append(request)
        return request

    async def finish(self) -> None:
        """Wait until nothing happens any more; then the pool holds what is loaded, and no more."""
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)
        assert self.engine.wrong == []
        state = self.pool.statistics()
        assert state.queue == ()
        assert {model.name for model in self.pool} == self.engine.loaded
        assert state.used == sum(SIZES[name] for name in self.engine.loaded)
        for model in self.pool:
            assert model.state is LoadState.LOADED, f"{model.name} is kept for nobody"
            assert (model.leases, model.users, model.waiting) == (0, 0, 0)
            assert (model.running, model.queued) == (set(), {})
        if self.settings.idle_timeout is not None:
            await asyncio.sleep(2 * self.settings.idle_timeout)
            assert self.engine.loaded <= {*self.settings.pin}
        await self.pool.shut_down()

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(request.outcome for request in self.requests)


class Request:
    """Does what a reply does: it reads the prompt, enters, waits for a row and generates. It may be
    cancelled, as by a client that leaves; or its lease may end while its task goes on, as by a
    deadline."""

    def __init__(self, world: World, name: str, refuse: bool) -> None:
        self._world = world
        self._refuse = refuse
        self._lease: Lease | None = None
        self._holds = False
        self.name = name
        self.task = asyncio.create_task(self._run())

    @property
    def outcome(self) -> str:
        """The way in which it ended. A fault that it does not expect fails the test here."""
        return "cancelled" if self.task.cancelled() else self.task.result()

    async def _run(self) -> str:
        entry = self._world.pool.catalogue.known(self.name)
        assert entry is not None
        try:
            self._lease = self._world.pool.lease(entry)
            if self._world.keeps:
                self._lease.keep_alive = self._world.dice.choice([None, 0.0, 0.1])
            return await self._answer(self._lease)
        except ServeError as error:
            return type(error).__name__
        finally:
            self.end()

    async def _answer(self, lease: Lease) -> str:
        await lease.tokenizer()
        if self._refuse:
            return "refused"
        await self._world.pause()
        await lease.enter()
        if lease.released:
            return "ended"
        self._holds = True
        self._world.held[self.name] += 1
        assert self.name in self._world.engine.loaded
        lease.note_queued(id(self))
        await self._world.pause()
        if not self._holds:
            return "ended"
        lease.note_started(id(self))
        for _ in range(3):
            await self._world.pause()
        return "answered" if self._holds else "ended"

    def leave(self, how: How, *, pauses: int = 0, after: int = 0) -> None:
        """Later: after so many pauses, and so many turns more."""
        self._leaving = asyncio.create_task(self._leave(how, pauses, after))

    async def _leave(self, how: How, pauses: int, after: int) -> None:
        for _ in range(pauses):
            await self._world.pause()
        await turns(after)
        if how == "cancel":
            self.task.cancel()
        else:
            self.end()

    def end(self) -> None:
        if self._holds:
            self._holds = False
            self._world.held[self.name] -= 1
        if self._lease is not None:
            self._lease.note_ended(id(self))
            self._lease.release()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for each model. What would read them in a thread answers on the loop."""

    def examine(source: Any, *_: object) -> ModelFiles:
        path = source.place
        if path.name == "unhealthy":
            raise UnusableFile("scripted")
        size = SIZES[path.name]
        return ModelFiles(
            path,
            None,
            None,
            base=size,
            own=0,
            short_row=0,
            context_length=None,
            writes=True,
            pooling_config="",
            cross_encoder_config="",
        )

    async def run_sync(work: Callable[..., Any], *arguments: Any, **_: Any) -> Any:
        await turns(1)
        return work(*arguments)

    for name in SIZES:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(preparing, "examine", examine)
    tokenizer = SimpleNamespace(thinks=False, make_constraint=None)
    here = cycle([True, False])
    monkeypatch.setattr(preparing, "is_here", lambda *_: next(here))
    monkeypatch.setattr(preparing, "make_tokenizer", lambda *_: tokenizer)
    monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)
    return tmp_path


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Move]]:
    """The changes of state that were asked for. The pool takes one that is not allowed for a load's
    failure; so that is told at the end."""
    asked: set[Move] = set()
    enter = Model.enter

    def note(model: Model, state: LoadState) -> None:
        asked.add((model.state, state))
        enter(model, state)

    monkeypatch.setattr(Model, "enter", note)
    yield asked
    assert asked <= TABLE


async def entered(pool: Pool, name: str) -> Lease:
    lease, waits = begin(pool, name)
    await waits
    return lease


def begin(pool: Pool, name: str) -> tuple[Lease, asyncio.Task[None]]:
    """A lease that is about to enter."""
    entry = pool.catalogue.known(name)
    assert entry is not None
    lease = pool.lease(entry)
    return lease, asyncio.create_task(lease.enter())


def states(pool: Pool) -> dict[str, LoadState]:
    return {model.name: model.state for model in pool}
