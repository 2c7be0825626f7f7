"""Two ranks answer many requests of all kinds as one process does."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.mixed import Answer, ask_mixed, make_mixed
from tests.support.ranks import ranks, write_divisible
from tests.support.serving import serving

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks, pytest.mark.long]

REQUESTS = make_mixed(500, seed=20)
CLIENTS = 16


def ask_all(url: str) -> list[Answer]:
    with ThreadPoolExecutor(CLIENTS) as pool:
        return list(pool.map(lambda request: ask_mixed(url, request), REQUESTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_divisible(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with serving(tmp_path_factory.mktemp("alone"), "--model", f"m={folder}") as server:
        return ask_all(server.url)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_two_ranks_answer_many_requests_as_one_process(
    folder: Path, expected: list[Answer], tmp_path: Path, split: str
) -> None:
    with ranks(2, tmp_path, "--model", f"m={folder}", "--parallel", split, "--metrics") as running:
        answers = ask_all(running.server.url)
        metrics = httpx.get(f"{running.server.url}/metrics", timeout=60).text.splitlines()
        running.signal(0, signal.SIGTERM)
        assert running.exit_statuses() == [0, 0]
        assert all("Traceback" not in running.read_log(rank) for rank in (0, 1))
    assert 'mlxsrv:num_requests_running{model_name="m"} 0.0' in metrics
    [cached] = [line for line in metrics if line.startswith("mlxsrv:prefix_cache_hits_total{")]
    assert float(cached.split()[-1]) > 10_000, cached
    fixed = [number for number, request in enumerate(REQUESTS) if request.fixed]
    assert len(fixed) > len(REQUESTS) / 2
    different = [
        (REQUESTS[number], answers[number], expected[number])
        for number in fixed
        if not answers[number].equals(expected[number])
    ]
    assert different == []
