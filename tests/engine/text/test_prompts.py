"""Prompts are read in a fair order: short ones overtake, long ones are not starved."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.events import Activations, Event, Failed, PromptRead, PromptScored, Token
from mlxsrv.engine.orders import Attach, Job, Watch
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Sampling, Steering
from tests.support.effort import often, per_cache
from tests.support.saes import write_sae
from tests.support.text_engine import TextEngine, assert_greedy
from tests.support.tiny import FAMILIES, write_model

GREEDY = Sampling(temperature=0)
BATCHED = [name for name, each in FAMILIES.items() if each.batchable and name != "qwen3-46m"]
SMALL = [name for name in FAMILIES if name != "qwen3-46m"]
CHUNK = 64
ENOUGH = 1 << 26


def prompt(seed: int, size: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


def job(number: int, tokens: tuple[int, ...], max_tokens: int = 4, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    return Job(number, "m", tokens, max_tokens, frozenset(), **more)


def make(model: Any, rows: int = 32, cache_bytes: int = 0, **more: Any) -> TextEngine:
    return TextEngine(model, max_rows=rows, pace=Pace(CHUNK, 10.0), cache_bytes=cache_bytes, **more)


def slices(engine: TextEngine, most: int = 2000) -> Iterator[list[Event]]:
    """The events of each slice, until there is nothing to do."""
    for _ in range(most):
        if engine.idle:
            return
        yield engine.decode() + engine.prefill()
    raise AssertionError("it does not end")


def finish(engine: TextEngine) -> list[Event]:
    return [event for events in slices(engine) for event in events]


def texts(events: list[Event]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault(event.job, []).append(event.id)
    return found


def order(events: list[Event]) -> list[int]:
    return [event.job for event in events if isinstance(event, PromptRead)]


@pytest.mark.parametrize("ahead", often([1, 2, 4, 8, 31], [1, 31]))
@pytest.mark.slow
def test_a_short_prompt_waits_as_long_whatever_is_ahead(models: Any, ahead: int) -> None:
    engine = make(models("qwen3"))
    for number in range(ahead):
        engine.submit(job(number, prompt(number, 400)))
    for _ in range(3):
        engine.prefill()
    engine.submit(job(99, prompt(99, 5)))
    waited = next(
        number
        for number, events in enumerate(slices(engine), 1)
        if any(isinstance(event, Token) and event.job == 99 for event in events)
    )
    assert waited <= 4
    assert {*texts(finish(engine))} == {*range(ahead), 99}


@pytest.mark.slow
def test_long_prompts_are_not_starved_by_short_ones_without_end(models: Any) -> None:
    model = models("qwen3")
    engine = make(model)
    long = [job(number, prompt(number, 700)) for number in range(3)]
    for each in long:
        engine.submit(each)
    events: list[Event] = []
    number = 100
    while not {0, 1, 2} <= {*texts(events)}:
        for _ in range(2):  # two more come with every slice
            number += 1
            engine.submit(job(number, prompt(number, CHUNK // 2), 1))
        events += engine.decode() + engine.prefill()
        assert number < 100 + 2 * 200, "they are starved"
    first = [each for each in order(events) if each < 3]
    assert first == [0, 1, 2], "of equal ones the first is the first"
    events += finish(engine)
    for each in long:
        assert_greedy(model, each.prompt, texts(events)[each.id], 4)


@pytest.mark.slow
def test_of_long_prompts_the_shorter_is_ready_sooner(models: Any) -> None:
    model = models("qwen3")
    engine = make(model)
    sizes = {0: 1500, 1: 700, 2: 200, 3: 20}
    events: list[Event] = []
    for number, size in sizes.items():
        engine.submit(job(number, prompt(number, size)))
        events += engine.prefill()
    assert engine.statistics()["reading"] >= 2, "several are half read"
    events += finish(engine)
    assert order(events) == [3, 2, 1, 0]
    for number, size in sizes.items():
        assert_greedy(model, prompt(number, size), texts(events)[number], 4)


@pytest.mark.parametrize("family", per_cache(BATCHED))
@pytest.mark.slow
def test_prompts_that_are_read_by_turns_equal_mlx_lm(models: Any, family: str) -> None:
    model = models(family)
    sizes = [400, 200, 150, 10, 300, 64, 65, 5]
    asked = [prompt(number, size) for number, size in enumerate(sizes)]
    engine = make(model)
    events: list[Event] = []
    for number, tokens in enumerate(asked):
        engine.submit(job(number, tokens, 12))
        events += engine.decode() + engine.prefill()
    events += finish(engine)
    for number, tokens in enumerate(asked):
        assert_greedy(model, tokens, texts(events)[number], 12)


def test_rows_are_for_who_came_first(models: Any) -> None:
    engine = make(models("qwen3"), rows=2)
    for number, size in enumerate((300, 200, 5)):
        engine.submit(job(number, prompt(number, size), 30))
    came: list[int] = []
    for events in slices(engine):
        came += order(events)
        numbers = engine.statistics()
        assert numbers["rows"] + numbers["reading"] <= 2
    assert came == [1, 0, 2]


def test_little_memory_has_prompts_read_one_at_a_time(models: Any) -> None:
    """As where each long one that is half read takes memory, and there is some for one only."""
    model = models("qwen3")
    engine: TextEngine | None = None

    class Short:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, tokens: Any, cache: Any) -> Any:
            begun = [] if engine is None else engine.schedule._queue.begun
            begun = [each for each in begun if each.done > 0]
            if tokens.shape[1] > 1 and len(begun) > 1:
                raise MemoryError("no room")
            return model(tokens, cache=cache)

    engine = make(Short(), cache_bytes=ENOUGH)
    sizes = [900, 600, 300, 400]
    events: list[Event] = []
    for number, size in enumerate(sizes):
        engine.submit(job(number, prompt(number, size)))
        events += engine.decode() + engine.prefill()
    events += finish(engine)
    assert not [event for event in events if isinstance(event, Failed)]
    for number, size in enumerate(sizes):
        assert_greedy(model, prompt(number, size), texts(events)[number], 4)


# Prompts that are half read when their clients leave.


def read_some(engine: TextEngine, asked: Job, count: int) -> None:
    engine.submit(asked)
    for _ in range(count):
        engine.prefill()
    engine.cancel([asked.id])


def found(events: list[Event], number: int) -> int:
    [cached] = [e.cached for e in events if isinstance(e, PromptRead) and e.job == number]
    return cached


@pytest.mark.parametrize("family", per_cache(SMALL))
def test_who_asks_again_goes_on_from_there(models: Any, family: str) -> None:
    model = models(family)
    tokens = prompt(1, 500)
    engine = make(model, cache_bytes=ENOUGH)
    for attempt in range(3):
        read_some(engine, job(attempt, tokens), 2)
        assert engine.idle
    engine.submit(job(9, tokens, 12))
    events = finish(engine)
    assert found(events, 9) == 3 * 2 * CHUNK
    assert_greedy(model, tokens, texts(events)[9], 12)


def test_a_prompt_that_takes_longer_than_its_client_waits_is_read_in_the_end(models: Any) -> None:
    model = models("mamba2")  # whose caches cannot be cut back
    tokens = prompt(2, 1000)
    engine = make(model, cache_bytes=ENOUGH)
    for attempt in range(30):
        engine.submit(job(attempt, tokens))
        events = [event for _ in range(4) for event in engine.decode() + engine.prefill()]
        if texts(events):
            break
        engine.cancel([attempt])
    assert 3 <= attempt <= 5
    assert_greedy(model, tokens, texts(events + finish(engine))[attempt], 4)


def test_a_prompt_is_kept_whole_if_its_client_leaves_before_the_first_token(models: Any) -> None:
    for family in ("qwen3", "mamba2"):
        engine = make(models(family), cache_bytes=ENOUGH)
        tokens = prompt(3, 150)
        engine.submit(job(0, tokens))
        while not engine.statistics()["rows"]:
            engine.prefill()
        engine.cancel([0])
        if family == "qwen3":  # whose caches tell their length
            kept = engine.schedule._index._entries.values()
            offsets = [engine.runner._kept[each.number].cache.layers[0].offset for each in kept]
            assert offsets == [each.tokens.size for each in kept]
        engine.submit(job(1, tokens))
        events = finish(engine)
        assert found(events, 1) == 149
        assert_greedy(models(family), tokens, texts(events)[1], 4)


def test_what_is_kept_stays_within_the_prompt_caches_bytes(models: Any) -> None:
    engine = make(models("qwen3"), cache_bytes=60_000)
    for number in range(12):
        read_some(engine, job(number, prompt(number, 300)), 1 + number % 4)
        index = engine.schedule._index
        assert index.bytes == sum(entry.bytes for entry in index._entries.values()) <= 60_000


def test_a_prompt_that_others_want_still_is_read_on(models: Any) -> None:
    model = models("qwen3")
    tokens = prompt(4, 300)
    engine = make(model, cache_bytes=ENOUGH)
    for number in range(3):
        engine.submit(job(number, tokens))
    engine.prefill()
    engine.cancel([0])
    events = finish(engine)
    assert {*texts(events)} == {1, 2}
    assert_greedy(model, tokens, texts(events)[2], 4)


def test_what_is_kept_is_for_prompts_that_are_steered_alike(models: Any) -> None:
    model = models("qwen3")
    mx.random.seed(1)
    steerer = Steerer(model, {"v": {1: mx.random.normal((64,))}})
    engine = make(model, cache_bytes=ENOUGH, steerer=steerer)
    tokens = prompt(5, 400)
    steering = Steering(vectors=(("v", 3.0),))
    read_some(engine, job(0, tokens, steering=steering), 2)
    engine.submit(job(1, tokens))
    plain = finish(engine)
    assert found(plain, 1) == 0
    assert_greedy(model, tokens, texts(plain)[1], 4)
    engine.submit(job(2, tokens, steering=steering))
    assert found(finish(engine), 2) == 2 * CHUNK


def test_a_slice_that_failed_is_not_kept(models: Any) -> None:
    model = models("qwen3")
    failing = True

    class Faulty:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, tokens: Any, cache: Any) -> Any:
            logits = model(tokens, cache=cache)  # what it has seen is in the cache already
            if failing and tokens.shape[1] > 1 and cache[0].offset > CHUNK:
                raise RuntimeError("refused")
            return logits

    engine = make(Faulty(), cache_bytes=ENOUGH)
    tokens = prompt(6, 400)
    engine.submit(job(0, tokens))
    assert [type(event) for event in finish(engine)] == [Failed]
    engine.cancel([0])
    failing = False
    engine.submit(job(1, tokens))
    events = finish(engine)
    assert found(events, 1) == 0
    assert_greedy(model, tokens, texts(events)[1], 4)


def test_a_prompt_that_is_scored_leaves_what_it_read_and_is_scored_whole(models: Any) -> None:
    model = models("qwen3")
    tokens = prompt(7, 400)
    engine = make(model, cache_bytes=ENOUGH)
    engine.submit(job(0, tokens, 0, scores=1))
    whole = [event.scores for event in finish(engine) if isinstance(event, PromptScored)]
    engine = make(model, cache_bytes=ENOUGH)
    read_some(engine, job(1, tokens, 0, scores=1), 4)
    engine.submit(job(2, tokens))
    events = finish(engine)
    assert found(events, 2) > CHUNK
    assert_greedy(model, tokens, texts(events)[2], 4)
    engine.submit(job(3, tokens, 0, scores=1))
    again = [event.scores for event in finish(engine) if isinstance(event, PromptScored)]
    assert [len(each) for each in again] == [400]
    for one, other in zip(whole[0][1:], again[0][1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_nothing_is_kept_of_numbers_that_are_none(tmp_path: Path) -> None:
    model, _ = load_model(write_model(tmp_path / "m", "qwen3"))
    weight = model.model.embed_tokens.weight
    weight[300] = float("nan")
    model.model.embed_tokens.weight = weight
    tokens = (*prompt(8, 100), 300, *prompt(9, 300))
    engine = make(model, cache_bytes=ENOUGH)
    read_some(engine, job(0, tokens, 0, scores=1), 20)
    assert all(300 not in entry.tokens for entry in engine.schedule._index._entries.values())
    # Of one that is not scored it shows only when a token is drawn: nothing stays then.
    read_some(engine, job(1, tokens), 3)
    engine.submit(job(2, tokens))
    assert {event.job for event in finish(engine) if isinstance(event, Failed)} == {2}
    assert all(300 not in entry.tokens for entry in engine.schedule._index._entries.values())


# Watched activations.


@pytest.fixture
def watched(models: Any, tmp_path: Path) -> Callable[[], tuple[TextEngine, Steerer]]:
    path = write_sae(tmp_path, layer=0, d_sae=96)

    def build() -> tuple[TextEngine, Steerer]:
        model = models("qwen3")
        steerer = Steerer(model)
        for _ in steerer.attach(Attach("m", 1, str(path), 0)):
            pass
        return make(model, cache_bytes=ENOUGH, steerer=steerer), steerer

    return build


def test_what_is_watched_is_told_of_every_token_of_a_prompt_that_is_cached(
    watched: Callable[[], tuple[TextEngine, Steerer]],
) -> None:
    engine, steerer = watched()
    tokens = prompt(10, 200)
    engine.submit(job(0, tokens))
    finish(engine)
    steerer.watch(Watch("m", (5,), 2))
    engine.replan()
    reported = []
    for number in (1, 2):
        engine.submit(job(number, tokens))
        events = finish(engine)
        assert found(events, number) == 0
        reported.append([e for e in events if isinstance(e, Activations) and e.position < 200])
        assert [event.position for event in reported[-1]] == [*range(200)]
    values = [[dict(event.values)[5] for event in each] for each in reported]
    assert values[0] == pytest.approx(values[1], abs=1e-4)
    steerer.watch(Watch("m"))
    engine.replan()
    engine.submit(job(3, tokens))
    assert found(finish(engine), 3) == 199, "what was read meanwhile is there for others"


def test_a_half_read_prompt_of_one_that_left_is_told_anew(
    watched: Callable[[], tuple[TextEngine, Steerer]],
) -> None:
    engine, steerer = watched()
    steerer.watch(Watch("m", (5,)))
    engine.replan()
    tokens = prompt(11, 200)
    read_some(engine, job(0, tokens), 2)
    engine.submit(job(1, tokens))
    events = finish(engine)
    positions = [e.position for e in events if isinstance(e, Activations) and e.job == 1]
    assert positions[:200] == [*range(200)]


# A kept prompt that cannot be copied.


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
@pytest.mark.parametrize("beside", [0, 1])
def test_a_prompt_is_read_whole_where_what_is_kept_of_it_cannot_be_copied(
    models: Any, beside: int, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to fit a slice, alone or beside a short one, and takes several."""
    model, first = models("qwen3"), prompt(1, 5 * CHUNK)
    engine = make(model, rows=4, cache_bytes=ENOUGH)

    begin = engine.runner._begin

    def fail(span: Any) -> Any:
        if span.source is not None:
            raise error("no room")
        return begin(span)

    monkeypatch.setattr(engine.runner, "_begin", fail)
    engine.submit(job(0, first))
    finish(engine)
    asked = [prompt(number, 5) for number in range(beside)] + [first + prompt(2, 9)]
    for number, tokens in enumerate(asked):
        engine.submit(job(number, tokens))
    found = texts(finish(engine))
    assert {*found} == {*range(len(asked))}
    for i, tokens in enumerate(asked):
        assert_greedy(model, tokens, found[i], 4)
