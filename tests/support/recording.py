"""Records of a Bench, and their replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.recording.record_file import RecordReader
from mlxsrv.engine.recording.recorder import RecordedScheduler, Recorder, Recording
from mlxsrv.engine.recording.replay import Replay, ReplaySummary
from mlxsrv.generation.parameters import Sampling
from tests.support.fake_device import FakeDevice
from tests.support.scheduling import Bench

BYTES = 1 << 30
LOAD = Load(model="m", path="/home/someone/m", max_rows=4, prefill_chunk=64, max_gap=0.1)
FIRST = 3_000_000_000
"""An id so long that it is not found in a file by chance."""


def job(number: int, prompt: tuple[int, ...], **more: Any) -> Job:
    asked: dict[str, Any] = {"max_tokens": 5, "end_tokens": frozenset(), "sampling": Sampling()}
    return Job(number, "m", prompt, **(asked | more))


class Writer(FakeDevice):
    """Draws ids from FIRST on; the fifth of each answer is FIRST."""

    def draw(self, job: Job, place: int) -> int:
        return FIRST if place == 4 else FIRST + 100 * job.id + place


@contextmanager
def recorded(path: Path, *, most_bytes: int = BYTES) -> Iterator[None]:
    """Have each Bench that is made meanwhile write a record."""
    recording = Recording(path=str(path), most_bytes=most_bytes)

    def make() -> RecordedScheduler:
        return RecordedScheduler(Recorder(recording))

    with patch("tests.support.scheduling.Scheduler", make):
        yield


def replay(path: Path) -> ReplaySummary:
    """Replay a record without a model."""
    reader = RecordReader(str(path))
    return Replay(reader).run()


def write_record(path: Path, *jobs: Job, device: FakeDevice | None = None) -> Bench:
    """Record these jobs, one after the other."""
    with recorded(path):
        bench = Bench(Writer() if device is None else device)
    bench.load(LOAD)
    for each in jobs:
        bench.submit(each)
        bench.finish()
    return bench
