"""The choice of loaded models to evict so that another fits."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from mlxsrv.errors import InsufficientMemory
from mlxsrv.models.pool.model import Model


class PoolLimits(msgspec.Struct, frozen=True):
    """How many models, and how many bytes of them, may be loaded together."""

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
        # A small model chosen early is spared if a large one chosen later is enough alone.
        for model in list(victims):
            spared = [other for other in victims if other is not model]
            if self._fit([*_without(placed, spared), head]):
                victims = spared
        return victims

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
            f"{head.name} needs {used_bytes([*pinned, head]) - used} bytes; the limit for all "
            f"models is {self.bytes}{beside} (--memory-limit)"
        )


def _without(models: Collection[Model], gone: Collection[Model]) -> list[Model]:
    return [model for model in models if model not in gone]


def used_bytes(models: Collection[Model]) -> int:
    """The bytes that these models take together; weights that several share count once."""
    bases: dict[Path, int] = {}
    own = 0
    for model in models:
        own += 0 if model.attachment is None else model.attachment.bytes
        if model.files is not None:
            bases[model.files.folder] = model.files.base
            own += model.files.own
    return own + sum(bases.values())
