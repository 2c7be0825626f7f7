"""The soak, for seconds: `make soak` is the same for minutes or hours."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.crowd import DEEDS
from tests.soak.run import format_run, soak


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="what is held is read in /proc")
def test_a_crowd_leaves_nothing_behind(tmp_path: Path) -> None:
    run = soak(tmp_path, seconds=3, members=12)
    assert run.failures == [], format_run(run)
    assert run.table.keys() == DEEDS.keys()
    assert run.generations > 50
