"""The pool with the real device thread and real models: each of its rules alone, then all at once.

test_pool_races.py plays every order of events, and tests/web/test_models.py looks at it as clients
do.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxsrv.engine.plans import LoadSlice
from mlxsrv.errors import InsufficientMemory, ModelNotLoaded, Overloaded, ShuttingDown
from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.model import LoadState
from mlxsrv.models.pool.pool import Pool
from tests.support.device import gate
from tests.support.pools import (
    PATIENCE,
    Fields,
    Log,
    ask,
    entry,
    folder,
    loaded,
    log,
    opened,
    queued,
    run,
    size,
    until,
    use,
    using,
)

__all__ = ["folder", "log"]


# Loading.


def test_a_model_is_loaded_once_for_all_who_wait(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            await asyncio.gather(*(ask(pool, "a") for _ in range(8)))
            await use(pool, "a")
            assert log.moves == ["+a"]

    run(test)


def test_those_who_wait_for_a_load_enter_in_their_order(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            entered: list[int] = []

            async def enter(number: int) -> None:
                async with using(pool, "a"):
                    entered.append(number)

            await asyncio.gather(*(enter(number) for number in range(8)))
            assert entered == [*range(8)]

    run(test)


def test_the_first_who_waits_may_leave_and_the_others_still_get_it(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            with gate(LoadSlice) as held:
                first = ask(pool, "a")
                await held.reached()
                others = [ask(pool, "a") for _ in range(3)]
                await asyncio.sleep(0)
                first.cancel()
                held.open()
                await asyncio.gather(*others)
            assert first.cancelled()
            assert log.moves == ["+a"]

    run(test)


def test_a_load_that_all_have_left_is_there_for_the_next(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            with gate(LoadSlice) as held:
                only = ask(pool, "a")
                await held.reached()
                only.cancel()
                await asyncio.wait([only])
                assert only.cancelled()
            await use(pool, "a")
            assert log.moves == ["+a"]

    run(test)


def test_a_model_that_nobody_wants_any_more_is_not_loaded(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            async with using(pool, "a"):
                other = ask(pool, "b")
                await queued(pool, "b")
                other.cancel()
                await queued(pool)
            await use(pool, "a")
            assert log.moves == ["+a"]
            assert [model.name for model in pool] == ["a"]

    run(test)


def test_the_tokenizer_of_a_model_comes_without_it(folder: Path, log: Log) -> None:
    """So a prompt that does not fit costs no load, and nobody else's model."""

    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            await use(pool, "a")
            lease = pool.lease(entry(pool, "b"))
            tokenizer = await lease.tokenizer()
            assert await lease.run_in_worker(tokenizer.encode, "a prompt")
            assert lease.context_length == 4096
            lease.release()
            assert log.moves == ["+a"]
            assert [model.name for model in pool] == ["a"]

    run(test)


