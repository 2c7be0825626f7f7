"""`python -m mlxsrv replicas` serves until a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster as Nodes

from tests.ray.conftest import begun, commanded, wait_for


def test_the_command_serves_until_a_signal(tmp_path: Path) -> None:
    with commanded(tmp_path, "--replicas", "2", "--rate-limit", "6") as command:
        assert command.announced == "2 replicas"
        asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
        answer = httpx.post(f"{command.url}/v1/chat/completions", json=asked, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        # Each replica gets some of these. Every ten seconds one more may be granted.
        statuses = [
            httpx.get(f"{command.url}/v1/models", headers={"x-session-id": str(number)}).status_code
            for number in range(12)
        ]
        assert set(statuses) == {200, 429}
        assert 5 <= statuses.count(200) <= 7, "they count together"
        command.stop()


def test_a_signal_ends_a_start_for_which_no_machine_has_room(tmp_path: Path) -> None:
    with begun(tmp_path, "--num-cpus-per-replica", "1000") as (process, log):
        wait_for(lambda: "Adding 1 replica" in log.read_text(), "it waits for the replica")
        process.send_signal(signal.SIGTERM)
        assert process.wait(180) == 0, log.read_text()
        assert "Traceback" not in log.read_text()


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a Ray cluster in which nothing runs."""
    small = {"num_cpus": 1, "object_store_memory": 96 * 1024 * 1024, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=small)
    try:
        yield nodes.address
    finally:
        ray.shutdown()
        nodes.shutdown()


class Neighbour:
    """The application of somebody else."""

    def __call__(self) -> str:
        return "here"


def test_an_existing_cluster_is_left_as_it_was(address: str, tmp_path: Path) -> None:
    with commanded(tmp_path, "--ray-address", address) as command:
        assert httpx.get(f"{command.url}/health").json() == {"status": "ok"}
        command.stop()
    ray.init(address=address, log_to_driver=False)
    assert not serve.status().applications
    neighbour: Any = serve.deployment(ray_actor_options={"num_cpus": 0})(Neighbour)
    handle = serve.run(neighbour.bind(), route_prefix=None)
    program = [sys.executable, "-m", "mlxsrv", "replicas", "--port", "0"]
    refused = subprocess.run(
        [*program, "--ray-address", address], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 2, refused.stderr
    assert "Serve runs there already" in refused.stderr
    assert handle.remote().result() == "here"
    serve.shutdown()
