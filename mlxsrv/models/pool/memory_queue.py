"""The models that wait for memory, first come, first served. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from mlxsrv.models.pool.model import LoadState, Model

_Wait = asyncio.Future[list[Model]]


class Unwanted(Exception):
    """Nobody waits any more for the memory that a model has queued for."""


class MemoryQueue:
    """The models that wait for memory, in order.

    Where `--max-models` is set, they wait for a place among those models as well. A loaded model
    may be in the queue, too: one that closes has new requests, which wait for its next load.
    Its state describes the old weights. It becomes WAITING when they are unloaded.
    """

    def __init__(self) -> None:
        self._waiting: dict[Model, _Wait] = {}

    def __iter__(self) -> Iterator[Model]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, model: Model) -> bool:
        return model in self._waiting

    @property
    def head(self) -> Model | None:
        """The model whose turn it is."""
        return next(iter(self), None)

    def join(self, model: Model) -> _Wait:
        """The end of this wait: the models that were evicted for this one, or an error."""
        wait = self._waiting[model] = asyncio.get_running_loop().create_future()
        if model.loaded is None:
            model.enter(LoadState.WAITING)
        return wait

    def give(self, model: Model, victims: list[Model]) -> None:
        """End a model's wait: it has its memory."""
        model.enter(LoadState.LOADING)
        wait = self._waiting.pop(model)
        if not wait.done():  # done if its load was cancelled
            wait.set_result(victims)

    def refuse(self, model: Model, error: Exception) -> None:
        """End a model's wait: it gets none."""
        if model.state is LoadState.WAITING:
            model.enter(LoadState.UNUSED)
        wait = self._waiting.pop(model)
        if not wait.done():
            wait.set_exception(error)
