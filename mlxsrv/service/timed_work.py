"""Work that one task does for a request, and that a time limit or a shutdown may end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from mlxsrv.errors import ServeError
from mlxsrv.service.lifecycle import Lifecycle, State
from mlxsrv.settings import Settings


class TimedWork:
    """A block that ends when a time limit of its lifecycle has passed, or when `end` is called.

    Args: as for Lifecycle.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        loading: Callable[[], bool],
        heard: Callable[[], float],
        turn: Callable[[], int],
    ) -> None:
        self._scope = anyio.CancelScope()
        self._error: ServeError | None = None
        self._lifecycle = Lifecycle(settings, self.end, loading=loading, heard=heard, turn=turn)

    def end(self, error: ServeError) -> None:
        """Cancel the block, which then raises `error`. Only the first error counts."""
        if self._lifecycle.may_enter(State.FAILED):
            self._lifecycle.enter(State.FAILED)
            self._error = error
            self._scope.cancel()

    def enter(self, state: State) -> None:
        """Change to `state`, from within the block.

        Raises:
            ServeError: the block was ended. Its task may take one more step before the
                cancellation reaches it, if what it waited for came at the same time.
        """
        if self._error is not None:
            raise self._error
        self._lifecycle.enter(state)

    def note_progress(self) -> None:
        """Note that the engine has done something for it; called from the engine's callbacks."""
        if self._error is None:
            self._lifecycle.enter(State.RUNNING)

    def close(self) -> None:
        """End the timers; needed if `run` was never called. It may be called again."""
        self._lifecycle.close()

    @contextmanager
    def run(self) -> Iterator[None]:
        """Run the block. Raises the ServeError that ended it."""
        try:
            with self._scope:
                yield
        finally:
            self.close()
        if self._error is not None:
            raise self._error
