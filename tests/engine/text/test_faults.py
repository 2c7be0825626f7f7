"""Faults of a model: the row that causes one fails, and the text of all others is the same."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from mlxsrv.engine.client import EngineClient
from mlxsrv.engine.events import (
    Activations,
    Event,
    Failed,
    Finished,
    JobEvent,
    PromptRead,
    PromptScored,
    Started,
    Token,
)
from mlxsrv.engine.loading import loader as loading
from mlxsrv.engine.loading.load import load as real_load
from mlxsrv.engine.orders import Attach, Job, Load, Watch
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.errors import ModelNotLoaded
from mlxsrv.generation.parameters import Constraint, Mask, Sampling, Steering
from tests.support.effort import often
from tests.support.saes import write_sae
from tests.support.text_engine import TextEngine
from tests.support.tiny import FAMILIES, write_model

GREEDY = Sampling(temperature=0)
BATCHED = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "mamba2"]


Fault = Callable[[int, mx.array], None]
"""Raises, or not, at the n-th step for these tokens `(rows, n)`; it is 0 where prompts are read."""


class Faulty:
    """The real model, but for what `fault` does and for logits that `spoil` changes.

    Passes over one token of each row are counted: the steps, unless rows have several sub-batches.
    """

    def __init__(self, model: Any, fault: Fault = lambda *_: None, spoil: Any = None) -> None:
        self._model = model
        self.fault = fault
        self._spoil = spoil
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        step = tokens.shape[1] == 1
        self.calls += step
        self.fault(self.calls if step else 0, tokens)
        logits = self._model(tokens, cache=cache)
        return logits if self._spoil is None else self._spoil(tokens, logits)


class Stuck:
    """A constraint that allows one token and then cannot go on."""

    dormant = False
    failure: str | None = None

    def fill(self, mask: Mask) -> None:
        pass

    def accept(self, token: int) -> None:
        self.failure = "too ambiguous"


class Odd:
    """A constraint: odd tokens and even ones by turns. Raises at the n-th call of a method."""

    dormant = False
    failure = None

    def __init__(self, method: str = "", n: int = 0, error: BaseException | None = None) -> None:
        self._at = method, n
        self._error = error
        self._calls: Counter[str] = Counter()
        self._odd = True

    def fill(self, mask: Mask) -> None:
        self._call("fill")
        mask[:] = 0x55555555 * 2 - 2**32 if self._odd else 0x55555555

    def accept(self, token: int) -> None:
        self._call("accept")
        assert token % 2 == self._odd, "each token is accepted once, in order"
        self._odd = not self._odd

    def _call(self, method: str) -> None:
        self._calls[method] += 1
        if self._error is not None and self._at == (method, self._calls[method]):
            raise self._error


class Steady(Pace):
    """Slices of one length, whatever time they take: so that the n-th pass is always the same, and
    none is over the one token that was left of a prompt, which would count as a step."""

    def limit(self, *, decoding: bool, long: bool, beside: bool = False, prompts: int = 1) -> int:
        return 64


def make(model: Any, rows: int = 8, **more: Any) -> TextEngine:
    return TextEngine(model, max_rows=rows, pace=Steady(64, 10.0), **more)


def prompt(seed: int, size: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


def job(number: int, tokens: tuple[int, ...], max_tokens: int = 12, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    return Job(number, "m", tokens, max_tokens, frozenset(), **more)


Asked = Sequence[tuple[Job, Constraint | None]]


def mixed() -> Asked:
    """Rows of all kinds, of several lengths, two with one prompt."""
    seeded = Sampling(temperature=1, top_p=0.9, seed=5)
    penal = Sampling(temperature=0.8, seed=2, frequency_penalty=1, repetition_penalty=1.3)
    return [
        (job(0, prompt(0), 14), None),
        (job(1, prompt(1, 5), 12, sampling=seeded), None),
        (job(2, prompt(2, 40), 16, sampling=penal), None),
        (job(3, prompt(3), 12, logprobs=2), None),
        (job(4, prompt(4), 13, sampling=seeded), Odd()),
        (job(5, prompt(0), 10, sampling=seeded), None),
        (job(6, prompt(6, 150), 6, scores=1, logprobs=0), None),
    ]


def run(engine: TextEngine, asked: Asked) -> list[Event]:
    """All events; the last of the jobs come while the first are decoded."""
    events = [event for each in asked[:4] for event in engine.submit(*each)]
    late = list(asked[4:])
    slices = 0
    while late or not engine.idle:
        if late and slices % 3 == 2:
            events += engine.submit(*late.pop(0))
        events += engine.decode()
        events += engine.prefill()
        slices += 1
        assert slices < 2000, "it does not end"
    return events


def texts(events: list[Event]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault(event.job, []).append(event.id)
    return found


def failures(events: list[Event]) -> dict[int, str]:
    return {event.job: event.reason for event in events if isinstance(event, Failed)}


def alone(model: Any, asked: Asked) -> dict[int, list[int]]:
    return texts(run(make(model), asked))


def stranger(texts: dict[int, list[int]]) -> int:
    """A token that is in no text, and in no prompt."""
    drawn = {token for text in texts.values() for token in text}
    return next(token for token in range(300, 500) if token not in drawn)


def assert_told_once(events: list[Event]) -> None:
    told = Counter(
        (type(event), event.job)
        for event in events
        if isinstance(event, (Started, PromptRead, PromptScored, Failed))
    )
    ends = Counter(event.job for event in events if isinstance(event, Token) and event.finish)
    assert not [key for key, count in told.items() if count > 1]
    assert all(count == 1 for count in ends.values())


def assert_empty(engine: TextEngine) -> None:
    """Nothing is held any more, and the engine works."""
    assert engine.idle
    assert {*engine.statistics().values()} == {0}
    assert not engine.runner._main._launched.proofs
    assert not engine.runner._rows
    assert engine.schedule._recovery.fitting == engine.schedule._max_rows


def at_step(*numbers: int) -> Fault:
    def fault(call: int, tokens: mx.array) -> None:
        if call in numbers:
            raise RuntimeError("refused")

    return fault


def on_token(poison: int, error: type[Exception] = RuntimeError) -> Fault:
    def fault(call: int, tokens: mx.array) -> None:
        if mx.any(tokens == poison).item():
            raise error("this token is refused")

    return fault


@pytest.mark.parametrize(
    ("family", "padding"),
    often(
        [*((family, None) for family in BATCHED), ("qwen3", 0)],
        [("qwen3", 0), ("gemma3_text", None), ("qwen3_next", None)],
    ),
)
@pytest.mark.slow
def test_one_error_in_any_step_costs_nobody_a_token(
    models: Any, family: str, padding: int | None
) -> None:
    model = models(family)
    expected = alone(model, mixed())
    for step in (2, 6, 14):
        faulty = Faulty(model)
        engine = make(faulty, padding=padding)  # which tries the model
        faulty.calls, faulty.fault = 0, at_step(step)
        events = run(engine, mixed())
        assert failures(events) == {}, step
        assert texts(events) == expected, step
        assert_told_once(events)
        assert_empty(engine)


def test_likelihoods_and_scores_are_those_without_the_error(models: Any) -> None:
    model = models("qwen3")

    def numbers(events: list[Event]) -> list[float]:
        found = [e.likelihood for e in events if isinstance(e, Token) and e.job == 3]
        found += [each for e in events if isinstance(e, PromptScored) for each in e.scores]
        return [each.logprob for each in found if each is not None and each.logprob is not None]

    expected = numbers(run(make(model), mixed()))
    assert len(expected) == 12 + 149
    for call in (6, 12):
        events = run(make(Faulty(model, at_step(call))), mixed())
        assert numbers(events) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("family", "place"),
    [
        ("qwen3", "read"),
        ("qwen3", "first"),
        ("qwen3", "later"),
        ("mamba2", "first"),
        ("gemma3_text", "later"),
    ],
)
def test_only_the_row_that_is_to_blame_fails(models: Any, family: str, place: str) -> None:
    model = models(family)
    expected = alone(model, mixed())
    poison, asked, guilty = stranger(expected), list(mixed()), 2
    if place == "later":  # a token that only the third row draws
        others = {token for number, text in expected.items() if number != 2 for token in text}
        prompts = {token for each, _ in mixed() for token in each.prompt}
        poison = next(token for token in expected[2][3:] if token not in others | prompts)
    else:
        guilty = 2 if place == "first" else 1  # whose prompt is read beside others
        tokens = list(asked[guilty][0].prompt)
        tokens[-1 if place == "first" else 3] = poison
        asked[guilty] = (job(guilty, tuple(tokens), 16), None)
    engine = make(Faulty(model, on_token(poison)))
    events = run(engine, asked)
    assert failures(events) == {guilty: "RuntimeError: this token is refused"}
    got = texts(events)
    drawn = got.pop(guilty, [])
    if place == "later":
        assert drawn == expected[2][: expected[2].index(poison) + (drawn[-1:] == [poison])]
    assert got == {number: text for number, text in expected.items() if number != guilty}
    assert_told_once(events)
    assert_empty(engine)


def test_a_row_outlives_any_number_of_others_faults(models: Any) -> None:
    model = models("qwen3")
    expected = alone(model, [(job(0, prompt(0), 60), None)])
    poison = stranger(expected)
    engine = make(Faulty(model, on_token(poison)))
    events = engine.submit(job(0, prompt(0), 60))
    for number in range(1, 7):
        events += engine.submit(job(number, (*prompt(number), poison)))
        while number not in failures(events):
            events += engine.decode() + engine.prefill()
    while not engine.idle:
        events += engine.decode() + engine.prefill()
    assert {*failures(events)} == {*range(1, 7)}
    assert texts(events) == expected
    assert_empty(engine)


def test_many_who_are_to_blame_fail_and_the_others_do_not(models: Any) -> None:
    model = models("qwen3")
    good = [(job(i, prompt(i), 10), None) for i in range(9) if i % 3]
    expected = alone(model, good)
    poison = stranger(expected)
    bad = [(job(i, (*prompt(i), poison), 10), None) for i in (0, 3, 6)]
    engine = make(Faulty(model, on_token(poison)))
    events = run(engine, sorted(good + bad, key=lambda each: each[0].id))
    assert {*failures(events)} == {0, 3, 6}
    assert texts(events) == expected
    assert_empty(engine)


def test_a_model_that_runs_rows_one_by_one_fails_one(models: Any) -> None:
    family = next(name for name, each in FAMILIES.items() if not each.batchable)
    model = models(family)
    asked = [(job(i, prompt(i), 6), None) for i in range(3)]
    expected = alone(model, asked)
    poison = stranger(expected)
    asked[1] = (job(1, (*prompt(1), poison), 6), None)
    engine = make(Faulty(model, on_token(poison)))
    events = run(engine, asked)
    assert {*failures(events)} == {1}
    assert texts(events) == {0: expected[0], 2: expected[2]}
    assert_empty(engine)


def test_steered_rows_go_on_and_each_activation_is_told_once(models: Any) -> None:
    model = models("qwen3")
    mx.random.seed(1)
    vector = {"v": {1: mx.random.normal((64,))}}

    def asked() -> Asked:
        steering = Steering(vectors=(("v", 3.0),))
        return [
            (job(i, prompt(i), 10, steering=steering if i % 2 else None), None) for i in range(4)
        ]

    expected = texts(run(make(model, steerer=Steerer(model, vector)), asked()))
    assert expected[1] != alone(model, [(job(1, prompt(1), 10), None)])[1]
    faulty = Faulty(model, at_step(5))
    events = run(make(faulty, steerer=Steerer(faulty, vector)), asked())
    assert texts(events) == expected


def test_what_is_watched_is_told_once(models: Any, tmp_path: Path) -> None:
    path = write_sae(tmp_path, layer=0, d_sae=96)

    def watched(fault: Fault) -> Counter[tuple[int, int]]:
        model = Faulty(models("qwen3"))
        steerer = Steerer(model)
        engine = make(model, steerer=steerer)
        for _ in steerer.attach(Attach("m", 1, str(path), 0)):
            pass
        steerer.watch(Watch("m", (5,), 2))
        model.calls, model.fault = 0, fault
        events = run(engine, [(job(i, prompt(i), 10), None) for i in range(4)])
        told = [each for each in events if isinstance(each, Activations)]
        # A row's last token may be fed although it has ended; nobody listens then.
        return Counter((each.job, each.position) for each in told if each.position < 20 + 10 - 1)

    expected = watched(lambda *_: None)
    assert {*expected.values()} == {1}
    for step in (2, 7):
        assert watched(at_step(step)) == expected


# Constraints.


class PanicException(BaseException):
    """As Rust's panics come out of pyo3."""


