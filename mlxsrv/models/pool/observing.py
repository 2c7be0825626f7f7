"""What happens to models: logged, and told to those who count it, metrics say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from mlxsrv.engine.events import Loaded
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.models")


class ModelLoaded(Struct, frozen=True):
    """`seconds` are the load's own: those of waiting for room, or of a download, are not in it."""

    model: str
    seconds: float
    bytes: int


class ModelFailed(Struct, frozen=True):
    """A load, or what comes before one, has failed. `model` is "" where the catalogue does not know
    it: a client can make up as many names as it likes."""

    model: str


class ModelEvicted(Struct, frozen=True):
    """`reason` is one word: room, or idle."""

    model: str
    reason: str


class ModelObserver(Protocol):
    """Called on the event loop, in the middle of things: must be quick, and must not raise."""

    def model_loaded(self, event: ModelLoaded) -> None: ...
    def model_failed(self, event: ModelFailed) -> None: ...
    def model_evicted(self, event: ModelEvicted) -> None: ...


class PoolLog:
    """Writes down what the pool does."""

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
            observer.model_failed(ModelFailed(model if known else ""))

    def evicted(self, loaded: Loaded, reason: str) -> None:
        """`reason` begins with its one word."""
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

    def switched(
        self, model: str, victims: Sequence[str], *, waited: float, seconds: float
    ) -> None:
        """A model has been loaded, and others have gone for it."""
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
        """With all others, since the server ends."""
        log(_log, logging.INFO, "model unloaded", model=model, reason="shutdown")
