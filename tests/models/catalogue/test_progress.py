"""The progress of loads, as the log tells it. `test_first_download.py` has that of downloads."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from mlxsrv.generation.status import ByteProgress
from mlxsrv.models.catalogue import progress
from mlxsrv.models.catalogue.progress import LoadProgress


def test_a_long_load_is_logged_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times: Iterator[float] = iter(())
    monkeypatch.setattr(progress, "monotonic", lambda: next(times))
    with caplog.at_level(logging.INFO, "mlxsrv.models"):
        times = iter([0.0, 1.0, 2.9])
        with LoadProgress("short", 100) as load:
            load.add(40)
            load.add(60)
        assert caplog.records == []
        times = iter([0.0, 2.0, 3.1, 3.1, 6.0, 6.2, 6.2])
        with LoadProgress("long", 100) as load:
            for _ in range(4):
                load.add(30)
            whole = load.arrived
        assert whole == ByteProgress(100, 100), "files may hold more than was expected"
        assert load.arrived is None
    told = [vars(record)["mlxsrv_fields"] for record in caplog.records]
    assert [line["percent"] for line in told] == [60, 100]
    assert told[0] == {"model": "long", "percent": 60, "completed": 60, "total": 100}
