"""Which loaded models have to go so that another fits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from mlxsrv.errors import InsufficientMemory
from mlxsrv.models.pool.model import Model


class PoolLimits(msgspec.Struct, frozen=True):
    """What may be loaded together: so many models, and bytes. Those `pinned`, and those that an
    SAE is attached to, never go."""

    models: int | None
    bytes: int
    pinned: frozenset[str]

    def victims(self, head: Model, models: Collection[Model]) -> list[Model]:
        """Whom to evict so that `head` fits: idle models first, then the least recently entered,
        and none that need not go.

        Args:
            models: those that have room; some of them may still be loading.

        Raises:
            InsufficientMemory: not even all of them would do; the message has the numbers.
        """
        placed = [model for model in models if model is not head]
        movable = [model for model in placed if not self.stays(model)]
        pinned = [model for model in placed if self.stays(model)]
        if not self._fit([*pinned, head]):
            raise InsufficientMemory(self._too_large(head, pinned))
        victims: list[Model] = []
        for model in sorted(movable, key=lambda model: (model.busy, model.used)):
            if self._fit([*_without(placed, victims), head]):
                break
            victims.append(model)
        for model in list(victims):
            spared = [other for other in victims if other is not model]
            if self._fit([*_without(placed, spared), head]):
                victims = spared
        return victims

    def stays(self, model: Model) -> bool:
        return model.name in self.pinned or model.attachment is not None

    def _fit(self, models: Sequence[Model]) -> bool:
        few = self.models is None or len(models) <= self.models
        return few and taken(models) <= self.bytes

    def _too_large(self, head: Model, pinned: Sequence[Model]) -> str:
        if self.models is not None and len(pinned) >= self.models:
            return f"{head.name} cannot be loaded: all {self.models} models that may be are pinned"
        used = taken(pinned)
        beside = f", of which pinned models take {used}" if pinned else ""
        return (
            f"{head.name} needs {taken([*pinned, head]) - used} bytes; the limit for all models "
            f"is {self.bytes}{beside} (--memory-limit)"
        )


def _without(models: Collection[Model], gone: Collection[Model]) -> list[Model]:
    return [model for model in models if model not in gone]


def taken(models: Collection[Model]) -> int:
    """The bytes that these models take together; weights that several share count once."""
    bases: dict[Path, int] = {}
    own = 0
    for model in models:
        own += 0 if model.attachment is None else model.attachment.bytes
        if model.files is not None:
            bases[model.files.folder] = model.files.base
            own += model.files.own
    return own + sum(bases.values())
