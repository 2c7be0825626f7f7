"""Ranks answer as one process does, and as mlx-lm on as many ranks: every token, in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ranks import PATIENCE, Ranks, launched, ranks, write_divisible
from tests.support.serving import serving

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks]

LONG = pytest.param(("tensor", 3), marks=pytest.mark.long)
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}


def bodies() -> list[dict[str, Any]]:
    """Requests of all kinds; they join and leave each other's batches."""
    long = "the quick brown fox jumps over the lazy dog. " * 40
    plain = [
        {"prompt": f"{number} {long[: 30 * number]}", "max_tokens": 8 + 5 * number}
        for number in range(6)
    ]
    return [
        *({**body, "temperature": 0} for body in plain),
        {"prompt": long, "max_tokens": 20, "temperature": 0},
        {"prompt": "a seed", "max_tokens": 20, "temperature": 1.0, "seed": 7, "n": 3},
        {"prompt": "a seed", "max_tokens": 20, "temperature": 0.8, "top_p": 0.9, "seed": 8},
        {"prompt": "and so on", "max_tokens": 20, "temperature": 0, "frequency_penalty": 0.9},
        {"prompt": "how likely", "max_tokens": 8, "temperature": 0, "logprobs": 2},
        {"prompt": "{", "max_tokens": 40, "temperature": 0, "guided_json": SCHEMA},
    ]


def ask(url: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def ask_tokens(url: str, body: dict[str, Any]) -> list[str]:
    """The text of each token of the answer."""
    answer = httpx.post(f"{url}/v1/completions", json={**body, "logprobs": 0}, timeout=PATIENCE)
    tokens: list[str] = answer.json()["choices"][0]["logprobs"]["tokens"]
    return tokens


def ask_all(url: str) -> list[list[tuple[str, str]]]:
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda body: ask(url, body), bodies()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_divisible(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with serving(tmp_path_factory.mktemp("alone"), "--model", f"m={folder}") as server:
        return ask_all(server.url)


@pytest.fixture(scope="module", params=[("tensor", 2), ("pipeline", 2), LONG])
def division(request: pytest.FixtureRequest) -> tuple[str, int]:
    """The split, and the number of ranks."""
    split, count = request.param
    return split, count


@pytest.fixture(scope="module")
def started(
    division: tuple[str, int], folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    split, count = division
    options = ("--model", f"m={folder}", "--parallel", split)
    with ranks(count, tmp_path_factory.mktemp("ranks"), *options) as running:
        yield running


def test_ranks_give_the_text_of_one_process(started: Ranks, expected: list[Any]) -> None:
    for _ in range(2):  # the second time the prompts are kept
        assert ask_all(started.server.url) == expected
    usage = httpx.post(
        f"{started.server.url}/v1/completions",
        json={**bodies()[6], "max_tokens": 1},
        timeout=PATIENCE,
    ).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 100
    assert "Traceback" not in "".join(map(started.read_log, range(len(started.processes))))


def test_ranks_give_the_tokens_of_mlx_lm_on_as_many_ranks(
    started: Ranks, division: tuple[str, int], folder: Path, tmp_path: Path
) -> None:
    greedy = [bodies()[number] | {"max_tokens": 12} for number in (0, 4, 6)]
    work, done = tmp_path / "work", tmp_path / "work.done"
    work.write_text(json.dumps([(body["prompt"], body["max_tokens"]) for body in greedy]))
    split, count = division
    program = ["-m", "tests.support.sharded", split, str(folder), str(work)]
    with launched(count, tmp_path / "log", *program) as process:
        process.wait(PATIENCE)
    assert done.exists(), (tmp_path / "log").read_text()
    with ThreadPoolExecutor(len(greedy)) as pool:  # in one batch; mlx-lm reads one after the other
        drawn = list(pool.map(lambda body: ask_tokens(started.server.url, body), greedy))
    assert drawn == json.loads(done.read_text())
