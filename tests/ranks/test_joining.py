"""Ranks that do not come: the others say which and why, and end."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ranks import PATIENCE, launcher_variables
from tests.support.serving import environment

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks]

SERVER = """
import sys
from mlxsrv.cli import main
from mlxsrv.engine.ranks import joining

joining.JOIN_SECONDS, joining.COME_SECONDS = map(float, sys.argv[1:3])
main(["--port", "0", "--parallel", "tensor"])
"""
"""A rank that waits so many seconds for MLX to connect all, and so many for the others to come."""

STRANGER = """
import time
from mlxsrv.engine.ranks.rank_group import RankGroup, Split

RankGroup.join(Split.TENSOR).exchange(b"")
time.sleep(600)
"""
"""A rank that MLX connects, and that does not come to rank 0."""


@contextmanager
def started(folder: Path, *programs: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Two ranks' variables for these programs, whose output is read together; all are killed."""
    variables = launcher_variables(folder, 2)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", *program],
            env=environment() | variables | {"MLX_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, program in enumerate(programs)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_a_rank_that_does_not_come_to_rank_0_is_named(tmp_path: Path) -> None:
    with started(tmp_path, (SERVER, "60", "1"), (STRANGER,)) as (rank0, _):
        said, _ = rank0.communicate(timeout=PATIENCE)
        assert rank0.returncode == 1, said
        assert "rank 1 did not come to 127.0.0.1:" in said
        assert "Traceback" not in said
        assert "Timeout" not in said


def test_a_rank_that_mlx_waits_for_ends_the_others_which_tell_where_they_wait(
    tmp_path: Path,
) -> None:
    with started(tmp_path, (SERVER, "3", "1")) as (rank0,):
        said, _ = rank0.communicate(timeout=PATIENCE)
        assert rank0.returncode == 1, said
        assert "Timeout (0:00:03)!" in said
        assert 'rank_group.py", line' in said
