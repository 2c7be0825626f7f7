"""The pool under every order of events: thousands of runs on a loop whose clock only jumps.

The device thread is played by a engine that answers after random turns, fails at random, and fails
the test if it is told what must not be: to unload a model in use, or to hold more than the limits
allow. Nothing else happens outside the loop, so a seed always gives the same run, and a run in
which somebody waits for nothing ends at once.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.models.pool.model import LoadState
from tests.support.effort import often
from tests.support.jumping_clock import run
from tests.support.pool_worlds import (
    SIZES,
    TABLE,
    How,
    Move,
    World,
    begin,
    entered,
    folder,
    moves,
    states,
    turns,
)

__all__ = ["folder", "moves"]


# The play.


@pytest.mark.parametrize(
    "options",
    [
        {"max_models": 1},
        {"max_models": 2},
        {"max_models": 2, "pin": ("a",)},
        {"memory_limit": 50},
        {"memory_limit": 45, "max_models": 2, "idle_timeout": 1.5},
        {"memory_limit": 35, "pin": ("a",), "idle_timeout": 0.5},
        {"max_models": 1, "max_queue": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("seeds", often([40, 400], [40]))
@pytest.mark.slow
def test_every_request_is_answered_and_no_model_goes_from_under_one(
    folder: Path, options: dict[str, Any], seeds: int
) -> None:
    outcomes: Counter[str] = Counter()

    async def play() -> None:
        world = World(folder, dice, calm=dice.random() < 0.3, **options)
        world.failures = dice.choice([0.0, 0.1, 0.5])
        world.keeps = dice.random() < 0.5
        names = dice.sample(list(SIZES), dice.randint(2, len(SIZES)))
        for _ in range(dice.randint(3, 40)):
            await world.pause()
            world.engine.rows = {name: dice.randrange(20) for name in "abc"}
            if world.keeps and dice.random() < 0.2:
                world.pool.unload(dice.choice(names))
            request = world.request(dice.choice(names), refuse=dice.random() < 0.1)
            if dice.random() < 0.4:
                how: How = "cancel" if dice.random() < 0.7 else "end"
                request.leave(how, pauses=dice.randrange(8), after=dice.randrange(4))
        await world.finish()
        outcomes.update(world.outcomes)

    for seed in range(seeds):
        dice = random.Random(f"{options} {seed}")
        run(play)
    assert outcomes["answered"] > seeds * 3
    assert min(outcomes[end] for end in ("cancelled", "ended", "refused", "ModelNotLoaded")) > 0


@pytest.mark.parametrize("how", ["cancel", "end"])
@pytest.mark.slow
def test_a_request_may_leave_at_any_turn(folder: Path, how: How) -> None:
    """One room and five requests; one of them leaves, each of them, at every turn there is."""

    async def play(who: int, turn: int) -> str:
        world = World(folder, random.Random(0), calm=True, max_models=1)
        for number, name in enumerate(("a", "b", "a", "broken", "c")):
            request = world.request(name)
            if number == who:
                request.leave(how, after=turn)
            await turns(3)
        await world.finish()
        for number, request in enumerate(world.requests):
            if number != who:
                ends = "ModelNotLoaded" if request.name == "broken" else "answered"
                assert request.outcome == ends
        return world.requests[who].outcome

    for who in range(5):
        turn = 0
        while run(partial(play, who, turn)) not in ("answered", "ModelNotLoaded"):
            turn += 1
        assert turn > 20


def test_what_goes_for_a_load_that_fails_comes_back(folder: Path) -> None:
    async def play() -> None:
        world = World(folder, random.Random(0), max_models=1)
        await world.request("a").task
        await world.request("broken").task
        assert not world.engine.loaded
        await world.finish()
        assert world.engine.loads == ["a", "broken", "a"]

    run(play)


def test_what_comes_back_takes_no_room_from_others(folder: Path) -> None:
    async def play() -> None:
        world = World(folder, random.Random(0), calm=True, max_models=1)
        await world.request("a").task
        broken, other = world.request("broken"), world.request("b")
        await world.finish()
        assert (broken.outcome, other.outcome) == ("ModelNotLoaded", "answered")
        assert world.engine.loads == ["a", "broken", "b"]

    run(play)


def test_a_request_may_come_just_when_the_last_one_has_left(folder: Path) -> None:
    """Its load has been refused the room by then, and does not know it yet."""

    async def play() -> None:
        world = World(folder, random.Random(0), calm=True, max_models=1)
        used = await entered(world.pool, "a")
        first, waits = begin(world.pool, "b")
        await turns(50)
        assert states(world.pool)["b"] is LoadState.WAITING
        second, enters = begin(world.pool, "b")
        first.release()
        assert states(world.pool)["b"] is LoadState.UNUSED
        used.release()
        await enters
        second.release()
        await asyncio.gather(waits, return_exceptions=True)
        await world.finish()

    run(play)


def test_every_change_of_state_happens_and_no_other(folder: Path, moves: set[Move]) -> None:
    """So the table says neither too little nor too much."""

    async def play() -> None:
        world = World(folder, dice, calm=dice.random() < 0.3, max_models=2, idle_timeout=0.3)
        world.failures = 0.2
        for _ in range(30):
            await world.pause()
            request = world.request(dice.choice(list(SIZES)))
            if dice.random() < 0.4:
                request.leave("cancel", pauses=dice.randrange(8))
        await world.finish()

    async def reopen() -> None:
        """A model goes that was closing, has been reopened, and is still in the queue."""
        world = World(folder, random.Random(0), calm=True, memory_limit=30)
        pool = world.pool
        used = [await entered(pool, name) for name in ("b", "a")]
        large = begin(pool, "c")
        await turns(50)
        small = begin(pool, "broken")
        await turns(50)
        again = begin(pool, "a")
        await turns(50)
        assert pool.statistics().queue == ("c", "broken", "a")
        large[0].release()
        assert pool.statistics().queue == ("broken", "a")
        assert states(pool)["a"] is LoadState.LOADED
        again[0].release()
        used[1].release()
        assert pool.statistics().queue == ()
        for lease in (used[0], small[0]):
            lease.release()
        await asyncio.gather(large[1], small[1], again[1], return_exceptions=True)
        await world.finish()

    for seed in range(20):
        dice = random.Random(seed)
        run(play)
    run(reopen)
    assert moves == TABLE
