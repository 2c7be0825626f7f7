"""Real ranks on this machine: processes that MLX's ring connects over loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxsrv.formats.safetensors import read_header
from tests.support.serving import Server, environment, wait_for
from tests.support.tiny import write_model

PATIENCE = 180.0
"""Seconds that a test waits for ranks: each collective waits until all of them had a core."""


def write_divisible(folder: Path) -> Path:
    """Write a model that two and three ranks can share, by either split, and return its folder."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 3}
    sizes = {"hidden_size": 96, "intermediate_size": 192, "moe_intermediate_size": 96}
    write_model(folder, "qwen3_moe", plain=True, **heads, **sizes)
    # mlx-lm looks up in it which files a rank of a pipeline needs.
    names, _ = read_header(folder / "model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


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

    def ended(self) -> bool:
        """Whether one of them has ended."""
        return any(each.poll() is not None for each in self.processes)

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


def launcher_variables(folder: Path, count: int) -> dict[str, str]:
    """The variables of MLX's launcher for so many ranks on this machine, but for the rank's own."""
    with_sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    hosts = [[f"127.0.0.1:{each.getsockname()[1]}"] for each in with_sockets]
    for each in with_sockets:
        each.close()
    folder.mkdir(parents=True, exist_ok=True)
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps(hosts))
    return {"MLX_HOSTFILE": str(hostfile), "OPENBLAS_NUM_THREADS": "1"}


def launch(arguments: Sequence[str], count: int, folder: Path, variables: bool = True) -> Ranks:
    """Start so many ranks, with logs in `folder`. `variables`: with those of the launcher."""
    own = launcher_variables(folder, count)
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
def launched(count: int, log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """MLX's launcher, which starts Python on so many ranks; what they write comes to `log`. All of
    them are killed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = Path(sys.executable).with_name("mlx.launch")
    options = ["-n", str(count), "--backend", "ring", "-p", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [program, *options, "--", sys.executable, *arguments],
            stdout=file,
            stderr=file,
            env=environment(),
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def starting(count: int, folder: Path, *options: str) -> Iterator[Ranks]:
    """Ranks that were started; all are killed at the end, if they still run."""
    started = launch(["--port", "0", "--log-format", "json", *options], count, folder)
    try:
        yield started
    finally:
        for each in started.processes:
            if each.poll() is None:
                os.kill(each.pid, signal.SIGCONT)
                each.kill()
            each.wait()


@contextmanager
def ranks(count: int, folder: Path, *options: str) -> Iterator[Ranks]:
    """Ranks that serve."""
    with starting(count, folder, *options) as started:
        wait_for(
            lambda: started.server.log("listening") or started.ended(),
            seconds=PATIENCE,
            why="the ranks do not serve",
        )
        with started.server.client() as client:
            wait_for(
                lambda: client.get("/health").json()["status"] != "loading",
                seconds=PATIENCE,
                why="the load of the model does not end",
            )
        yield started
