"""The watchdog on a loop whose clock jumps: what it reports of the device thread's slice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mlxsrv.engine import watchdog
from mlxsrv.engine.watchdog import Clock, Watchdog
from tests.support import jumping_clock

TIMEOUT = 0.04


def run(
    test: Callable[[Clock, Watchdog], Awaitable[None]],
    *,
    timeout: float | None = TIMEOUT,
    waits: bool = True,
) -> None:
    async def main() -> None:
        clock, loop = Clock(), asyncio.get_running_loop()
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(watchdog, "monotonic", loop.time)
            dog = Watchdog(clock, loop, timeout, lambda: waits)
            await test(clock, dog)
            dog.stop()

    jumping_clock.run(main)


def test_a_slow_slice_is_reported_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(clock: Clock, dog: Watchdog) -> None:
        clock.begin("decoding", "m")
        dog.wake()
        await asyncio.sleep(4 * TIMEOUT)
        assert dog.stalled == 4 * TIMEOUT
        clock.begin("reading prompts", "m")
        await asyncio.sleep(TIMEOUT / 2)
        assert dog.stalled == 0

    run(test)
    assert [record.getMessage() for record in caplog.records] == ["slow step", "slow step ended"]


def test_short_slices_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def test(clock: Clock, dog: Watchdog) -> None:
        dog.wake()
        for _ in range(20):
            clock.begin("decoding")
            await asyncio.sleep(TIMEOUT / 2)
            clock.stop()
        assert dog.stalled == 0

    run(test)
    assert caplog.records == []


def test_without_a_timeout_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def test(clock: Clock, dog: Watchdog) -> None:
        clock.begin("decoding")
        dog.wake()
        await asyncio.sleep(TIMEOUT)
        assert dog.stalled == 0

    run(test, timeout=None)
    assert caplog.records == []


def test_a_loop_that_waits_for_nothing_has_no_timer() -> None:
    async def test(clock: Clock, dog: Watchdog) -> None:
        dog.wake()
        assert dog._timer is not None
        await asyncio.sleep(TIMEOUT)
        assert dog._timer is None

    run(test, waits=False)