@pytest.mark.parametrize("method", ["fill", "accept"])
@pytest.mark.parametrize("error", [ValueError("bad"), PanicException("bad")])
def test_a_constraint_that_raises_ends_its_row_alone(
    models: Any, method: str, error: BaseException
) -> None:
    model = models("qwen3")

    def asked(second: Constraint | None = None) -> list[tuple[Job, Constraint | None]]:
        constraints = [None, Odd(), second or Odd(), Odd()]
        return [(job(i, prompt(i), 10), each) for i, each in enumerate(constraints)]

    whole, faulty = Faulty(model), Faulty(model)
    expected = texts(run(make(whole), asked()))
    engine = make(faulty)
    events = run(engine, asked(Odd(method, 4, error)))
    assert failures(events) == {2: f"{type(error).__name__}: bad"}
    got = texts(events)
    drawn = got.pop(2)
    assert 3 <= len(drawn) < 10
    assert drawn == expected.pop(2)[: len(drawn)]
    assert got == expected
    assert faulty.calls == whole.calls, "nobody was read anew"
    assert_empty(engine)


def test_a_row_whose_grammar_cannot_go_on_says_so(models: Any) -> None:
    asked: list[tuple[Job, Constraint | None]] = [
        (job(0, prompt(0), 10), None),
        (job(1, prompt(1), 10), Stuck()),
    ]
    events = run(make(models("qwen3")), asked)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.job, failed.clear) == (1, "the grammar cannot go on: too ambiguous")


