"""Events of models: loaded, failed, evicted. They are logged, and sent to observers such as the
metrics."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from mlxsrv.engine.events import Loaded
from mlxsrv.logs import Bytes, log

_log = logging.getLogger("mlxsrv.models")


class ModelObserver(Protocol):
    """Called on the event loop while the pool changes: must be quick, and must not raise."""

    def model_loaded(self, model: str, seconds: float, bytes: int) -> None:
        """A model has been loaded, in so many seconds: without a download or a wait for memory."""

    def model_failed(self, model: str, reason: str) -> None:
        """A load, or the preparation for one, has failed. The name is "" if the catalogue does not
        know it, since clients can make up any number of names."""

    def model_evicted(self, model: str, reason: str) -> None:
        """A model has been evicted; the reason is one word: "room" or "idle"."""


class LoadProblems:
    """An observer that keeps why the last load of a model has failed, until one does not."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.proven: set[str] = set()
        """Models that have been loaded before."""

    def model_loaded(self, model: str, seconds: float, bytes: int) -> None:
        self.proven.add(model)
        self.reasons.pop(model, None)

    def model_failed(self, model: str, reason: str) -> None:
        if model:
            self.reasons[model] = reason

    def model_evicted(self, model: str, reason: str) -> None:
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
            bytes=Bytes(loaded.bytes),
            shared=Bytes(loaded.shared),
            batched=loaded.batched,
        )
        for observer in self._observers:
            observer.model_loaded(loaded.model, seconds, loaded.bytes)

    def failed(self, model: str, error: Exception, *, known: bool) -> None:
        log(_log, logging.ERROR, "load failed", model=model, reason=str(error))
        for observer in self._observers:
            observer.model_failed(model if known else "", str(error))

    def evicted(self, loaded: Loaded, reason: str) -> None:
        """The first word of `reason` is the one that observers get."""
        log(
            _log,
            logging.INFO,
            "model unloaded",
            model=loaded.model,
            reason=reason,
            bytes=Bytes(loaded.bytes),
        )
        for observer in self._observers:
            observer.model_evicted(loaded.model, reason.partition(" ")[0])

    def divided(self, limit: int, left: int) -> None:
        """Weights have come or go: so many bytes are left for rows and cached prompts."""
        log(
            _log,
            logging.DEBUG,
            "memory divided",
            limit=Bytes(limit),
            weights=Bytes(limit - left),
            left=Bytes(left),
        )

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
