"""Memory that runs short: fewer rows at once, and who has no room even alone fails."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxsrv.engine.events import (
    Failed,
)
from tests.support.effort import often
from tests.support.faulty_text import (
    Fault,
    Faulty,
    alone,
    assert_empty,
    assert_told_once,
    failures,
    job,
    make,
    on_token,
    prompt,
    run,
    stranger,
    texts,
)

# Memory.


def short_of_memory(most: int) -> Fault:
    """As MLX says it, in steps of more rows than `most`."""

    def fault(step: int, tokens: mx.array) -> None:
        if step and tokens.shape[0] > most:
            raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is too many")

    return fault


@pytest.mark.parametrize("most", often([1, 3, 5], [1, 3]))
@pytest.mark.slow
def test_too_many_rows_for_the_memory_become_fewer(models: Any, most: int) -> None:
    model = models("qwen3")
    asked = [(job(i, prompt(i), 20 + i), None) for i in range(9)]
    short = short_of_memory(most)
    raised = 0

    def fault(step: int, tokens: mx.array) -> None:
        nonlocal raised
        raised += 1
        short(step, tokens)
        raised -= 1

    engine = make(Faulty(model, fault), cache_bytes=1 << 20)
    events = run(engine, asked)
    assert failures(events) == {}
    assert texts(events) == alone(model, asked)
    assert 1 <= raised <= 14, "it is found out how many do fit"
    assert_told_once(events)
    assert_empty(engine)


def test_a_row_that_has_no_room_alone_fails(models: Any) -> None:
    model = models("qwen3")
    good = [(job(i, prompt(i), 10), None) for i in range(4) if i != 1]
    expected = alone(model, good)
    poison = stranger(expected)
    engine = make(Faulty(model, on_token(poison, MemoryError)))
    events = run(engine, [*good, (job(1, (*prompt(1), poison), 10), None)])
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.job, failed.clear) == (1, "out of memory")
    assert texts(events) == expected
    assert_empty(engine)


def test_a_prompt_that_has_no_room_fails_alone(models: Any) -> None:
    model = models("qwen3")

    def fault(call: int, tokens: mx.array) -> None:
        if tokens.shape[1] > 30:
            raise MemoryError("no room")

    asked = [(job(i, prompt(i, 40 if i == 1 else 20), 10), None) for i in range(4)]
    events = run(make(Faulty(model, fault)), asked)
    assert {*failures(events)} == {1}
    assert texts(events) == alone(model, [each for each in asked if each[0].id != 1])


class WithoutCache(Faulty):
    """The real model, but the KV caches of some numbers cannot be made."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.refused: set[int] = set()
        self.made = 0

    def make_cache(self) -> list[Any]:
        self.made += 1
        if self.made in self.refused:
            raise RuntimeError("no cache")
        cache: list[Any] = make_prompt_cache(self._model)
        return cache


@pytest.mark.parametrize("refusals", [1, 1000])
def test_all_hear_of_a_kv_cache_that_cannot_be_made(models: Any, refusals: int) -> None:
    """The second prompt of a slice has none; the first is out of the queue by then."""
    model = WithoutCache(models("qwen3"))
    engine = make(model)
    model.refused = set(range(model.made + 2, model.made + 2 + refusals))
    asked = [(job(i, prompt(i)), None) for i in range(3)]
    events = [event for each in asked for event in engine.submit(*each)]
    while not engine.idle:
        try:
            events += engine.decode()
            events += engine.prefill()
        except RuntimeError as error:
            events += engine.fail(str(error))
    assert_told_once(events)
    if refusals == 1:
        assert texts(events) == alone(models("qwen3"), asked)
    else:
        assert {*failures(events)} == {0, 1, 2}
    assert_empty(engine)
