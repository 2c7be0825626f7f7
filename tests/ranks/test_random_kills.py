"""A rank is killed at a random point: every process ends, and every request with an answer or an
error."""

from __future__ import annotations

import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from enum import Enum, auto
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.ranks import PATIENCE, Ranks, starting
from tests.support.serving import wait_for
from tests.support.tiny import write_model

pytestmark = [pytest.mark.served, pytest.mark.slow, pytest.mark.ranks, pytest.mark.long]

CLIENTS = 6
START_SECONDS = 2.5
JOIN_PATIENCE = 90.0
"""Seconds: ranks wait a minute for each other when they start."""
LONG = "the quick brown fox jumps over the lazy dog. " * 30
BODIES: list[dict[str, Any]] = [
    {"prompt": "on and on", "max_tokens": 200, "stream": True},
    {"prompt": LONG, "max_tokens": 20, "stream": True},
    {"prompt": "a seed", "max_tokens": 40, "seed": 7, "n": 2},
    {"prompt": "how likely", "max_tokens": 30, "temperature": 0, "logprobs": 2},
]


class Ending(Enum):
    """The end of a request."""

    ANSWERED = auto()
    ERROR = auto()  # as the API has them
    REFUSED = auto()  # there is no connection
    CLOSED = auto()  # it ends before the answer does


class Phase(Enum):
    """When the rank is killed: at most so many seconds after its log has an event."""

    LOAD = ("ranks joined", 0.6)
    SERVICE = ("model loaded", 3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose load takes a while."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 8, "num_key_value_heads": 4}
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", plain=True, **sizes)


def ask(url: str, body: dict[str, Any]) -> Ending:
    """Raises httpx.TimeoutException if nothing comes for a long time."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE) as answer:
            lines = [line for line in answer.iter_lines() if "{" in line]
    except httpx.TimeoutException:
        raise
    except httpx.ConnectError:
        return Ending.REFUSED
    except httpx.TransportError:
        return Ending.CLOSED
    last = json.loads(lines[-1].removeprefix("data: "))
    if "error" not in last:
        return Ending.ANSWERED
    assert last["error"]["code"] in ("engine_failed", "shutting_down"), last
    return Ending.ERROR


def ask_until_the_end(started: Ranks, seed: int) -> Ending | None:
    """The ending of a client's last request; None if the server never listens."""
    wait_for(
        lambda: started.server.log("listening") or started.ended(),
        seconds=PATIENCE,
        why="the server listens",
    )
    dice = random.Random(seed)
    ending = None
    while ending in (None, Ending.ANSWERED) and started.server.log("listening"):
        ending = ask(started.server.url, dice.choice(BODIES))
    return ending


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("phase", Phase)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("split", ["tensor", "pipeline"])
def test_a_rank_is_killed_at_a_random_point(
    folder: Path, tmp_path: Path, split: str, victim: int, phase: Phase, seed: int
) -> None:
    event, most = phase.value
    delay = random.Random(f"{split} {victim} {phase.name} {seed}").uniform(0, most)
    with (
        starting(2, tmp_path, "--model", f"m={folder}", "--parallel", split) as started,
        ThreadPoolExecutor(CLIENTS) as pool,
    ):
        clients = [pool.submit(ask_until_the_end, started, number) for number in range(CLIENTS)]
        known = 0 if phase is Phase.SERVICE else victim  # only rank 0 says when a model is loaded
        wait_for(lambda: event in started.read_log(known), seconds=PATIENCE, why=event)
        time.sleep(delay)
        started.signal(victim, signal.SIGKILL)
        endings = [client.result() for client in clients]
        statuses = started.exit_statuses()
    assert statuses[victim] == -signal.SIGKILL
    assert statuses[1 - victim] in ((3,) if phase is Phase.SERVICE else (1, 3))
    if victim == 1 and phase is Phase.SERVICE:
        # Who has just had an answer asks again, perhaps when nobody listens any more.
        assert {Ending.ERROR} <= set(endings) <= {Ending.ERROR, Ending.REFUSED}
    else:
        assert Ending.ANSWERED not in endings


def test_ranks_that_wait_for_one_that_was_killed_end(folder: Path, tmp_path: Path) -> None:
    dice = random.Random(0)
    victims = [0, 1] * 3
    with ExitStack() as stack:
        every = []
        for number, victim in enumerate(victims):
            options = ("--model", f"m={folder}", "--parallel", "tensor")
            started = stack.enter_context(starting(2, tmp_path / str(number), *options))
            time.sleep(dice.uniform(0, START_SECONDS))
            started.signal(victim, signal.SIGKILL)
            every.append(started)
        for victim, started in zip(victims, every, strict=True):
            statuses = started.exit_statuses(seconds=JOIN_PATIENCE)
            assert statuses[victim] == -signal.SIGKILL
            assert statuses[1 - victim] in (1, 3)  # 3: it had joined
