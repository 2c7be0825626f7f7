"""A replica that does not answer is left out of what all are asked, and no other one is."""

from __future__ import annotations

import os
import re
import signal

from tests.ray.conftest import Cluster, wait_for


def test_one_that_hangs_is_left_out_and_nobody_else(cluster: Cluster) -> None:
    cluster.deploy(cluster.settings, 3)
    processes = wait_for(
        lambda: found if len(found := cluster.replicas()) == 3 else None, "three serve"
    )
    with cluster.client() as client:
        told = client.get("/health?verbose=1", headers={"x-session-id": "1"}).json()
        assert {told["replica"], *told["others"]} == processes.keys()
        hung = next(iter(told["others"]))
        os.kill(processes[hung], signal.SIGSTOP)
        try:
            metrics = client.get("/metrics", headers={"x-session-id": "1"})
        finally:
            os.kill(processes[hung], signal.SIGCONT)
    assert metrics.status_code == 200
    assert set(re.findall(r'replica="(\w+)"', metrics.text)) == processes.keys() - {hung}
