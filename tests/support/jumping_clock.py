"""An event loop whose clock jumps: where nothing is to be done, the time passes at once."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Nothing(selectors.SelectSelector):
    """No I/O: instead of waiting for some, the time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("somebody waits for what will never happen")
        self.now += max(timeout, 0)
        return []


class Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._nothing = _Nothing()
        super().__init__(self._nothing)

    def time(self) -> float:
        return self._nothing.now


def run(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on such a loop. An error in a callback fails it."""
    wrong: list[dict[str, Any]] = []
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.get_loop().set_exception_handler(lambda _, context: wrong.append(context))
        result = runner.run(main())
    assert wrong == []
    return result
