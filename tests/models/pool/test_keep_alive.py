"""A model stays loaded after a request for as long as the request says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from time import monotonic

from mlxsrv.engine.plans import LoadSlice
from mlxsrv.models.pool.lease import Lease
from mlxsrv.models.pool.pool import Pool
from tests.support.device import gate
from tests.support.pools import Log, entry, folder, loaded, log, opened, run, until, use

__all__ = ["folder", "log"]


@asynccontextmanager
async def using(pool: Pool, name: str, keep_alive: float | None) -> AsyncIterator[Lease]:
    """A lease that has entered, and says how long the model stays after it."""
    lease = pool.lease(entry(pool, name))
    lease.keep_alive = keep_alive
    try:
        await lease.enter()
        yield lease
    finally:
        lease.release()


async def keep(pool: Pool, name: str, keep_alive: float | None) -> None:
    async with using(pool, name, keep_alive):
        pass


def seconds_left(pool: Pool, name: str) -> float | None:
    model = pool.model(name)
    assert model is not None
    return pool.seconds_left(model)


def assert_left(pool: Pool, seconds: float, begun: float) -> None:
    """Model `a` goes so many seconds after a moment between `begun` and now."""
    left = seconds_left(pool, "a")
    assert left is not None
    assert seconds - (monotonic() - begun) <= left + 1e-6
    assert left <= seconds


def test_a_model_that_is_kept_for_no_time_goes_at_once(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            await keep(pool, "a", 0)
            await until(lambda: loaded(pool) == set(), "a goes")
            await use(pool, "a")
            await asyncio.sleep(0.05)
            assert loaded(pool) == {"a"}, "what was said is forgotten with the model"

    run(test)


def test_a_model_in_use_goes_when_its_last_user_leaves(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            async with using(pool, "a", None):
                await keep(pool, "a", 0)
                await asyncio.sleep(0.05)
                assert loaded(pool) == {"a"}
            await until(lambda: loaded(pool) == set(), "a goes")

    run(test)


def test_a_time_counts_from_the_end_of_the_last_request(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder, idle_timeout=1000) as pool:
            await use(pool, "a")
            begun = monotonic()
            await use(pool, "a")
            assert_left(pool, 1000, begun)
            begun = monotonic()
            await keep(pool, "a", 300)
            assert_left(pool, 300, begun)
            begun = monotonic()
            await use(pool, "a")
            assert_left(pool, 300, begun)  # it stays as it was said
            await keep(pool, "a", 0.05)
            await until(lambda: loaded(pool) == set(), "a goes")

    run(test)


def test_a_model_that_is_kept_for_ever_goes_only_for_another(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder, idle_timeout=0.05, max_models=1) as pool:
            await keep(pool, "a", inf)
            assert seconds_left(pool, "a") is None
            await asyncio.sleep(0.15)
            assert log.moves == ["+a"]
            await keep(pool, "b", inf)
            assert log.moves == ["+a", "-a", "+b"]

    run(test)


def test_a_request_that_did_not_enter_changes_nothing(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            await use(pool, "a")
            lease = pool.lease(entry(pool, "a"))
            lease.keep_alive = 0
            await lease.tokenizer()
            lease.release()
            await use(pool, "a")
            await asyncio.sleep(0.05)
            assert loaded(pool) == {"a"}

    run(test)


def test_a_pinned_model_stays_whatever_a_request_says(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder, pin=("a",)) as pool:
            await keep(pool, "a", 0)
            pool.unload("a")
            await asyncio.sleep(0.05)
            assert loaded(pool) == {"a"}
            assert seconds_left(pool, "a") is None

    run(test)


def test_unloading_is_done_at_once_or_after_the_last_user(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            pool.unload("a")
            await use(pool, "a", "b")
            pool.unload("a")
            assert loaded(pool) == {"b"}
            async with using(pool, "b", None):
                pool.unload("b")
                assert loaded(pool) == {"b"}
            await until(lambda: loaded(pool) == set(), "b goes")
            assert log.moves == ["+a", "+b", "-a", "-b"]
            pool.unload("b")

    run(test)


def test_a_model_that_loads_is_unloaded_after_who_waits_for_it(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            with gate(LoadSlice) as held:
                waiting = asyncio.create_task(use(pool, "a"))
                await held.reached()
                pool.unload("a")
                assert log.moves == []
            await waiting
            await until(lambda: log.moves == ["+a", "-a"], "a goes")

    run(test)


def test_a_request_that_comes_in_time_keeps_the_model(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            await asyncio.gather(*(keep(pool, "a", 0) for _ in range(5)))
            await keep(pool, "a", 0)
            await until(lambda: loaded(pool) == set(), "a goes")
            assert log.moves[:1] == ["+a"]
            assert log.moves.count("+a") == log.moves.count("-a")

    run(test)


def test_the_wait_for_a_load_is_measured(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            with gate(LoadSlice) as held:
                first = pool.lease(entry(pool, "a"))
                entering = asyncio.create_task(first.enter())
                await held.reached()
                begun = monotonic()
                await asyncio.sleep(0.05)
                waited = monotonic() - begun
            await entering
            assert first.load_seconds >= waited
            begun = monotonic()
            async with using(pool, "a", None) as second:
                assert second.load_seconds <= monotonic() - begun
            first.release()

    run(test)
