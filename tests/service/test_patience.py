"""Which clock runs out when, on a real loop with short times."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from mlxsrv.errors import DeadlineExceeded, Overloaded, ServeError
from mlxsrv.service.patience import Patience, Stage
from mlxsrv.settings import Settings

SHORT, LONG = 0.2, 30.0


class Clocks:
    """A request's clocks, and what they told."""

    def __init__(self, queue: float, stall: float, whole: float | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = self.heard = self.loop.time()
        self.loading = False
        self.lapsed: list[tuple[float, ServeError]] = []
        settings = Settings(queue_timeout=queue, stall_timeout=stall, request_timeout=whole)
        self.patience = Patience(
            settings,
            lambda error: self.lapsed.append((self.loop.time() - self.begun, error)),
            loading=lambda: self.loading,
            heard=lambda: self.heard,
        )

    async def keep(self, what: Callable[[], None], seconds: float) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            what()
            await asyncio.sleep(SHORT / 10)

    def hear(self) -> None:
        self.heard = self.loop.time()

    def told(self, kind: type[ServeError]) -> float:
        """When; it is the only thing that was told."""
        [(when, error)] = self.lapsed
        assert type(error) is kind, error.message
        self.patience.close()
        return when


@pytest.mark.slow
def test_who_waits_for_a_row_waits_so_long() -> None:
    async def test() -> None:
        clocks = Clocks(queue=SHORT, stall=LONG)
        await asyncio.sleep(3 * SHORT)
        assert SHORT * 0.9 <= clocks.told(Overloaded) < 2 * SHORT

    asyncio.run(test())


@pytest.mark.slow
def test_a_load_is_not_counted() -> None:
    async def test() -> None:
        clocks = Clocks(queue=SHORT, stall=LONG)
        clocks.loading = True
        await asyncio.sleep(4 * SHORT)
        assert not clocks.lapsed
        clocks.loading = False
        clocks.patience.enter(Stage.QUEUED)
        await asyncio.sleep(SHORT / 2)
        assert not clocks.lapsed, "from here on it has all its time"
        await asyncio.sleep(2 * SHORT)
        clocks.told(Overloaded)

    asyncio.run(test())


@pytest.mark.slow
def test_who_waits_for_others_prompts_does_not_stand_still() -> None:
    async def test() -> None:
        clocks = Clocks(queue=6 * SHORT, stall=SHORT)
        clocks.patience.enter(Stage.SUBMITTED)
        await clocks.keep(clocks.hear, 3 * SHORT)
        assert not clocks.lapsed
        await clocks.keep(clocks.hear, 5 * SHORT)
        assert clocks.told(Overloaded) > 5 * SHORT, "it queued all that time"

    asyncio.run(test())


@pytest.mark.slow
def test_an_engine_of_which_nothing_is_heard_stands_still() -> None:
    async def test() -> None:
        clocks = Clocks(queue=LONG, stall=SHORT)
        clocks.patience.enter(Stage.SUBMITTED)
        await asyncio.sleep(3 * SHORT)
        assert clocks.told(DeadlineExceeded) < 2 * SHORT

    asyncio.run(test())


@pytest.mark.slow
def test_what_is_begun_must_move_itself() -> None:
    async def test() -> None:
        clocks = Clocks(queue=SHORT, stall=SHORT)
        clocks.patience.enter(Stage.BEGUN)
        await clocks.keep(clocks.patience.move, 4 * SHORT)
        assert not clocks.lapsed
        await clocks.keep(clocks.hear, 3 * SHORT)
        clocks.told(DeadlineExceeded)

    asyncio.run(test())


@pytest.mark.slow
def test_choices_that_wait_after_others_have_ended_queue_anew() -> None:
    async def test() -> None:
        clocks = Clocks(queue=3 * SHORT, stall=LONG)
        clocks.patience.enter(Stage.BEGUN)
        await asyncio.sleep(4 * SHORT)
        clocks.patience.enter(Stage.QUEUED)
        await asyncio.sleep(SHORT)
        assert not clocks.lapsed
        await asyncio.sleep(3 * SHORT)
        clocks.told(Overloaded)

    asyncio.run(test())


@pytest.mark.parametrize("whole", [None, 0.0, SHORT])
@pytest.mark.slow
def test_the_whole_has_a_bound_only_where_one_is_set(whole: float | None) -> None:
    async def test() -> None:
        clocks = Clocks(LONG, LONG, whole)
        clocks.patience.enter(Stage.BEGUN)
        await clocks.keep(clocks.patience.move, 2 * SHORT)
        if whole:
            assert "--request-timeout" in clocks.lapsed[0][1].message
            clocks.told(DeadlineExceeded)
        assert not whole or len(clocks.lapsed) == 1
        clocks.patience.close()

    asyncio.run(test())


@pytest.mark.slow
def test_clocks_that_are_closed_tell_nothing() -> None:
    async def test() -> None:
        clocks = Clocks(SHORT, SHORT, SHORT)
        clocks.patience.close()
        await asyncio.sleep(2 * SHORT)
        assert not clocks.lapsed

    asyncio.run(test())