def test_what_kills_the_thread_is_not_a_constraints_to_raise(models: Any) -> None:
    engine = make(models("qwen3"))
    engine.submit(job(0, prompt(0)), Odd("fill", 2, SystemExit()))
    with pytest.raises(SystemExit):
        run(engine, [])


# NaN.


def spoiled(poison: int, value: float) -> Any:
    """Logits behind the token are no numbers."""

    def spoil(tokens: mx.array, logits: mx.array) -> mx.array:
        return mx.where((tokens == poison)[..., None], value, logits)

    return spoil


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(temperature=1, seed=3), Sampling(temperature=1, top_p=0.5)]
)
def test_a_row_of_nan_fails_and_no_other(models: Any, sampling: Sampling, value: float) -> None:
    model = models("qwen3")
    expected = alone(model, mixed())
    poison, asked = stranger(expected), list(mixed())
    asked[1] = (job(1, (*prompt(1, 5), poison), 12, sampling=sampling), None)
    events = run(make(Faulty(model, spoil=spoiled(poison, value))), asked)
    [failed] = [event for event in events if isinstance(event, Failed)]
    assert (failed.job, failed.clear) == (1, "the model computed NaN")
    assert texts(events) == {number: text for number, text in expected.items() if number != 1}


def test_weights_that_are_nan_fail_who_reads_them_and_leave_nothing_behind(
    tmp_path: Any,
) -> None:
    model, _ = load_model(write_model(tmp_path / "m", "qwen3"))
    good = prompt(1, 100)
    poison = stranger(alone(model, [(job(0, good), None)]))
    weight = model.model.embed_tokens.weight
    weight[poison] = float("nan")
    model.model.embed_tokens.weight = weight
    bad = (*prompt(2, 70), poison, *prompt(3, 30))
    engine = make(model, cache_bytes=1 << 26)
    for number in range(2):  # again: nothing was kept of it
        jobs = [job(10 * number, good), job(10 * number + 1, bad)]
        events = run(engine, [(each, None) for each in jobs])
        assert {*failures(events)} == {10 * number + 1}
        assert [e.cached for e in events if isinstance(e, PromptRead) and e.job % 10] == [0]
        assert len(texts(events)[10 * number]) == 12
    assert all(poison not in entry.tokens for entry in engine.schedule._index._entries)
    scored = run(engine, [(job(30, bad, scores=0), None), (job(31, bad, 0, scores=0), None)])
    assert {*failures(scored)} == {30, 31}
    assert not [event for event in scored if isinstance(event, PromptScored)]
    assert_empty(engine)


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


