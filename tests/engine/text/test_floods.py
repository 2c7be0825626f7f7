"""Kept prompts of a real model: agents who take turns go on from theirs, also through a flood."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.events import PromptRead, Token
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.groups import STEP
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Sampling
from tests.support.effort import often
from tests.support.text_engine import TextEngine, assert_greedy
from tests.support.tiny import FAMILIES, write_model

HEAD = 400
ANSWER = 8
NEW = 20
SMALL = [name for name in FAMILIES if name != "qwen3-46m"]


class Asking:
    """An engine, and who asks it."""

    def __init__(self, model: Any, cache_bytes: int) -> None:
        self.engine = TextEngine(model, max_rows=4, pace=Pace(256, 10.0), cache_bytes=cache_bytes)
        self._jobs = 0
        self._dice = random.Random(1)

    def draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.choices(range(5, 300), k=count))

    def ask(self, prompt: tuple[int, ...]) -> tuple[list[int], int]:
        """The answer, and how many tokens of the prompt were kept."""
        self._jobs += 1
        self.engine.submit(
            Job(self._jobs, "m", prompt, ANSWER, frozenset(), Sampling(temperature=0))
        )
        events = []
        while not self.engine.idle:
            events += self.engine.round()
        [cached] = [event.cached for event in events if isinstance(event, PromptRead)]
        return [event.id for event in events if isinstance(event, Token)], cached


@pytest.mark.parametrize("family", often(SMALL, ["mamba2"]))
@pytest.mark.slow
def test_agents_who_take_turns_go_on_from_theirs_through_a_flood(models: Any, family: str) -> None:
    model = models(family)
    alone = Asking(model, 1 << 28)
    alone.ask(alone.draw(HEAD + 6 * (NEW + ANSWER)))
    largest = max(entry.bytes for entry in alone.engine.schedule._index._entries.values())
    # Two states of each of four agents: of caches that cannot be cut back, both are needed.
    asking = Asking(model, 8 * largest)
    texts = [asking.draw(HEAD) for _ in range(4)]
    for turn in range(6):
        for i in range(4):
            texts[i] += asking.draw(NEW)
            answer, cached = asking.ask(texts[i])
            assert cached == (0 if turn == 0 else len(texts[i]) - NEW)
            if turn == 5:
                assert_greedy(model, texts[i], answer, ANSWER)
            texts[i] += tuple(answer)
        if turn >= 2:
            for _ in range(8):
                asking.ask(asking.draw(200))
    assert asking.engine.schedule.statistics()["prompt_cache_bytes"] > 4 * largest, "all is used"


@pytest.mark.slow
def test_four_agents_with_prompts_of_8000_tokens_all_hit_within_the_bound(tmp_path: Path) -> None:
    """The bound has room for their four texts and nothing more. One prompt of somebody else's does
    not push out any."""
    model = load_model(write_model(tmp_path, "qwen3", plain=True, num_hidden_layers=1))[0]
    facts = TextEngine(model, max_rows=1).runner.facts
    bound = 4 * facts.kv_bytes(-(-(8000 + 3 * (NEW + ANSWER)) // STEP) * STEP)
    asking = Asking(model, bound)
    texts = [asking.draw(8000) for _ in range(4)]
    for turn in range(3):
        for i, text in enumerate(texts):
            prompt = (*text, *asking.draw(NEW))
            answer, cached = asking.ask(prompt)
            assert cached == (len(text) if turn else 0)
            texts[i] = (*prompt, *answer)
        if turn == 1:
            asking.ask(asking.draw(8000))
    assert asking.engine.schedule.statistics()["prompt_cache_bytes"] > 0.9 * bound, "all is used"
