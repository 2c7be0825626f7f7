"""Two of Ray's nodes, on one machine: each has a replica, and a proxy that finds conversations."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster as Nodes

from mlxsrv.replicas import ReplicaScale, deployment
from mlxsrv.replicas.application import import_serve
from mlxsrv.settings import Settings
from tests.ray.conftest import counted, wait_for

CONVERSATIONS = 12
TURNS = ("Which endpoints do you serve? " * 8, "Tell me more.", "How do I stream?")
LISTENS = "0A"
"""The state in /proc/net/tcp."""


def listeners(port: int) -> int:
    """Return how many sockets listen at a port: the proxies of one machine share it."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == LISTENS for row in rows)


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where the proxies of both nodes listen."""
    monkeypatch.setenv("HF_HUB_CACHE", "/nonexistent")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    import_serve()
    small = {"num_cpus": 1, "object_store_memory": 96 * 1024 * 1024, "include_dashboard": False}
    nodes = Nodes(initialize_head=True, head_node_args=small)
    try:
        nodes.add_node(num_cpus=1, object_store_memory=small["object_store_memory"])
        ray.init(address=nodes.address, log_to_driver=False)
        serve.start(proxy_location="EveryNode", http_options={"host": "127.0.0.1", "port": port})
        settings = Settings(data_dir=str(tmp_path), metrics=True)
        # A replica takes all of a node's CPUs, so each node has one.
        app = deployment(settings, ReplicaScale(replicas=2, cpus=1.0), local=True)
        serve.run(app, name="mlxsrv", route_prefix="/")
        wait_for(lambda: listeners(port) == 2, "each node has a proxy")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        nodes.shutdown()


def read_anew(url: str, number: int) -> list[int]:
    """Return, for each later turn, how many tokens of the prompt before were not cached."""
    messages = [{"role": "system", "content": f"You are helper {number}."}]
    known, anew = 0, []
    for text in TURNS:
        messages.append({"role": "user", "content": text})
        body = {"messages": messages, "max_tokens": 16, "temperature": 0}
        # A connection of its own goes to any of the proxies.
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append(answer["choices"][0]["message"])
        usage = answer["usage"]
        anew.append(known - usage["prompt_tokens_details"]["cached_tokens"])
        known = usage["prompt_tokens"]
    return anew[1:]


@pytest.mark.long  # Ray gives a node 30 s to start, whatever else runs
def test_each_proxy_finds_the_conversations(url: str) -> None:
    details = serve.context._get_global_client().get_serve_details()
    [app] = details["applications"].values()
    [deployed] = app["deployments"].values()
    nodes = {each["node_id"] for each in deployed["replicas"]}
    assert len(nodes) == 2
    assert nodes == set(details["proxies"])
    anew = [read_anew(url, number) for number in range(CONVERSATIONS)]
    assert max(map(max, anew)) <= 0, anew
    replicas = {each["replica_id"] for each in deployed["replicas"]}
    read = "prefix_cache_queries_total"
    wait_for(lambda: counted(read) == replicas, "both have answered")