def test_a_prompt_that_is_only_echoed_is_read_beside_others(
    models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no row, so the KV cache of the slice has one that nobody decodes."""
    model = models("qwen3")
    asked = [(job(i, prompt(i), 12 if i == 1 else 0), None) for i in range(3)]
    events = run(make(model), asked)
    assert texts(events) == alone(model, asked[1:2])
    assert {event.job for event in events if isinstance(event, Finished)} == {0, 2}
    assert not caplog.records, "no step failed"


# Faults whose cause is not found.


def test_an_error_that_only_many_rows_have_ends(models: Any) -> None:
    model = models("qwen3")

    def fault(call: int, tokens: mx.array) -> None:
        if tokens.shape[0] > 3:
            raise RuntimeError("too many")

    engine = make(Faulty(model, fault))
    events = run(engine, [(job(i, prompt(i), 30), None) for i in range(6)])
    assert {*failures(events), *texts(events)} == set(range(6))
    assert_told_once(events)
    assert_empty(engine)


def test_rows_that_are_tried_can_be_cancelled_and_give_their_memory_back(
    models: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", "mlxsrv.engine")  # a record keeps its traceback, and that arrays
    model = models("qwen3")
    mx.eval(model.parameters())
    faulty = Faulty(model, at_step(5))
    engine = make(faulty)
    before = mx.get_active_memory()
    for i in range(6):
        engine.submit(job(i, prompt(i, 60), 50))
    while not engine.schedule._recovery.rows:
        engine.decode()
        engine.prefill()
        assert faulty.calls < 20
    engine.cancel([0, 1, 2, 3, 4])
    events: list[Event] = []
    while not engine.idle:
        events += engine.decode() + engine.prefill()
    assert {*texts(events)} == {5}
    assert_empty(engine)
    mx.synchronize()
    assert mx.get_active_memory() - before < 4096


# Loads, and what comes out of the thread.


def load_command(folder: Path) -> Load:
    return Load(model="m", path=str(folder), max_rows=4, prefill_chunk=64, max_gap=0.01)


@pytest.mark.parametrize("error", [MemoryError("no room"), PanicException("panicked")])
def test_a_load_that_fails_in_any_slice_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    folder = write_model(tmp_path / "m", "qwen3", vocab_size=4096)
    real, counter = real_load, {"slice": 10**9, "slices": 0}

    def load(*args: Any) -> Generator[None, None, Any]:
        slices = real(*args)
        for number in itertools.count():
            counter["slices"] = number
            if number == counter["slice"]:
                return slices.throw(type(error)(*error.args))  # whose traceback dies with it
            try:
                next(slices)
            except StopIteration as done:
                return done.value
            yield

    monkeypatch.setattr(loading, "load", load)

    async def test() -> None:
        client = EngineClient.open()
        try:
            await client.load(load_command(folder))
            last = counter["slices"]
            assert last >= 4
            client.unload("m")
            before = (await client.report()).active_bytes
            for number in (0, 1, 2, last // 2, last - 1):
                counter["slice"] = number
                with pytest.raises(ModelNotLoaded, match=str(error)):
                    await client.load(load_command(folder))
                after = await client.report()
                assert after.active_bytes <= before, number
                assert after.cache_bytes == 0, number
            counter["slice"] = -1
            await client.load(load_command(folder))
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_files_that_vanish_while_they_are_read_fail_the_load(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3", vocab_size=4096)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()

    async def test() -> None:
        client = EngineClient.open()
        try:
            before = (await client.report()).active_bytes
            for damage in (weights.unlink, lambda: weights.write_bytes(whole[: len(whole) // 2])):
                damage()
                with pytest.raises(ModelNotLoaded):
                    await client.load(load_command(folder))
                assert (await client.report()).active_bytes - before < 4096
                weights.write_bytes(whole)
            await client.load(load_command(folder))
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_receiver_that_raises_costs_nobody_else_an_event(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")

    async def test() -> None:
        client = EngineClient.open()
        ended = asyncio.Event()
        heard: list[JobEvent] = []
        refused: list[JobEvent] = []

        def listen(event: JobEvent) -> None:
            heard.append(event)
            if isinstance(event, Token) and event.finish:
                ended.set()

        def refuse(event: JobEvent) -> None:
            refused.append(event)
            if len([each for each in refused if isinstance(each, Token)]) >= 3:
                raise ValueError("I cannot")

        try:
            await client.load(load_command(folder))
            client.submit(job(1, prompt(1), 10**6), refuse)
            client.submit(job(2, prompt(1), 30), listen)
            await ended.wait()
            assert len(texts(list(heard))[2]) == 30
            assert isinstance(refused[-1], Failed)
            assert len(texts(list(refused))[1]) == 3
            rows = (await client.report()).models["m"]
            assert (rows["rows"], rows["waiting"]) == (0, 0)
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))


def test_an_order_that_fails_is_its_own_affair(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "qwen3")

    async def test() -> None:
        client = EngineClient.open()
        ended = asyncio.Queue[JobEvent]()
        try:
            await client.load(load_command(folder))
            bad = job(1, prompt(1), steering=Steering(vectors=(("v", "high"),)))  # type: ignore[arg-type]
            bad = msgspec.structs.replace(bad, prompt=("no", "tokens"))
            client.submit(bad, ended.put_nowait)
            assert isinstance(await ended.get(), Failed)
            client.submit(job(2, prompt(1), 1), ended.put_nowait)
            assert isinstance(await ended.get(), Started)
            assert client.failure is None
        finally:
            client.close()

    asyncio.run(asyncio.wait_for(test(), 60))
