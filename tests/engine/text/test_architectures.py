"""Every architecture of mlx-lm, as a server runs it: loaded, alone, in a crowd, after a hang-up,
from a kept prompt, and from disk in the next process. The text is always mlx-lm's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsrv.engine.events import Answered, Loaded, Token, kv_bytes
from mlxsrv.engine.orders import Submit
from mlxsrv.engine.outcomes import Fault, Outcome
from mlxsrv.engine.plans import Decode, WorkItem
from mlxsrv.engine.scheduling.scheduler import Received
from mlxsrv.engine.storage.node_file import NODE
from tests.support.architectures import list_architectures, write_architecture
from tests.support.effort import often
from tests.support.stored import StoringEngine, make_job

THIS_YEAR = (
    "gemma4_text",
    "glm4_moe",
    "kimi_linear",
    "minimax_m3_vl",
    "mistral4",
    "nemotron_h",
    "qwen3_5_moe",
    "step3p5",
)
"""Architectures of this year, without the families that all tests of the engine run, and with one
whose rows decode alone."""
ALONE = {
    "afm7": "layers without keys of their own place queries by the longest row",
    "deepseek_v41": "its KV cache is of a kind that only it knows",
    "gpt_bigcode": "it takes the number of tokens for one number",
    "llama4": "its KV cache drops chunks",
    "minimax_m3_vl": "it chooses blocks by the longest row",
    "phi3small": "its masks fit one row only",
}
"""Architectures whose rows decode one at a time, and why."""
NOT_STORED = {"deepseek_v41"}
"""Their prompts are kept in memory only."""

COUNT = 10
SIZES = (5, 12, 23, 300)
"""Tokens of prompts: the last is beyond all windows, indices and slices."""


@pytest.mark.slow
@pytest.mark.parametrize("name", often(list_architectures(), THIS_YEAR))
def test_text_is_mlx_lms_whatever_happens(name: str, tmp_path: Path) -> None:
    folder = write_architecture(tmp_path / "model", name)
    model, _ = load_model(folder)
    prompts = [make_prompt(number, size) for number, size in enumerate(SIZES)]
    expected = [generate(model, prompt) for prompt in prompts]
    assert any(len({*text}) > 2 for text in expected), "such text shows nothing"

    faults: list[Fault] = []

    def watch(_: WorkItem, outcome: Outcome) -> Outcome:
        faults.extend([outcome.fault] if outcome.fault is not None else [])
        return outcome

    engine = StoringEngine(folder, tmp_path / "disk", change=watch)
    loaded = next(each.value for each in engine.events if isinstance(each, Answered))
    assert isinstance(loaded, Loaded), loaded
    assert loaded.batched == (name not in ALONE), loaded.notes

    alone, _ = engine.ask(make_job(1, prompts[3], COUNT))
    assert alone == expected[3], "alone"

    engine.events.clear()
    engine.send(*[Submit(make_job(10 + i, prompt, COUNT)) for i, prompt in enumerate(prompts)])
    assert [drawn(engine, 10 + i) for i in range(4)] == expected, "in a crowd"
    together = max(len(g.rows) for work in engine.find(Decode) for g in work.groups or ())
    assert (together > 1) == loaded.batched

    engine.events.clear()
    engine.round([Received(1, Submit(make_job(20 + i, prompts[i], COUNT))) for i in (1, 2)])
    while not any(isinstance(event, Token) for event in engine.events):
        engine.round([])
    leaving = next(event.job for event in engine.events if isinstance(event, Token))
    engine.cancel(leaving)
    staying = 43 - leaving
    assert drawn(engine, staying) == expected[staying - 20], "beside one that hung up"
    assert (engine.numbers["rows"], engine.numbers["row_bytes"]) == (0, 0)

    follow_up = (*prompts[3], *expected[3], *make_prompt(9, 15))
    continued = generate(model, follow_up)
    text, cached = engine.ask(make_job(30, follow_up, COUNT))
    assert text == continued, "from a kept prompt"
    assert cached >= len(prompts[3]) - 1
    engine.end()
    assert not faults

    later = StoringEngine(folder, tmp_path / "disk")
    text, cached = later.ask(make_job(1, follow_up, COUNT))
    later.end()
    assert text == continued, "from disk"
    assert cached >= len(prompts[3]) // NODE * NODE or name in NOT_STORED

    for size in (30, 300):
        cache = make_prompt_cache(model)
        for part in ([*range(1, size)], [size]):
            mx.eval(model(mx.array([part]), cache=cache))
        assert kv_bytes(loaded.kv_costs, size) == count_bytes(cache), f"forecast for {size} tokens"


def make_prompt(seed: int, size: int) -> tuple[int, ...]:
    return tuple(Random(seed).choices(range(5, 500), k=size))


def generate(model: Any, prompt: tuple[int, ...]) -> list[int]:
    """mlx-lm's own greedy text."""
    return [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=COUNT)]


def drawn(engine: StoringEngine, job: int) -> list[int]:
    return [e.id for e in engine.events if isinstance(e, Token) and e.job == job]


def count_bytes(layers: Iterable[Any]) -> int:
    """Bytes of a KV cache but for what is allocated for later tokens."""
    total = 0
    for layer in layers:
        if hasattr(layer, "caches"):
            total += count_bytes(layer.caches)
        elif hasattr(layer, "keys_and_values"):
            held = () if layer.empty() else layer.keys_and_values()
            total += sum(array.nbytes for array in held)
        else:
            total += layer.nbytes
    return total
