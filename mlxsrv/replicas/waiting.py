"""Wait for several answers, and for none too long."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

T = TypeVar("T")


async def results_in_time(awaited: Sequence[Awaitable[T]], seconds: float) -> list[T | str]:
    """Return what each one gives, or why it gives nothing: it fails, or takes more seconds."""

    async def wait(each: Awaitable[T]) -> T | str:
        try:
            async with asyncio.timeout(seconds):
                return await each
        except TimeoutError:
            return f"no answer within {seconds:g} s"
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    return await asyncio.gather(*map(wait, awaited))
