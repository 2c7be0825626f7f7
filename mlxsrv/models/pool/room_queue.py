"""The models that wait for room, first come, first served. Used on the event loop only."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from mlxsrv.models.pool.model import LoadState, Model

_Room = asyncio.Future[list[Model]]


class Unwanted(Exception):
    """Nobody waits any more for the room that a model has queued for."""


class RoomQueue:
    """The models that wait for room, in order.

    A loaded model may be in it, too: one that closes has new requests, which wait for its next
    load. Its state tells of the weights that are there, and becomes WAITING when they go.
    """

    def __init__(self) -> None:
        self._waiting: dict[Model, _Room] = {}

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

    def join(self, model: Model) -> _Room:
        """The end of this wait: the models that were evicted for this one, or an error."""
        room = self._waiting[model] = asyncio.get_running_loop().create_future()
        if model.loaded is None:
            model.enter(LoadState.WAITING)
        return room

    def give(self, model: Model, victims: list[Model]) -> None:
        """End a model's wait: it has room."""
        model.enter(LoadState.LOADING)
        room = self._waiting.pop(model)
        if not room.done():  # done if its load was cancelled
            room.set_result(victims)

    def refuse(self, model: Model, error: Exception) -> None:
        """End a model's wait: it gets no room."""
        if model.state is LoadState.WAITING:
            model.enter(LoadState.UNUSED)
        room = self._waiting.pop(model)
        if not room.done():
            room.set_exception(error)
