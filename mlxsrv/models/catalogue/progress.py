"""The progress of downloads and loads, for people: a bar on a terminal, lines in the log elsewhere.

The thread of a download reports it. The rest is the event loop's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Self

from msgspec import Struct

from mlxsrv.generation.status import ByteProgress
from mlxsrv.logs import Bytes, log, on_terminal

_log = logging.getLogger("mlxsrv.models")

_INTERVAL = 0.1  # seconds between two reports on a file
_SILENCE = 10.0  # seconds after which progress is logged though no further tenth has come
_SHORT = 3.0  # seconds of a load that nobody need hear of, and from a line to the next
_SUDDEN = 0.5  # seconds of a load without a bar

_BAR_FORMAT = "{l_bar}{bar}| {n_fmt}B/{total_fmt}B [{elapsed}<{remaining}, {rate_fmt}]"
"""tqdm's own, but what has come is in bytes, too, not the rate alone."""


class PulledFile(Struct, frozen=True):
    """A file of a download: its checksum, its bytes, and those that are here."""

    checksum: str
    size: int
    done: int


DownloadReport = Callable[[PulledFile, ByteProgress], None]
"""Called by the thread of a download while bytes arrive."""


class DownloadProgress:
    """The progress of the download of one model. Its thread calls `report`; the rest is the event
    loop's.

    Args:
        model: its name, for the log.
        logs: a line for each tenth. One at the beginning is enough where a bar is shown.
        changed: called after each change.
    """

    def __init__(
        self, model: str, *, logs: bool = True, changed: Callable[[], None] = lambda: None
    ) -> None:
        self.files: dict[str, PulledFile] = {}
        self.arrived: ByteProgress | None = None
        self._model = model
        self._logs = logs
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._tenths = -1
        self._logged = 0.0
        self._reported = ("", 0.0)  # the file and when; the thread's

    def report(self, file: PulledFile, arrived: ByteProgress) -> None:
        before, time = self._reported
        now = monotonic()
        if file.done < file.size and file.checksum == before and now - time < _INTERVAL:
            return
        self._reported = file.checksum, now
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody listens
            self._loop.call_soon_threadsafe(self._note, file, arrived)

    def _note(self, file: PulledFile, arrived: ByteProgress) -> None:
        self.files[file.checksum] = file
        self.arrived = arrived
        tenths = 10 * arrived.completed // max(arrived.total, 1)
        late = monotonic() > self._logged + _SILENCE
        if self._tenths < 0 or (self._logs and (tenths > self._tenths or late)):
            self._tenths, self._logged = tenths, monotonic()
            _log_progress("downloading", self._model, arrived)
        self._changed()


class LoadProgress:
    """The progress of the load of one model, while the block lasts."""

    def __init__(self, model: str, total: int) -> None:
        self.arrived: ByteProgress | None = ByteProgress(0, total)
        self._model = model
        self._total = total
        self._logged = monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if on_terminal():
            self._bar = open_bar(f"loading {self._model}", self._total, delay=_SUDDEN, leave=False)
        return self

    def __exit__(self, *exception: object) -> None:
        self.arrived = None
        if self._bar is not None:
            self._bar.close()

    def add(self, bytes: int) -> None:
        """Note that so many more bytes of weights have been read."""
        if self.arrived is None:
            return
        completed = min(self.arrived.completed + bytes, self._total)
        if self._bar is not None:
            self._bar.update(completed - self.arrived.completed)
        self.arrived = ByteProgress(completed, self._total)
        if self._bar is None and monotonic() > self._logged + _SHORT:
            self._logged = monotonic()
            _log_progress("loading", self._model, self.arrived)


def open_bar(title: str, total: int, **options: Any) -> Any:
    """Open a bar of bytes on stderr, as huggingface-hub makes them."""
    # Imported on first use: it takes 0.1 s.
    from huggingface_hub.utils import tqdm

    return tqdm(
        desc=title, total=total, unit="B", unit_scale=True, bar_format=_BAR_FORMAT, **options
    )


def _log_progress(event: str, model: str, arrived: ByteProgress) -> None:
    log(
        _log,
        logging.INFO,
        event,
        model=model,
        percent=100 * arrived.completed // max(arrived.total, 1),
        completed=Bytes(arrived.completed),
        total=Bytes(arrived.total),
    )
