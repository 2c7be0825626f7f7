"""Waiting for rows: who leaves, at any moment, holds none."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import pytest

from mlxsrv.models.pool.clients import Client
from mlxsrv.models.pool.row_queue import RowQueue
from tests.support.jumping_clock import run
from tests.support.pool_worlds import turns


def played(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run the test on a loop on which nobody can wait for ever."""

    def play() -> None:
        run(test)

    play.__name__ = test.__name__
    return play


def opened(rows: int) -> tuple[RowQueue, anyio.CapacityLimiter]:
    limiter = anyio.CapacityLimiter(rows)
    return RowQueue(limiter), limiter


def begin(queue: RowQueue, borrower: str, priority: int = 0) -> asyncio.Task[None]:
    return asyncio.create_task(queue.borrow(borrower, Client(borrower[0], priority)))


@played
async def test_clients_take_turns() -> None:
    queue, limiter = opened(1)
    waits = {name: begin(queue, name) for name in ("a1", "a2", "a3", "a4", "b1", "b2")}
    order = []
    for _ in waits:
        await turns(3)
        [name] = limiter.statistics().borrowers
        order.append(str(name))
        await waits[str(name)]
        queue.give_back(name, 1)
    assert order == ["a1", "a2", "b1", "a3", "b2", "a4"]
    assert (len(queue), queue.clients, limiter.borrowed_tokens) == (0, 0, 0)


@played
async def test_more_rows_are_given_at_once() -> None:
    queue, limiter = opened(1)
    waits = [begin(queue, name) for name in ("a1", "b1", "b2", "c1")]
    await turns(3)
    assert (limiter.borrowed_tokens, len(queue), queue.clients) == (1, 3, 2)
    queue.resize(3)
    await turns(3)
    assert [wait.done() for wait in waits] == [True, True, False, True]
    queue.resize(1)
    for name in ("a1", "b1"):
        queue.give_back(name, 1)
    await turns(3)
    assert not waits[2].done()
    queue.give_back("c1", 1)
    await waits[2]


@pytest.mark.parametrize("late", range(4))
def test_who_leaves_holds_no_row(late: int) -> None:
    """It is cancelled when it has just been given a row, some turns later, or while it waits."""

    async def test() -> None:
        queue, limiter = opened(1)
        await queue.borrow("a1", Client("a"))
        leaver = begin(queue, "b1")
        other = begin(queue, "c1")
        await turns(3)
        if late < 3:
            queue.give_back("a1", 1)
        await turns(late if late < 3 else 0)
        leaver.cancel()
        await asyncio.gather(leaver, return_exceptions=True)
        if late == 3:
            assert limiter.statistics().borrowers == ("a1",)
            queue.give_back("a1", 1)
        if not leaver.cancelled():
            queue.give_back("b1", 1)
        await other
        assert limiter.statistics().borrowers == ("c1",)

    run(test)


@played
async def test_whatever_order_they_come_and_leave_in() -> None:
    dice = random.Random(1)
    queue, limiter = opened(3)
    answered = 0

    async def ask(name: str) -> None:
        nonlocal answered
        await queue.borrow(name, Client(name[0], dice.choice([0, 0, 1])))
        try:
            assert limiter.borrowed_tokens <= 3
            await turns(dice.randrange(4))
        finally:
            queue.give_back(name, dice.randrange(2000))
        answered += 1

    tasks = []
    for i in range(500):
        tasks.append(asyncio.create_task(ask(f"{dice.choice('abcd')}{i}")))
        await turns(dice.randrange(3))
        if dice.random() < 0.4:
            dice.choice(tasks[-8:]).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = sum(task.cancelled() for task in tasks)
    assert answered + cancelled == 500
    assert min(answered, cancelled) > 50
    assert (len(queue), limiter.borrowed_tokens, queue._granted) == (0, 0, {})
    assert queue._queue._rings == {}
