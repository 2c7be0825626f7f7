"""Records of a Bench, and their replays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from mlxsrv.engine.recording.record_file import RecordReader
from mlxsrv.engine.recording.recorder import RecordedScheduler, Recorder, Recording
from mlxsrv.engine.recording.replay import Replay, ReplaySummary, look_ahead

BYTES = 1 << 30


@contextmanager
def recorded(path: Path, *, tokens: bool = False, most_bytes: int = BYTES) -> Iterator[None]:
    """Have each Bench that is made meanwhile write a record."""
    recording = Recording(path=str(path), tokens=tokens, most_bytes=most_bytes)

    def make() -> RecordedScheduler:
        return RecordedScheduler(Recorder(recording))

    with patch("tests.support.scheduling.Scheduler", make):
        yield


def replay(path: Path) -> ReplaySummary:
    """Replay a record without a model."""
    reader = RecordReader(str(path))
    return Replay(reader, look_ahead(reader)).run()
