"""The pool tells the device thread how much memory rows may take: the real thread, real models.

test_pool_races.py checks with every load that rows never may have what weights take.
"""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path

import msgspec
import pytest

from mlxsrv.errors import InsufficientMemory
from mlxsrv.models.pool.attachments import Attachments
from mlxsrv.models.pool.model import LoadState
from mlxsrv.models.pool.pool import Pool
from tests.support.jumping_clock import run as play_out
from tests.support.pool_worlds import World, entered, states, turns
from tests.support.pool_worlds import folder as places
from tests.support.pools import (
    Log,
    attach,
    entry,
    folder,
    loaded,
    log,
    opened,
    run,
    sae,
    size,
    use,
    using,
)

__all__ = ["folder", "log", "places", "sae"]  # fixtures

ROOM = 2 * 10**6


async def weights(pool: Pool) -> int:
    """Bytes of one of the models, which are all of one size."""
    async with using(pool, "a") as lease:
        assert lease.model.loaded is not None
        return lease.model.loaded.bytes


async def told(pool: Pool) -> int | None:
    """The budget that the device thread has been told."""
    return (await pool.engine.report()).budget


def short(pool: Pool, bytes: int) -> None:
    """Lack bytes, as the device thread does when rows do not fit."""
    assert pool.engine.memory_short is not None
    pool.engine.memory_short(bytes)


def test_what_weights_leave_is_for_rows(folder: Path, log: Log, sae: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            one = await weights(pool)
        log.lines.clear()
        limit = 2 * one + ROOM
        async with opened(folder, memory_limit=limit) as pool:
            await use(pool, "a")
            assert await told(pool) == one + ROOM == pool.statistics().left
            await use(pool, "b")
            assert await told(pool) == ROOM
            saes = Attachments(pool)
            attached = await attach(saes, pool, "b", sae)
            assert await told(pool) == ROOM - attached.bytes
            saes.detach("b")
            assert await told(pool) == ROOM
            pool.unload("a")
            assert await told(pool) == one + ROOM
            lefts = [line["left"] for line in log.of("memory divided")]
            assert lefts == [one + ROOM, ROOM, ROOM - attached.bytes, ROOM, one + ROOM]
            assert {line["limit"] for line in log.of("memory divided")} == {limit}

    run(test)


def test_a_load_that_fails_leaves_what_it_would_have_taken(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder, memory_limit=10 * ROOM) as pool:
            await use(pool, "a")
            before = await told(pool)
            with pytest.raises(Exception, match="cannot load broken"):
                await use(pool, "broken")
            assert await told(pool) == before

    run(test)


def test_idle_models_go_for_rows_the_least_recently_used_first(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder, memory_limit=20 * ROOM) as pool:
            one = await weights(pool)
            await use(pool, "c", "b", "a")
            log.lines.clear()
            async with using(pool, "a"):
                short(pool, one - 1)
                assert loaded(pool) == {"a", "b"}
                assert await told(pool) == 20 * ROOM - 2 * one
                short(pool, 10**9)
                assert loaded(pool) == {"a"}
                assert await told(pool) == 20 * ROOM - one
            assert log.moves == ["-c", "-b"]
            assert {line["reason"] for line in log.of("model unloaded")} == {"room for requests"}

    run(test)


def test_who_lacks_memory_is_answered_also_if_there_is_no_more(
    folder: Path, sae: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may go here: a model is pinned, one has an SAE, and one has been asked for."""

    async def test() -> None:
        async with opened(folder, memory_limit=20 * ROOM, pin=("a",)) as pool:
            sent: list[int] = []
            await use(pool, "a", "c")
            saes = Attachments(pool)
            await attach(saes, pool, "b", sae)
            lease = pool.lease(entry(pool, "c"))
            with monkeypatch.context() as patch:
                patch.setattr(pool.engine, "set_budget", sent.append)
                short(pool, 10**9)
            assert sent == [await told(pool)]
            assert loaded(pool) == {"a", "b", "c"}
            lease.release()
            saes.detach("b")

    run(test)


def test_a_model_that_leaves_no_room_for_a_row_is_unloaded_again(folder: Path, log: Log) -> None:
    """Where its files tell nothing of its KV cache, that is known only when it is there."""

    async def test() -> None:
        async with opened(folder) as pool:
            one = await weights(pool)
            row = await size(pool) - one
        log.lines.clear()
        async with opened(folder, memory_limit=one + row - 1) as pool:
            lease = pool.lease(entry(pool, "a"))
            await lease.tokenizer()
            files = lease.model.files
            assert files is not None
            assert lease.model.tokenizer is not None
            untold = msgspec.structs.replace(files, short_row=0)
            lease.model.files = untold
            with pytest.raises(InsufficientMemory, match=f"a needs {row} bytes for a row of 256"):
                await lease.enter()
            lease.release()
            assert loaded(pool) == set()
            assert await told(pool) == one + row - 1
            assert (await pool.engine.report()).models == {}

    run(test)


# Where the device thread is played.


def test_a_load_that_would_take_memory_of_running_rows_waits_for_them(places: Path) -> None:
    """Weights alone would fit. Who comes later waits behind it, and nothing is unloaded."""

    async def play(rows: int) -> list[str]:
        world = World(places, random.Random(0), calm=True, memory_limit=50, pin=("a",))
        world.engine.rows = {"a": rows}
        used = await entered(world.pool, "a")
        new, later = world.request("b"), None
        await turns(50)
        if not new.task.done():
            assert states(world.pool) == {"a": LoadState.CLOSING, "b": LoadState.WAITING}
            later = world.request("a")
            await turns(50)
            assert not later.task.done()
        before = [*world.engine.loads]
        used.release()
        world.engine.rows = {}
        await world.finish()
        assert new.outcome == "answered"
        assert later is None or later.outcome == "answered"
        assert world.engine.loads == ["a", "b"]
        return before

    assert play_out(partial(play, 20)) == ["a", "b"]
    assert play_out(partial(play, 21)) == ["a"], "a and b leave 20"
