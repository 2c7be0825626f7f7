"""Ranks answer as one process does: every token, in float32."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ranks import Ranks, ranks
from tests.support.serving import serving
from tests.support.tiny import write_model

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
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return [(choice["text"], choice["finish_reason"]) for choice in answer.json()["choices"]]


def ask_all(url: str) -> list[list[tuple[str, str]]]:
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(lambda body: ask(url, body), bodies()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads two and three ranks can share."""
    heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "num_hidden_layers": 3}
    sizes = {"hidden_size": 96, "intermediate_size": 192, "moe_intermediate_size": 96}
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", plain=True, **heads, **sizes)


@pytest.fixture(scope="module")
def expected(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    with serving(tmp_path_factory.mktemp("alone"), "--model", f"m={folder}") as server:
        return ask_all(server.url)


@pytest.fixture(scope="module", params=[("tensor", 2), ("pipeline", 2), LONG])
def started(
    request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    split, count = request.param
    options = ("--model", f"m={folder}", "--parallel", split)
    with ranks(count, tmp_path_factory.mktemp("ranks"), *options) as running:
        yield running


def test_ranks_give_the_text_of_one_process(started: Ranks, expected: list[Any]) -> None:
    for _ in range(2):  # the second time the prompts are kept
        assert ask_all(started.server.url) == expected
    usage = httpx.post(
        f"{started.server.url}/v1/completions",
        json={**bodies()[6], "max_tokens": 1},
        timeout=60,
    ).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > 100
    assert "Traceback" not in "".join(map(started.read_log, range(len(started.processes))))