def test_the_servers_own_leases_are_no_requests(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            server = asyncio.create_task(pool.preload(entry(pool, "a")))
            lease = pool.lease(entry(pool, "a"), Client("one"))
            entering = asyncio.create_task(lease.enter())
            await asyncio.sleep(0)
            model = lease.model
            assert (model.leases, model.requests, model.waiting_for_load) == (2, 1, 1)
            await entering
            assert model.waiting_for_load == 0
            lease.release()
            await server
            assert (model.leases, model.requests) == (0, 0)

    run(test)


def test_a_full_queue_is_refused_at_once(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder, max_concurrency=1, max_queue=1) as pool:
            client = Client("one")
            leases = [pool.lease(entry(pool, "a"), client) for _ in range(2)]
            with pytest.raises(Overloaded, match="a has 2 requests"):
                pool.lease(entry(pool, "a"), client)
            pool.lease(entry(pool, "b"), client).release()
            leases[0].release()
            leases[0].release()  # no second time
            await use(pool, "a")
            leases[1].release()

    run(test)


# Eviction.


@pytest.mark.slow
def test_the_least_recently_used_goes_first_and_a_pinned_model_never(
    folder: Path, log: Log
) -> None:
    async def test() -> None:
        async with opened(folder, max_models=2) as pool:
            await use(pool, "a", "b", "a", "c", "b")
            assert log.moves == ["+a", "+b", "-b", "+c", "-a", "+b"]
        log.lines.clear()
        async with opened(folder, max_models=2, pin=("a",)) as pool:
            await use(pool, "a", "b", "c", "b")
            assert log.moves == ["+a", "+b", "-b", "+c", "-c", "+b"]
            assert [line["reason"] for line in log.of("model unloaded")] == [
                "room for c",
                "room for b",
            ]

    run(test)


@pytest.mark.slow
def test_memory_limits_as_the_number_of_models_does(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            one = await size(pool)
        log.lines.clear()
        async with opened(folder, memory_limit=2 * one) as pool:
            await use(pool, "a", "b", "c")
            assert log.moves == ["+a", "+b", "-a", "+c"]

    run(test)


@pytest.mark.slow
def test_an_idle_model_goes_after_its_time_and_comes_again(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder, idle_timeout=0.05, pin=("b",)) as pool:
            await use(pool, "b", "a")
            await until(lambda: loaded(pool) == {"b"}, "a goes")
            assert [line["reason"] for line in log.of("model unloaded")] == ["idle"]
            async with using(pool, "a"):
                await asyncio.sleep(0.15)
                assert loaded(pool) == {"a", "b"}, "a model in use is not idle"
            await until(lambda: loaded(pool) == {"b"}, "a goes again")
            await use(pool, "b")
            assert log.moves == ["+b", "+a", "-a", "+a", "-a"]

    run(test)


def test_what_is_unloaded_gives_its_memory_back(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            await use(pool, "a")
            before = await pool.engine.report()
            for _ in range(3):
                await use(pool, "b", "a")
            after = await pool.engine.report()
            assert after.models.keys() == {"a"}
            weights = (model := pool.model("a")) and model.loaded and model.loaded.bytes
            assert weights
            assert after.active_bytes < before.active_bytes + weights / 2

    run(test)


# Turns.


def test_a_swap_waits_for_the_last_user_and_whoever_comes_later_waits_behind_it(
    folder: Path, log: Log
) -> None:
    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            async with using(pool, "a") as lease:
                async with using(pool, "a"):
                    other = ask(pool, "b")
                    await queued(pool, "b")
                    later = ask(pool, "a")
                    await queued(pool, "b", "a")
                assert lease.model.users == 1
                assert lease.model.state is LoadState.CLOSING
                assert log.moves == ["+a"], "there is still one user"
                assert not later.done()
            await asyncio.gather(other, later)
            assert log.moves == ["+a", "-a", "+b", "-b", "+a"]
            first, second = log.of("models switched")
            assert (first["model"], first["evicted"]) == ("b", "a")
            assert (second["model"], second["evicted"]) == ("a", "b")
            assert 0 < first["waited"] < first["seconds"] < PATIENCE

    run(test)


@pytest.mark.slow
def test_neither_of_two_models_starves_the_other(folder: Path, log: Log) -> None:
    """There is always a request for each, yet both are answered."""
    answered: Counter[str] = Counter()

    async def go_on(pool: Pool, name: str) -> None:
        while min(answered["a"], answered["b"]) < 5:
            async with using(pool, name):
                await asyncio.sleep(0.005)
            answered[name] += 1

    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            await asyncio.gather(*(go_on(pool, name) for name in "abab"))

    run(test)


def test_one_who_stops_waiting_for_room_opens_the_others_model_at_once(
    folder: Path, log: Log
) -> None:
    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            async with using(pool, "a") as lease:
                other = ask(pool, "b")
                await queued(pool, "b")
                later = ask(pool, "a")
                await queued(pool, "b", "a")
                other.cancel()
                await later
                assert lease.model.users == 1, "the first is still there"
            assert log.moves == ["+a"]

    run(test)


def test_a_lease_that_ends_while_it_waits_leaves_nothing(folder: Path, log: Log) -> None:
    """A deadline ends it in this way, while its task still waits."""

    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            async with using(pool, "a"):
                late = pool.lease(entry(pool, "b"))
                waits = asyncio.create_task(late.enter())
                await queued(pool, "b")
                later = ask(pool, "a")
                late.release()
                await later
                with pytest.raises(Exception, match="its lease has ended"):
                    await waits
                with pytest.raises(Exception, match="its lease has ended"):
                    await late.enter()
            assert log.moves == ["+a"]

    run(test)


def test_with_room_for_both_nobody_waits_for_the_other(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder, max_models=2) as pool, using(pool, "a"), using(pool, "b"):
            await use(pool, "a", "b")
            assert log.moves == ["+a", "+b"]
            assert log.of("models switched") == []

    run(test)


# Failures.


def test_a_failed_load_tells_all_who_wait_and_leaves_the_pool_as_it_was(
    folder: Path, log: Log, tmp_path: Path
) -> None:
    copies = Path(shutil.copytree(folder, tmp_path / "models"))

    async def test() -> None:
        async with opened(copies, max_models=1) as pool:
            await use(pool, "a")
            told = await asyncio.gather(
                *(ask(pool, "broken") for _ in range(3)), return_exceptions=True
            )
            for error in told:
                assert isinstance(error, ModelNotLoaded)
                assert "cannot load broken" in error.message
                assert "layers.2." in error.message, "the reason"
            await until(lambda: loaded(pool) == {"a"}, "what went for it is back")
            await use(pool, "a")
            assert log.moves == ["+a", "-a", "+a"]
            assert log.models("load failed") == ["broken"]

            shutil.copy(copies / "a" / "config.json", copies / "broken")
            await use(pool, "broken")
            assert log.moves[3:] == ["-a", "+broken"]

    run(test)


def test_bad_files_are_told_as_bad_weights_are(folder: Path, log: Log, tmp_path: Path) -> None:
    copies = Path(shutil.copytree(folder, tmp_path / "models"))
    (copies / "b" / "config.json").write_text("{}")

    async def test() -> None:
        async with opened(copies, max_models=1) as pool:
            await use(pool, "a")
            lease = pool.lease(entry(pool, "b"))
            for wait in (lease.tokenizer, lease.enter):
                with pytest.raises(ModelNotLoaded, match="cannot load b: "):
                    await wait()
            lease.release()
            assert log.moves == ["+a"], "nothing had to go for that"

    run(test)


def test_a_model_that_can_never_fit_is_refused_with_the_numbers(folder: Path, log: Log) -> None:
    async def test() -> None:
        async with opened(folder) as pool:
            one = await size(pool)
        async with opened(folder, memory_limit=one - 1) as pool:
            with pytest.raises(InsufficientMemory, match=f"a needs {one} bytes.* {one - 1} "):
                await use(pool, "a")
        log.lines.clear()
        async with opened(folder, memory_limit=2 * one - 1, pin=("a",)) as pool:
            async with using(pool, "a"):
                with pytest.raises(InsufficientMemory, match=f"pinned models take {one} "):
                    await use(pool, "b")
                await use(pool, "a")
            assert log.moves == ["+a"]
        async with opened(folder, max_models=1, pin=("a",)) as pool:
            await use(pool, "a")
            with pytest.raises(InsufficientMemory, match=r"all 1 models .* are pinned"):
                await use(pool, "b")
            await use(pool, "a")

    run(test)


def test_after_its_end_a_pool_refuses_and_those_who_waited_do_not_wait_on(folder: Path) -> None:
    async def test() -> None:
        async with opened(folder, max_models=1) as pool:
            await use(pool, "a")
            await pool.shut_down()
            lease = pool.lease(entry(pool, "b"))
            with pytest.raises(ShuttingDown):
                await lease.tokenizer()
            with pytest.raises(ShuttingDown):
                await lease.enter()
            lease.release()

    run(test)


def test_who_leaves_after_the_end_of_a_pool_starts_no_idle_time(folder: Path, log: Log) -> None:
    async def test() -> None:
        wrong: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
        async with opened(folder, idle_timeout=0.01) as pool, using(pool, "a"):
            await pool.shut_down()
        await asyncio.sleep(0.1)
        assert wrong == []
        assert [line["reason"] for line in log.of("model unloaded")] == ["shutdown"]

    run(test)


# All at once.


@pytest.mark.parametrize("options", [{"max_models": 1}, {"max_models": 2, "pin": ("a",)}], ids=str)
@pytest.mark.slow
def test_requests_come_and_go_in_any_order(folder: Path, options: Fields) -> None:
    """As in test_pool_races.py, with real loads: fewer, but nothing is played."""
    dice = random.Random(str(options))
    ends: Counter[str] = Counter()

    async def request(pool: Pool, name: str, seconds: float) -> None:
        try:
            async with using(pool, name) as lease:
                assert lease.model.loaded is not None
                await asyncio.sleep(seconds)
                assert lease.model.loaded is not None, "it went while it was in use"
        except ModelNotLoaded:
            assert name == "broken"
            ends["failed"] += 1
        except asyncio.CancelledError:
            ends["left"] += 1
        else:
            ends["answered"] += 1

    async def test() -> None:
        async with opened(folder, max_concurrency=2, **options) as pool:
            tasks = []
            for _ in range(80):
                await asyncio.sleep(dice.random() * 0.01)
                name = dice.choice(["a", "a", "b", "b", "c", "broken"])
                tasks.append(asyncio.create_task(request(pool, name, dice.random() * 0.02)))
                if dice.random() < 0.3:
                    dice.choice(tasks[-8:]).cancel()
            tasks.append(leaver := asyncio.create_task(request(pool, "a", PATIENCE)))
            await asyncio.sleep(0)
            leaver.cancel()
            done, hanging = await asyncio.wait(tasks, timeout=2 * PATIENCE)
            assert not hanging
            for task in done - {task for task in done if task.cancelled()}:
                task.result()
            await until(lambda: not any(model.load_task for model in pool), "the last load ends")
            there = (await pool.engine.report()).models.keys()
            assert there == loaded(pool)
            assert len(there) <= options["max_models"]
            await use(pool, "a", "b", "c")

    run(test)
    assert min(ends["answered"], ends["left"], ends["failed"]) > 0
