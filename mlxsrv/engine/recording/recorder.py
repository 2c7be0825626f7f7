"""The recorder: writes each round of the device thread to a file while it happens.

Each line is written at once, without a buffer: if the process is killed, or MLX ends it, the file
has the plan that was under way. A recorder that fails says so in the log, once, and writes no more;
the server goes on.

Used on the device thread only.
"""

from __future__ import annotations

import logging
import os
import platform
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import msgspec

from mlxsrv.engine.backend import describe_device
from mlxsrv.engine.events import Activations
from mlxsrv.engine.outcomes import Decoded, LoadStep, Outcome, PromptsRead
from mlxsrv.engine.plans import RoundPlan, WorkItem
from mlxsrv.engine.recording.record_file import (
    FORMAT,
    Line,
    Number,
    OrdersLine,
    OutcomeLine,
    PlanLine,
    RecordHeader,
    encode_line,
    shorten,
)
from mlxsrv.engine.scheduling.scheduler import Received, Scheduler
from mlxsrv.logs import log
from mlxsrv.settings import Settings, options
from mlxsrv.version import __version__

_log = logging.getLogger("mlxsrv.engine")


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a record.

    Attributes:
        path: the file. One that is there is kept as PATH.old.
        options: of the server, for the file's first line.
        most_bytes: of the file; then the record ends.
    """

    path: str
    options: tuple[tuple[str, Number], ...] = ()
    most_bytes: int = 1024**3

    @classmethod
    def from_settings(cls, settings: Settings) -> Recording | None:
        """The recording that the settings ask for, if they do."""
        if settings.record is None:
            return None
        values = [(option, getattr(settings, option.name)) for option in options()]
        return cls(
            path=os.path.abspath(os.path.expanduser(settings.record)),
            options=tuple(
                (option.name, value)
                for option, value in values
                if value != option.default and isinstance(value, (int, float, type(None)))
            ),
        )


class Recorder:
    """Writes one file, from its first round on."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._file: int | None = None
        self._over = False
        self._written = 0

    def note_orders(self, orders: Sequence[Received]) -> None:
        """Write the orders of a round. The file is made with the first orders, when MLX is
        imported."""
        if orders:
            self._note(lambda: OrdersLine(tuple(orders)))

    def note_plan(self, plan: RoundPlan) -> None:
        """Write the plan of a round, before it is done."""
        self._note(lambda: PlanLine(shorten(plan.items)))

    def note_outcome(self, outcome: Outcome) -> None:
        """Write the outcome of the next work item of the plan."""
        self._note(lambda: OutcomeLine(_reduce(outcome)))

    def _note(self, make: Callable[[], Line]) -> None:
        if self._over:
            return
        try:
            if self._file is None:
                self._file = _create(self._recording.path)
                self._write(encode_line(_make_header(self._recording)))
            self._write(encode_line(make()))
        except Exception as error:  # a full disk, or whatever: it must not cost an answer
            self._stop(f"{type(error).__name__}: {error}")

    def _write(self, line: bytes) -> None:
        if self._file is None:  # it has just ended
            return
        if self._written + len(line) > self._recording.most_bytes:
            self._stop(f"it has {self._written} bytes, and more would be too large")
            return
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._written += len(line)

    def _stop(self, reason: str) -> None:
        self._over = True
        if self._file is not None:
            os.close(self._file)
            self._file = None
        log(_log, logging.WARNING, "recording ended", file=self._recording.path, reason=reason)


def _reduce(outcome: Outcome) -> Outcome:
    """Return an outcome without the results that decide nothing."""
    replace = msgspec.structs.replace
    done = outcome.done
    match done:
        case Decoded():
            activations = tuple(map(_without_values, done.activations))
            done = replace(done, likelihoods={}, activations=activations)
        case PromptsRead():
            scores = None if done.scores is None else replace(done.scores, scores=())
            activations = tuple(map(_without_values, done.activations))
            done = replace(done, scores=scores, activations=activations)
        case LoadStep():
            loaded = None if done.loaded is None else replace(done.loaded, notes=())
            done = replace(done, loaded=loaded)
    return replace(outcome, done=done)


def _without_values(activations: Activations) -> Activations:
    return msgspec.structs.replace(activations, values=())


def _create(path: str) -> int:
    """Make the file, for this user alone. One that is there is kept as PATH.old.

    Raises OSError.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would block the thread
            raise OSError("it is not a regular file")
        os.replace(path, f"{path}.old")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _make_header(recording: Recording) -> RecordHeader:
    return RecordHeader(
        format=FORMAT,
        began=time.time(),
        clock=time.perf_counter(),
        versions=find_versions(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        device=describe_device(),
        options=dict(recording.options),
    )


def find_versions() -> dict[str, str]:
    """The versions of what decides what is computed."""
    found = {"mlxsrv": __version__, "python": platform.python_version()}
    for name in ("mlx", "mlx-lm", "llguidance"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class RecordedScheduler(Scheduler):
    """A scheduler whose orders, plans and outcomes are written down."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def plan(self, orders: Sequence[Received] = ()) -> RoundPlan:
        self._recorder.note_orders(orders)
        plan = super().plan(orders)
        self._recorder.note_plan(plan)
        return plan

    def settle(self, work: WorkItem, outcome: Outcome) -> None:
        self._recorder.note_outcome(outcome)
        super().settle(work, outcome)
