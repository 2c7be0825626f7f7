"""Replicas of the demo model on this machine, under Ray Serve."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
import ray
from ray import serve

from mlxsrv.replicas import ReplicaScale, deployment
from mlxsrv.replicas.application import import_serve
from mlxsrv.settings import Settings

T = TypeVar("T")

METRIC = re.compile(r"ray_mlxsrv_(\w+)\{(.*)\} (\S+)")

KEY = "sk-of-the-tests"
RAY_WAS_LATE = "The current node timed out during startup"
KEYED = {"authorization": f"Bearer {KEY}"}


def wait_for(what: Callable[[], T | None], why: str, seconds: float = 180) -> T:
    """The first true value of `what()`; fails with `why` if there is none in time."""
    deadline = time.monotonic() + seconds
    while not (value := what()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {why}"
        time.sleep(0.1)
    return value


def counted(metric: str, **labels: str) -> set[str]:
    """Return the replicas that have counted something, as Ray's nodes publish our metrics.

    Args:
        labels: that the metric has.
    """
    found = set()
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for line in httpx.get(url, timeout=60).text.splitlines():
            sample = METRIC.fullmatch(line)
            if sample is not None and sample[1] == metric and float(sample[3]) > 0:
                known = dict(re.findall(r'(\w+)="([^"]*)"', sample[2]))
                if labels.items() <= known.items():
                    found.add(known["replica"])
    return found


class RayLate(Exception):
    """Ray has given up its own start, for which it has a fixed time."""


def again(start: Callable[[], T]) -> T:
    """The result of `start`, which is called anew where Ray has given up its own start."""
    for _ in range(2):
        try:
            return start()
        except RayLate:
            continue
    return start()


def start_ray(**options: Any) -> None:
    """Start Ray in this process. Raises RayLate."""
    try:
        ray.init(**options)
    except Exception as error:
        ray.shutdown()
        if RAY_WAS_LATE in str(error):
            raise RayLate from error
        raise


class Command:
    """`python -m mlxsrv replicas`, running.

    Attributes:
        url: what it has announced.
        announced: how many replicas it has announced, in words.
    """

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log
        announced = wait_for(self._announcement, "the replicas serve", seconds=120)
        self.announced, self.url = announced.groups()

    def _announcement(self) -> re.Match[str] | None:
        if self._process.poll() is not None:
            text = self._log.read_text()
            assert RAY_WAS_LATE in text, text
            raise RayLate
        pattern = r"^mlxsrv: (.*) on (http\S+)$"
        return re.search(pattern, self._log.read_text(), re.MULTILINE)

    def stop(self) -> None:
        """End it with SIGTERM, after which it has nothing to complain about."""
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(180) == 0, self._log.read_text()
        assert "Traceback" not in self._log.read_text()


@contextmanager
def begun(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """The process of the command with these options, and its log; that and its data are in
    `folder`."""
    command = [sys.executable, "-m", "mlxsrv", "replicas", "--port", "0"]
    own = ["--num-cpus-per-replica", "0.1", "--data-dir", str(folder / "data")]
    log = folder / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *own, *options],
            stdout=file,
            stderr=file,
            env=os.environ | {"HF_HUB_CACHE": "/nonexistent"},
            start_new_session=True,  # so that all its processes can be killed together
        )
    try:
        yield process, log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def commanded(folder: Path, *options: str) -> Iterator[Command]:
    """The command with these options, when it serves; its log and its data are in `folder`."""
    with ExitStack() as stack:
        yield again(lambda: Command(*stack.enter_context(begun(folder, *options))))


class Cluster:
    """Ray on this machine, with Serve and the app."""

    def __init__(self, folder: Path) -> None:
        self.settings = Settings(
            data_dir=str(folder),
            metrics=True,
            shutdown_grace=20.0,
            api_key=(KEY,),
            rate_limit=10**6,
        )
        import_serve()
        with socket.create_server(("127.0.0.1", 0)) as free:  # held until Ray has its own ports
            port = free.getsockname()[1]
            again(
                lambda: start_ray(
                    num_cpus=4,
                    include_dashboard=False,
                    object_store_memory=96 * 1024 * 1024,
                    log_to_driver=False,
                )
            )
        self.url = f"http://127.0.0.1:{port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        self.deploy(self.settings)

    def deploy(self, settings: Settings, count: int = 2) -> None:
        """Bring the replicas to these settings: old ones drain while new ones serve."""
        scale = ReplicaScale(replicas=count, cpus=0.1, period=1.0)
        app = deployment(settings, scale, local=True)
        serve.run(app, name="mlxsrv", route_prefix="/")

    def at_each(self) -> dict[str, dict[str, str]]:
        """Headers of a session that leads to each of two replicas, by the replicas' ids."""
        both = self.both()
        found: dict[str, dict[str, str]] = {}
        with self.client() as client:
            for number in range(100):
                session = {"x-session-id": str(number)}
                answer = client.get("/health", headers=session).raise_for_status()
                found.setdefault(answer.headers["x-mlxsrv-replica"], session)
                if found.keys() == both.keys():
                    return found
        raise AssertionError(f"all sessions lead to {found}")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, headers=KEYED)

    def async_client(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=60, limits=limits, headers=KEYED)

    def replicas(self) -> dict[str, int]:
        """The processes of the replicas that serve, by the replicas' ids."""
        details = serve.context._get_global_client().get_serve_details()
        [app] = details["applications"].values()
        [deployed] = app["deployments"].values()
        found = deployed["replicas"]
        return {each["replica_id"]: each["pid"] for each in found if each["state"] == "RUNNING"}

    def both(self) -> dict[str, int]:
        """As `replicas`, when there are two."""
        return wait_for(lambda: found if len(found := self.replicas()) == 2 else None, "two serve")

    def close(self) -> None:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    os.environ.setdefault("HF_HUB_CACHE", "/nonexistent")
    cluster = Cluster(tmp_path_factory.mktemp("data"))
    try:
        yield cluster
    finally:
        cluster.close()
