"""The file of a record: JSON lines, of which the first says what the file is.

Then come, for each round of the device thread: its orders, if there were any; its plan, which is
written before it is done; and the outcome of each work item. So a file that breaks off shows what
was to be done next.

Results that decide nothing are left out: log-probabilities, activations, vectors. So is what a plan
repeats of the orders: token ids.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Outcome
from mlxsrv.engine.plans import Admit, WorkItem
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.generation.outputs import Vectors

FORMAT = 7
_GZIP = b"\x1f\x8b"

Number = int | float | bool | None


class RecordHeader(msgspec.Struct, frozen=True, tag="record", kw_only=True):
    """The first line.

    Attributes:
        format: the version of the file's format.
        began: seconds since 1970.
        clock: the same moment by the clock of outcomes.
        versions: of mlxsrv, MLX, mlx-lm and Python.
        system: the operating system and the processor.
        device: what MLX computes on; empty without a back end.
        options: of the server, those that are numbers or switches and have not their defaults.
    """

    format: int
    began: float
    clock: float
    versions: dict[str, str]
    system: str
    device: dict[str, str | int]
    options: dict[str, Number]


class OrdersLine(msgspec.Struct, frozen=True, tag="orders"):
    """The orders that a round begins with."""

    orders: tuple[Received, ...]


class PlanLine(msgspec.Struct, frozen=True, tag="plan"):
    """The work items of a round, as `shorten` returns them."""

    items: tuple[WorkItem, ...]


class OutcomeLine(msgspec.Struct, frozen=True, tag="outcome"):
    """The outcome of the next work item of the plan."""

    outcome: Outcome


Line = OrdersLine | PlanLine | OutcomeLine


class RecordError(ValueError):
    """The file cannot be read, or is no record of this version."""


def shorten(items: tuple[WorkItem, ...]) -> tuple[WorkItem, ...]:
    """Return the work items without the token ids of their jobs, which their orders have."""
    return tuple(map(_shorten, items))


def _shorten(work: WorkItem) -> WorkItem:
    if isinstance(work, Admit):
        jobs = tuple(Job(job.id, job.model, max_tokens=job.max_tokens) for job in work.jobs)
        return msgspec.structs.replace(work, jobs=jobs)
    return work


def encode_line(line: RecordHeader | Line) -> bytes:
    """Make a line of a file."""
    return _ENCODER.encode(line) + b"\n"


def _encode_shape(array: Vectors) -> tuple[int, ...]:
    """Vectors by their shape: nothing depends on their values."""
    return array.shape


_ENCODER = msgspec.json.Encoder(enc_hook=_encode_shape)


def _decode_shape(_type: Any, shape: Any) -> Vectors:
    return np.zeros(tuple(shape), np.float32)


class RecordedRound(msgspec.Struct):
    """One round.

    Attributes:
        number: counts from 1.
        items: work items; None if the record ends before there was a plan.
    """

    number: int
    orders: tuple[Received, ...] = ()
    items: tuple[WorkItem, ...] | None = None
    outcomes: list[Outcome] = []


class RecordReader:
    """Reads a record, which may be compressed with gzip.

    Attributes:
        header: its first line.
        cut: the last line is not whole; known after an iteration.

    Raises:
        RecordError: the file cannot be read, or is no record of this format.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._lines = msgspec.json.Decoder(Line, dec_hook=_decode_shape)
        self.cut = False
        self.header = self._read_header()

    def __iter__(self) -> Iterator[RecordedRound]:
        """Yield the rounds in order. Raises RecordError for a line that is none."""
        this = RecordedRound(1)
        for line in self._decode():
            match line:
                case OrdersLine(orders):
                    if this.items is not None:
                        yield this
                        this = RecordedRound(this.number + 1)
                    this.orders = orders
                case PlanLine(items):
                    if this.items is not None:
                        yield this
                        this = RecordedRound(this.number + 1)
                    this.items = items
                case OutcomeLine():
                    this.outcomes.append(line.outcome)
        if this.items is not None or this.orders:
            yield this

    def _read_header(self) -> RecordHeader:
        first = next(self._read(), b"")
        try:
            kind = msgspec.json.decode(first, type=dict[str, Any])
            if kind.get("type") != "record":
                raise ValueError
        except ValueError:
            told = f"{self._path} is no record: mlxsrv --record FILE writes one"
            raise RecordError(told) from None
        if kind.get("format") != FORMAT:
            maker = kind.get("versions", {}).get("mlxsrv", "?")
            raise RecordError(
                f"{self._path} has format {kind.get('format')}, and this is mlxsrv for format "
                f"{FORMAT}; it was recorded by mlxsrv {maker}, which can replay it"
            )
        try:
            return msgspec.json.decode(first, type=RecordHeader)
        except ValueError:
            raise self._damaged(1) from None

    def _decode(self) -> Iterator[Line]:
        """Yield the lines behind the first. The last may not be whole: then the process or the
        disk gave out."""
        for number, line in enumerate(self._read(), 1):
            if number == 1:
                continue
            try:
                yield self._lines.decode(line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise self._damaged(number) from None
                self.cut = True

    def _damaged(self, line: int) -> RecordError:
        rest = "; without it and what follows, the rest can be replayed" if line > 2 else ""
        return RecordError(f"{self._path}: line {line} is damaged{rest}")

    def _read(self) -> Iterator[bytes]:
        try:
            with open(self._path, "rb") as file:
                packed = file.read(2) == _GZIP
            with gzip.open(self._path) if packed else open(self._path, "rb") as file:
                yield from file
        except EOFError:
            self.cut = True  # of the compressed file
        except OSError as error:
            raise RecordError(f"{self._path}: {error.strerror or error}") from None
