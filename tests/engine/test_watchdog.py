"""The watchdog on a real loop: what it reports of the slice that the device thread is in."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from mlxsrv.engine.watchdog import Clock, Watchdog

TIMEOUT = 0.04


def run(
    test: Callable[[Clock, Watchdog], Awaitable[None]],
    *,
    timeout: float | None = TIMEOUT,
    waits: bool = True,
) -> None:
    async def main() -> None:
        clock = Clock()
        watchdog = Watchdog(clock, asyncio.get_running_loop(), timeout, lambda: waits)
        await test(clock, watchdog)
        watchdog.close()

    asyncio.run(main())


def test_a_slow_slice_is_reported_once_and_so_is_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(clock: Clock, watchdog: Watchdog) -> None:
        clock.begin("decoding", "m")
        watchdog.wake()
        await asyncio.sleep(4 * TIMEOUT)
        assert watchdog.stalled > TIMEOUT
        clock.begin("reading prompts", "m")
        await asyncio.sleep(TIMEOUT)

    run(test)
    assert [record.getMessage() for record in caplog.records][:2] == [
        "slow step",
        "slow step ended",
    ]


def test_short_slices_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def test(clock: Clock, watchdog: Watchdog) -> None:
        watchdog.wake()
        for _ in range(20):
            clock.begin("decoding")
            await asyncio.sleep(TIMEOUT / 20)
            clock.stop()
        assert watchdog.stalled == 0

    run(test, timeout=1.0)
    assert caplog.records == []


def test_without_a_timeout_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async def test(clock: Clock, watchdog: Watchdog) -> None:
        clock.begin("decoding")
        watchdog.wake()
        await asyncio.sleep(TIMEOUT)
        assert watchdog.stalled == 0

    run(test, timeout=None)
    assert caplog.records == []


def test_a_loop_that_waits_for_nothing_has_no_timer() -> None:
    async def test(clock: Clock, watchdog: Watchdog) -> None:
        watchdog.wake()
        assert watchdog._timer is not None
        await asyncio.sleep(TIMEOUT)
        assert watchdog._timer is None

    run(test, waits=False)
