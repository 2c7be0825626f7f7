"""Faults of a model: the row that causes one fails, and the text of all others is the same."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import inf, nan
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model

from mlxsrv.engine.events import (
    Activations,
    Event,
    Failed,
    Finished,
    PromptRead,
    PromptScored,
    Token,
)
from mlxsrv.engine.orders import Attach, Job, Watch
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint, Mask, Sampling, Steering
from tests.support.effort import often
from tests.support.faulty_text import (
    GREEDY,
    Asked,
    Fault,
    Faulty,
    Odd,
    PanicException,
    alone,
    assert_empty,
    assert_told_once,
    at_step,
    failures,
    job,
    make,
    mixed,
    on_token,
    prompt,
    run,
    stranger,
    texts,
)
from tests.support.saes import write_sae
from tests.support.tiny import FAMILIES, write_model

BATCHED = ["qwen3", "gemma3_text", "gpt_oss", "qwen3_next", "mamba2"]
DRAWN = Sampling(temperature=1, seed=3)
FILTERED = Sampling(temperature=1, top_p=0.5)


class Stuck:
    """A constraint that allows one token and then cannot go on."""

    dormant = False
    failure: str | None = None

    def fill(self, mask: Mask) -> None:
        pass

    def accept(self, token: int) -> None:
        self.failure = "too ambiguous"


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
    for step in (2, 14):
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
        reported = [each for each in events if isinstance(each, Activations)]
        # A row's last token may be fed although it has ended; nobody listens then.
        return Counter(
            (each.job, each.position) for each in reported if each.position < 20 + 10 - 1
        )

    expected = watched(lambda *_: None)
    assert {*expected.values()} == {1}
    for step in (2, 7):
        assert watched(at_step(step)) == expected


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


@pytest.mark.parametrize(
    ("sampling", "value"),
    often(
        product((GREEDY, DRAWN, FILTERED), (nan, -inf)),
        [(GREEDY, nan), (DRAWN, -inf), (FILTERED, nan)],
    ),
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
    assert all(poison not in entry.tokens for entry in engine.schedule._index._entries.values())
    scored = run(engine, [(job(30, bad, scores=0), None), (job(31, bad, 0, scores=0), None)])
    assert {*failures(scored)} == {30, 31}
    assert not [event for event in scored if isinstance(event, PromptScored)]
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
    while not engine.schedule._queue.preempted:
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
