"""The pool under every order of events, as in test_pool_races, where SAEs come and go as well; and
the end of a pool in the middle of it all."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxsrv.engine.events import Attached
from mlxsrv.engine.orders import Attach
from mlxsrv.errors import SAEIncompatible, SAENotAttached, ServeError, ShuttingDown
from mlxsrv.models.pool.attachments import Attachments
from tests.support.effort import often
from tests.support.jumping_clock import run
from tests.support.pool_worlds import Engine, How, World, begin, folder, moves, turns

__all__ = ["folder", "moves"]  # fixtures

SAE_BYTES = 5


class SAEEngine(Engine):
    """Attaches, too. An SAE on a model that is not loaded fails the test."""

    async def attach(self, order: Attach) -> Attached:
        self._require(order.model in self.loaded, f"{order.model} gets an SAE and is not loaded")
        self.attached += SAE_BYTES
        self._check_budget()
        await self._world.pause()
        self._require(order.model in self.loaded, f"{order.model} is unloaded under its SAE")
        if self._world.dice.random() < 0.3:
            self.attached -= SAE_BYTES
            raise SAEIncompatible("scripted")
        return Attached(order.number, SAE_BYTES)

    def detach(self, name: str) -> None:
        self._require(name in self.loaded, f"{name} loses its SAE and is not loaded")
        self.attached -= SAE_BYTES


class SAEWorld(World):
    def __init__(self, folder: Path, dice: random.Random, **options: Any) -> None:
        super().__init__(folder, dice, **options)
        self.engine: SAEEngine = SAEEngine(self)
        self.pool._engine = self.engine  # type: ignore[assignment]
        self.saes = Attachments(self.pool)
        self.ends: Counter[str] = Counter()
        self.attaching: list[asyncio.Task[None]] = []

    async def _attach(self, name: str) -> None:
        entry = self.pool.catalogue.known(name)
        assert entry is not None
        file: Any = SimpleNamespace(bytes=SAE_BYTES)
        try:
            await self.saes.attach(entry, "s", Path("s"), file, 1, False)
        except ServeError as error:
            self.ends[type(error).__name__] += 1
        else:
            self.ends["attached"] += 1

    def detach(self, name: str) -> None:
        try:
            self.saes.detach(name)
        except SAENotAttached:
            return
        self.ends["detached"] += 1

    async def play(self) -> None:
        """Requests, attachments and detachments, some of which are given up."""
        dice = self.dice
        names = dice.sample(["a", "b", "c", "broken", "unhealthy"], dice.randint(2, 5))
        for _ in range(dice.randint(3, 40)):
            await self.pause()
            name, what = dice.choice(names), dice.random()
            if what < 0.15:
                self.attaching.append(asyncio.create_task(self._attach(name)))
                if dice.random() < 0.2:
                    await turns(dice.randrange(5))
                    self.attaching[-1].cancel()
            elif what < 0.3:
                self.detach(name)
            else:
                request = self.request(name, refuse=dice.random() < 0.1)
                if dice.random() < 0.4:
                    how: How = "cancel" if dice.random() < 0.7 else "end"
                    request.leave(how, pauses=dice.randrange(8), after=dice.randrange(4))


OPTIONS: list[dict[str, Any]] = [
    {"max_models": 1},
    {"max_models": 2, "pin": ("a",)},
    {"memory_limit": 50, "idle_timeout": 1.5},
    {"memory_limit": 70, "max_models": 2, "idle_timeout": 0.2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seeds", often([20, 200], [20]))
@pytest.mark.slow
def test_no_model_goes_from_under_its_sae(
    folder: Path, options: dict[str, Any], seeds: int
) -> None:
    ends: Counter[str] = Counter()

    async def play() -> None:
        world = SAEWorld(folder, dice, calm=dice.random() < 0.3, **options)
        world.failures = dice.choice([0.0, 0.1, 0.5])
        await world.play()
        await settle()
        used = sum(SAE_BYTES for _ in world.pool.attachments)
        assert world.engine.attached == used
        for name in [*world.pool.attachments]:
            world.detach(name)
        await world.finish()
        assert all(task.cancelled() or task.exception() is None for task in world.attaching)
        ends.update(world.ends)

    for seed in range(seeds):
        dice = random.Random(f"{options} {seed}")
        run(play)
    assert min(ends[end] for end in ("attached", "detached", "SAEAttached", "SAEIncompatible")) > 0


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seeds", often([20, 100], [20]))
@pytest.mark.slow
def test_a_pool_may_end_at_any_moment(folder: Path, options: dict[str, Any], seeds: int) -> None:
    """Whoever waits for a model, or for an SAE, then does not wait on; and nothing comes later."""
    ends: Counter[str] = Counter()

    async def play() -> None:
        world = SAEWorld(folder, dice, calm=dice.random() < 0.3, **options)
        await world.play()
        await turns(dice.randrange(10))
        await world.pool.shut_down()
        await settle()
        await asyncio.sleep(10)  # no timer is left
        for model in world.pool:
            assert (model.leases, model.users, model.waiting) == (0, 0, 0)
        ends.update(world.ends)
        ends.update(world.outcomes)

    for seed in range(seeds):
        dice = random.Random(f"{options} {seed}")
        run(play)
    assert ends["ShuttingDown"] > 0


def test_a_request_that_is_let_in_just_before_the_end_does_not_begin(folder: Path) -> None:
    """Its ticket has entered by then, and its task has yet to run."""

    async def play() -> None:
        pool = World(folder, random.Random(0), calm=True).pool
        lease, waits = begin(pool, "a")
        while lease.model.users == 0:
            await turns(1)
        assert not waits.done()
        await pool.shut_down()
        with pytest.raises(ShuttingDown):
            await waits
        lease.release()
        assert (lease.model.leases, lease.model.users) == (0, 0)

    run(play)


async def settle() -> None:
    """Wait until nothing happens any more."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
