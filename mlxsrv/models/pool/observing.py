"""Events of models: loaded, failed, evicted. They are logged, and sent to observers such as the
metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from mlxsrv.engine.events import Loaded
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.models")


class ModelLoaded(Struct, frozen=True):
    """A model has been loaded."""

    model: str
    seconds: float
    """The time of the load alone, without a download or a wait for memory."""
    bytes: int


class ModelFailed(Struct, frozen=True):
    """A load, or the preparation for one, has failed."""

    model: str
    """"" if the catalogue does not know it, since clients can make up any number of names."""
    reason: str


class ModelEvicted(Struct, frozen=True):
    """A model has been evicted."""

    model: str
    reason: str
    """One word: "room" or "idle"."""


class ModelObserver(Protocol):
    """Called on the event loop while the pool changes: must be quick, and must not raise."""

    def model_loaded(self, event: ModelLoaded) -> None: ...
    def model_failed(self, event: ModelFailed) -> None: ...
    def model_evicted(self, event: ModelEvicted) -> None: ...


class LoadProblems:
    """An observer that keeps why the last load of a model has failed, until one does not."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.proven: set[str] = set()
        """Models that have been loaded before."""

    def model_loaded(self, event: ModelLoaded) -> None:
        self.proven.add(event.model)
        self.reasons.pop(event.model, None)

    def model_failed(self, event: ModelFailed) -> None:
        if event.model:
            self.reasons[event.model] = event.reason

    def model_evicted(self, event: ModelEvicted) -> None:
        return


class PoolLog:
    """Logs what the pool does, and calls the observers."""

    def __init__(self, observers: Sequence[ModelObserver]) -> None:
        self._observers = observers

    def loaded(self, loaded: Loaded, seconds: float) -> None:
        for note in loaded.notes:
            log(_log, logging.WARNING, "option not applied", model=loaded.model, reason=note)
        log(
            _log,
            logging.INFO,
            "model loaded",
            model=loaded.model,
            seconds=seconds,
            bytes=loaded.bytes,
            shared=loaded.shared,
            batched=loaded.batched,
        )
        for observer in self._observers:
            observer.model_loaded(ModelLoaded(loaded.model, seconds, loaded.bytes))

    def failed(self, model: str, error: Exception, *, known: bool) -> None:
        log(_log, logging.ERROR, "load failed", model=model, reason=str(error))
        for observer in self._observers:
            observer.model_failed(ModelFailed(model if known else "", str(error)))

    def evicted(self, loaded: Loaded, reason: str) -> None:
        """The first word of `reason` is the one that observers get."""
        log(
            _log,
            logging.INFO,
            "model unloaded",
            model=loaded.model,
            reason=reason,
            bytes=loaded.bytes,
        )
        for observer in self._observers:
            observer.model_evicted(ModelEvicted(loaded.model, reason.partition(" ")[0]))

    def divided(self, limit: int, left: int) -> None:
        """Weights have come or go: so many bytes are left for rows and cached prompts."""
        log(_log, logging.INFO, "memory divided", limit=limit, weights=limit - left, left=left)

    def switched(
        self, model: str, victims: Sequence[str], *, waited: float, seconds: float
    ) -> None:
        """A model has been loaded, and others were evicted for it. Times are in seconds."""
        log(
            _log,
            logging.INFO,
            "models switched",
            model=model,
            evicted=",".join(victims),
            waited=waited,
            seconds=seconds,
        )

    def dropped(self, model: str) -> None:
        """A model has been unloaded because the server ends."""
        log(_log, logging.INFO, "model unloaded", model=model, reason="shutdown")
