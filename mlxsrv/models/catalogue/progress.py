"""The progress of a download: its thread reports it, the event loop keeps and logs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from time import monotonic

from msgspec import Struct

from mlxsrv.generation.status import DownloadState
from mlxsrv.logs import log

_log = logging.getLogger("mlxsrv.models")

_INTERVAL = 0.1  # seconds between two reports on a file
_SILENCE = 30.0  # seconds after which progress is logged though no further tenth has come


class PulledFile(Struct, frozen=True):
    """A file of a download: its checksum, its bytes, and those that are here."""

    checksum: str
    size: int
    done: int


DownloadReport = Callable[[PulledFile, DownloadState], None]
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
        self.arrived: DownloadState | None = None
        self._model = model
        self._logs = logs
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._tenths = -1
        self._logged = 0.0
        self._reported = ("", 0.0)  # the file and when; the thread's

    def report(self, file: PulledFile, arrived: DownloadState) -> None:
        before, time = self._reported
        now = monotonic()
        if file.done < file.size and file.checksum == before and now - time < _INTERVAL:
            return
        self._reported = file.checksum, now
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody listens
            self._loop.call_soon_threadsafe(self._note, file, arrived)

    def _note(self, file: PulledFile, arrived: DownloadState) -> None:
        self.files[file.checksum] = file
        self.arrived = arrived
        tenths = 10 * arrived.completed // max(arrived.total, 1)
        late = monotonic() > self._logged + _SILENCE
        if self._tenths < 0 or (self._logs and (tenths > self._tenths or late)):
            self._tenths, self._logged = tenths, monotonic()
            log(
                _log,
                logging.INFO,
                "downloading",
                model=self._model,
                percent=100 * arrived.completed // max(arrived.total, 1),
                completed=arrived.completed,
                total=arrived.total,
            )
        self._changed()
