"""The memory of a pool: the models that wait for it, and those that are evicted for it.

A model needs its weights, and room for one short row. So all models that are loaded together can
run, one row after the other; for more or longer rows, idle models go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import msgspec

from mlxsrv.errors import InsufficientMemory
from mlxsrv.models.pool.model import LoadState, Model
from mlxsrv.models.pool.model_files import SHORT_ROW

_Wait = asyncio.Future[list[Model]]


class PoolLimits(msgspec.Struct, frozen=True):
    """The most models that may be loaded together, and the most bytes of them."""

    models: int | None
    bytes: int
    pinned: frozenset[str]
    """Names of models that are never evicted."""

    def victims(self, head: Model, models: Collection[Model]) -> list[Model]:
        """The models to evict so that `head` fits, and no more than needed: idle models first,
        then the one whose last user entered longest ago.

        Args:
            models: those that have their memory; some of them may still be loading.

        Raises:
            InsufficientMemory: evicting all that may be evicted is not enough; the message has
                the numbers.
        """
        placed = [model for model in models if model is not head]
        movable = [model for model in placed if not self.stays(model)]
        pinned = [model for model in placed if self.stays(model)]
        if not self._fit([*pinned, head]):
            raise InsufficientMemory(self._too_large(head, pinned))
        victims: list[Model] = []
        for model in sorted(movable, key=lambda model: (model.busy, model.last_entry)):
            if self._fit([*_without(placed, victims), head]):
                break
            victims.append(model)
        return _spare(victims, lambda rest: self._fit([*_without(placed, rest), head]))

    def idle_models(self, bytes: int, models: Collection[Model]) -> list[Model]:
        """The idle models to unload so that `bytes` become free, the least recently used first; all
        that may go, if they are not enough.

        Args:
            models: those that have their memory.
        """
        wanted = weight_bytes(models) - bytes
        idle = [model for model in models if model.unused and not self.stays(model)]
        victims: list[Model] = []
        for model in sorted(idle, key=lambda model: model.last_entry):
            if weight_bytes(_without(models, victims)) <= wanted:
                break
            victims.append(model)
        return _spare(victims, lambda rest: weight_bytes(_without(models, rest)) <= wanted)

    def require_row(self, model: Model, models: Collection[Model]) -> None:
        """Check that a loaded model has memory for a short row, once all models that may be evicted
        are gone.

        Raises InsufficientMemory; the message has the numbers.
        """
        stay = [other for other in models if other is not model and self.stays(other)]
        left = self.bytes - weight_bytes([*stay, model])
        if model.short_row > left:
            raise InsufficientMemory(
                f"{model.name} needs {model.short_row} bytes for a row of {SHORT_ROW} tokens "
                f"beside its weights; the limit is {self.bytes}, which leaves {max(left, 0)} "
                "(--memory-limit)"
            )

    def left(self, models: Collection[Model]) -> int:
        """The bytes that weights and SAEs leave to rows and to cached prompts."""
        return max(self.bytes - weight_bytes(models), 0)

    def stays(self, model: Model) -> bool:
        """Whether the model is never evicted: it is pinned, or an SAE is attached to it."""
        return model.name in self.pinned or model.attachment is not None

    def _fit(self, models: Sequence[Model]) -> bool:
        few = self.models is None or len(models) <= self.models
        return few and used_bytes(models) <= self.bytes

    def _too_large(self, head: Model, pinned: Sequence[Model]) -> str:
        if self.models is not None and len(pinned) >= self.models:
            return f"{head.name} cannot be loaded: all {self.models} models that may be are pinned"
        used = used_bytes(pinned)
        beside = f", of which pinned models take {used}" if pinned else ""
        return (
            f"{head.name} needs {used_bytes([*pinned, head]) - used} bytes, a row of {SHORT_ROW} "
            f"tokens included; the limit is {self.bytes}{beside} (--memory-limit)"
        )


def _without(models: Collection[Model], gone: Collection[Model]) -> list[Model]:
    return [model for model in models if model not in gone]


def _spare(victims: list[Model], enough: Callable[[list[Model]], bool]) -> list[Model]:
    """Leave out models that need not be evicted: a small one that was chosen early stays if a large
    one that was chosen later frees enough alone."""
    for model in list(victims):
        rest = [other for other in victims if other is not model]
        if enough(rest):
            victims = rest
    return victims


def used_bytes(models: Collection[Model]) -> int:
    """The bytes that these models need together: their weights, and a short row of each."""
    return weight_bytes(models) + sum(model.short_row for model in models)


def weight_bytes(models: Collection[Model]) -> int:
    """The bytes of these models' weights and SAEs; weights that several share count once."""
    bases: dict[Path, int] = {}
    own = 0
    for model in models:
        own += model.own_bytes
        if model.files is not None:
            bases[model.files.folder] = model.files.base
    return own + sum(bases.values())


class Unwanted(Exception):
    """A model waits for memory, and no request waits for the model any more."""


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

    def enqueue(self, model: Model) -> _Wait:
        """Add a model to the queue. Returns a future: the models that were evicted for this one, or
        an error."""
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
