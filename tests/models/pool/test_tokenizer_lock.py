"""The tokenizer's lock: one thread at a time, and no short text waits for all of a long one."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from mlxsrv.models.pool.tokenizer_lock import TokenizerLock
from mlxsrv.prompts.encoding import PIECE_CHARACTERS

PATIENCE = 10.0


def test_who_takes_long_lets_others_in_between_two_pieces() -> None:
    inside, most = 0, 0

    async def main() -> list[str]:
        lock, done = TokenizerLock(), []
        begun, enough = threading.Event(), threading.Event()

        def piece() -> None:
            nonlocal inside, most
            inside += 1
            most = max(most, inside)
            begun.set()
            threading.Event().wait(0.005)
            inside -= 1

        def endless(name: str) -> None:
            while not enough.is_set():
                piece()
                lock.pause()
            done.append(name)

        def short(name: str) -> None:
            piece()
            done.append(name)

        async with anyio.create_task_group() as group:
            for name in ("long", "longer"):
                group.start_soon(lock.run, partial(endless, name))
            await asyncio.to_thread(begun.wait, PATIENCE)
            try:
                with anyio.fail_after(PATIENCE):
                    for name in ("short", "shorter"):
                        await lock.run(partial(short, name))
            finally:
                enough.set()
        assert not lock.busy
        return done

    first, second, *others = asyncio.run(main())
    assert (first, second) == ("short", "shorter")
    assert sorted(others) == ["long", "longer"]
    assert most == 1


@pytest.mark.parametrize("others", [0, 1, 3])
def test_work_that_nobody_waits_for_ends_at_its_next_pause(others: int) -> None:
    async def main() -> None:
        lock, begun, ended = TokenizerLock(), threading.Event(), threading.Event()

        def work() -> None:
            begun.set()
            try:
                while True:
                    threading.Event().wait(0.002)
                    lock.pause()
            finally:
                ended.set()

        def beside() -> None:
            for _ in range(50):
                threading.Event().wait(0.001)
                lock.pause()

        async with anyio.create_task_group() as group:
            for _ in range(others):
                group.start_soon(lock.run, beside)
            with anyio.move_on_after(PATIENCE) as patience, anyio.CancelScope() as scope:
                async with anyio.create_task_group() as inner:
                    inner.start_soon(lock.run, work)
                    await asyncio.to_thread(begun.wait, PATIENCE)
                    scope.cancel()
            assert ended.is_set()
            assert not patience.cancelled_caught
        assert not lock.busy
        assert await lock.run(lambda: "free") == "free"

    asyncio.run(main())


def test_who_leaves_while_waiting_takes_no_turn() -> None:
    async def main() -> None:
        lock, go = TokenizerLock(), threading.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(lock.run, go.wait)
            while not lock.busy:
                await anyio.lowlevel.checkpoint()
            with anyio.move_on_after(0.05):
                await lock.run(lambda: pytest.fail("it ran"))
            go.set()
        assert not lock.busy

    asyncio.run(main())


def test_what_the_work_raises_is_raised() -> None:
    async def main() -> None:
        lock = TokenizerLock()

        def work() -> None:
            raise ValueError("wrong")

        with pytest.raises(ValueError, match="wrong"):
            await lock.run(work)
        assert not lock.busy

    asyncio.run(main())


def test_short_texts_of_others_cost_nobody_a_turn() -> None:
    async def main() -> list[int]:
        lock, done = TokenizerLock(), []

        def work(number: int) -> None:
            lock.pause(PIECE_CHARACTERS // 3)
            done.append(number)

        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(lock.run, partial(work, number))
        return done

    assert asyncio.run(main()) == list(range(20))


def test_many_short_texts_are_as_good_as_a_long_one() -> None:
    async def main() -> list[str]:
        lock, done = TokenizerLock(), []
        begun, go = threading.Event(), threading.Event()

        def many() -> None:
            begun.set()
            go.wait(PATIENCE)
            for _ in range(4):
                lock.pause(PIECE_CHARACTERS // 3)
            done.append("many")

        async with anyio.create_task_group() as group:
            group.start_soon(lock.run, many)
            await asyncio.to_thread(begun.wait, PATIENCE)
            group.start_soon(lock.run, partial(done.append, "one"))
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
            go.set()
        return done

    assert asyncio.run(main()) == ["one", "many"]
