"""Real ranks on this machine: processes that MLX's ring connects over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.serving import PATIENCE, Server, environment, wait_for


class Ranks:
    """Running ranks of one server.

    Attributes:
        processes: of the ranks, in their order.
        server: rank 0, which serves.
    """

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        self.processes = processes
        self.folder = folder
        self.server = Server(processes[0], self.log(0))

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def read_log(self, rank: int) -> str:
        return self.log(rank).read_text()

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def exit_statuses(self, *, seconds: float = PATIENCE) -> list[int]:
        """Wait until all have ended."""
        wait_for(
            lambda: all(each.poll() is not None for each in self.processes),
            seconds=seconds,
            why="a rank does not end",
        )
        return [each.returncode for each in self.processes]


def launch(arguments: Sequence[str], count: int, folder: Path, variables: bool = True) -> Ranks:
    """Start so many ranks, with logs in `folder`. `variables`: with those of the launcher."""
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in with_sockets]
    for each in with_sockets:
        each.close()
    folder.mkdir(parents=True, exist_ok=True)
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    own = {"MLX_HOSTFILE": str(hostfile), "OPENBLAS_NUM_THREADS": "1"}
    processes = []
    for rank in range(count):
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "mlxsrv", *arguments],
                    env=environment() | ({"MLX_RANK": str(rank), **own} if variables else {}),
                    stdout=log,
                    stderr=log,
                )
            )
    return Ranks(processes, folder)


@contextmanager
def ranks(count: int, folder: Path, *options: str) -> Iterator[Ranks]:
    """Ranks that serve; all are killed at the end, if they still run."""
    arguments = ["--port", "0", "--log-format", "json", *options]
    started = launch(arguments, count, folder)
    try:
        wait_for(
            lambda: (
                started.server.url or any(each.poll() is not None for each in started.processes)
            ),
            why="the ranks do not serve",
        )
        with started.server.client() as client:
            wait_for(lambda: client.get("/health").status_code == 200, why="no model is loaded")
        yield started
    finally:
        for each in started.processes:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()
            each.wait()
