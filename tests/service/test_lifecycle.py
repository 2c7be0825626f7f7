"""The states of a request, and which clock runs out when, on a loop whose clock jumps."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from functools import partial

import pytest

from mlxsrv.errors import DeadlineExceeded, Overloaded, ServeError
from mlxsrv.service.lifecycle import ENDED, FOLLOWS, Lifecycle, State
from mlxsrv.settings import Settings
from mlxsrv.states import follow
from tests.support.jumping_clock import run

SHORT, LONG = 1.0, 600.0

ORDER = [State.PREPARING, State.QUEUED, State.SUBMITTED, State.RUNNING, State.FINISHED]
PATHS: dict[State, list[State]] = {
    State.WAITING: [],
    **{state: ORDER[: i + 1] for i, state in enumerate(ORDER)},
    State.FAILED: [State.FAILED],
    State.CLOSED: [State.CLOSED],
}
"""A way from WAITING to each state."""


class LoadingModel:
    progressing = False
    turn = 17


class Clocks:
    """A request's clocks, and what they told."""

    def __init__(self, queue: float, stall: float, whole: float | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.model = LoadingModel()
        self.begun = self.heard = self.loop.time()
        self.expired: list[tuple[float, ServeError]] = []
        settings = Settings(queue_timeout=queue, stall_timeout=stall, request_timeout=whole)
        self.lifecycle = Lifecycle(
            settings,
            self.model,
            lambda: self.heard,
            lambda error: self.expired.append((self.loop.time() - self.begun, error)),
        )

    def bring_to(self, state: State) -> None:
        for each in PATHS[state]:
            self.lifecycle.enter(each)

    async def keep(self, what: Callable[[], None], seconds: float) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            what()
            await asyncio.sleep(SHORT / 10)

    def hear(self) -> None:
        self.heard = self.loop.time()

    def told(self, kind: type[ServeError]) -> float:
        """When; it is the only thing that was told."""
        [(when, error)] = self.expired
        assert type(error) is kind, error.message
        assert error.retry_after == (17 if kind is Overloaded else None)
        self.lifecycle.enter(State.CLOSED)
        return when


# States.


@pytest.mark.parametrize("before", State)
def test_a_state_is_followed_only_by_those_that_the_table_has(before: State) -> None:
    async def test(after: State) -> None:
        lifecycle = Clocks(LONG, LONG).lifecycle
        for state in PATHS[before]:
            lifecycle.enter(state)
        allowed = after in FOLLOWS[before]
        assert lifecycle.may_enter(after) is allowed
        if allowed or after is before:
            lifecycle.enter(after)
            assert lifecycle.state is after
        else:
            with pytest.raises(RuntimeError, match=f"is {before.value}, .* be {after.value} next"):
                lifecycle.enter(after)
            assert lifecycle.state is before
        lifecycle.enter(State.CLOSED)

    for after in State:
        run(partial(test, after))


def test_what_has_ended_takes_nothing_up_again() -> None:
    for state in ENDED:
        assert FOLLOWS[state] <= {State.CLOSED}
        assert state is State.CLOSED or State.CLOSED in FOLLOWS[state]
    for state in set(State) - ENDED:
        assert {State.FAILED, State.CLOSED} <= FOLLOWS[state], "a client may leave at any time"
    with pytest.raises(RuntimeError):
        follow("a request", State.CLOSED, State.CLOSED, FOLLOWS)


@pytest.mark.parametrize("state", sorted(ENDED, key=str))
def test_a_request_that_has_ended_has_no_clocks(state: State) -> None:
    async def test() -> None:
        clocks = Clocks(SHORT, SHORT, SHORT)
        clocks.bring_to(state)
        await asyncio.sleep(2 * SHORT)
        assert not clocks.expired

    run(test)


@pytest.mark.parametrize("state", sorted(ENDED, key=str))
def test_no_clock_holds_a_request_that_has_ended(state: State) -> None:
    """A timer that goes on would hold the request until its time is over."""

    async def test() -> None:
        clocks = Clocks(LONG, LONG, LONG)
        clocks.bring_to(state)
        held = weakref.ref(clocks.lifecycle)
        gc.disable()
        try:
            del clocks
            assert held() is None
        finally:
            gc.enable()

    run(test)


# Clocks.


def test_who_waits_for_a_row_waits_so_long() -> None:
    async def test() -> None:
        clocks = Clocks(queue=SHORT, stall=LONG)
        await asyncio.sleep(3 * SHORT)
        assert clocks.told(Overloaded) == pytest.approx(SHORT)

    run(test)


def test_a_load_is_not_counted() -> None:
    async def test() -> None:
        clocks = Clocks(queue=SHORT, stall=LONG)
        clocks.model.progressing = True
        await asyncio.sleep(4 * SHORT)
        assert not clocks.expired
        clocks.model.progressing = False
        clocks.lifecycle.enter(State.PREPARING)
        await asyncio.sleep(SHORT / 2)
        assert not clocks.expired, "from here on it has all its time"
        await asyncio.sleep(2 * SHORT)
        clocks.told(Overloaded)

    run(test)


def test_who_waits_for_others_prompts_does_not_stand_still() -> None:
    async def test() -> None:
        clocks = Clocks(queue=6 * SHORT, stall=SHORT)
        clocks.bring_to(State.SUBMITTED)
        await clocks.keep(clocks.hear, 3 * SHORT)
        assert not clocks.expired
        await clocks.keep(clocks.hear, 5 * SHORT)
        assert clocks.told(Overloaded) == pytest.approx(6 * SHORT), "it queued all that time"

    run(test)


def test_an_engine_of_which_nothing_is_heard_stands_still() -> None:
    async def test() -> None:
        clocks = Clocks(queue=LONG, stall=SHORT)
        clocks.bring_to(State.SUBMITTED)
        await asyncio.sleep(3 * SHORT)
        assert clocks.told(DeadlineExceeded) == pytest.approx(SHORT)

    run(test)


def test_what_is_begun_must_move_itself() -> None:
    async def test() -> None:
        clocks = Clocks(queue=SHORT, stall=SHORT)
        clocks.bring_to(State.RUNNING)
        await clocks.keep(clocks.lifecycle.touch, 4 * SHORT)
        assert not clocks.expired
        await clocks.keep(clocks.hear, 3 * SHORT)
        clocks.told(DeadlineExceeded)

    run(test)


def test_choices_that_wait_after_others_have_ended_queue_anew() -> None:
    async def test() -> None:
        clocks = Clocks(queue=3 * SHORT, stall=LONG)
        clocks.bring_to(State.RUNNING)
        await asyncio.sleep(4 * SHORT)
        clocks.lifecycle.enter(State.QUEUED)
        await asyncio.sleep(SHORT)
        assert not clocks.expired
        await asyncio.sleep(3 * SHORT)
        clocks.told(Overloaded)

    run(test)


@pytest.mark.parametrize("whole", [None, 0.0, SHORT])
def test_the_whole_has_a_bound_only_where_one_is_set(whole: float | None) -> None:
    async def test() -> None:
        clocks = Clocks(LONG, LONG, whole)
        clocks.bring_to(State.RUNNING)
        await clocks.keep(clocks.lifecycle.touch, 2 * SHORT)
        if whole:
            assert "--request-timeout" in clocks.expired[0][1].message
            clocks.told(DeadlineExceeded)
        assert not whole or len(clocks.expired) == 1
        clocks.lifecycle.enter(State.CLOSED)

    run(test)
