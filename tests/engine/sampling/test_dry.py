"""DRY against llama.cpp's algorithm, written down here token by token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.sampling.dry import Dry, repetitions
from mlxsrv.generation.parameters import DryPenalty, Sampling
from tests.engine.sampling.test_processors import GREEDY, ids_of, job, make, prompt, run
from tests.support.effort import examples

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

VOCABULARY = 7


def expect(text: Sequence[int], dry: DryPenalty, vocabulary: int) -> Floats:
    """The penalty of each token behind a text."""
    found = np.zeros(vocabulary)
    window = list(text) if dry.last_n < 0 else list(text[-dry.last_n :])
    behind = next(
        (i for i, token in enumerate(reversed(window)) if token in dry.breakers), len(window)
    )
    for place in range(len(window) - 1):
        length = 0
        while length <= place and window[place - length] == window[-1 - length]:
            length += 1
        length, token = min(length, behind), window[place + 1]
        if length < dry.allowed_length or token in dry.breakers:
            continue
        penalty = dry.multiplier * dry.base ** (length - dry.allowed_length)
        found[token] = max(found[token], penalty)
    return found


texts = st.lists(st.integers(0, VOCABULARY - 1), max_size=40)
repeating = st.builds(lambda part, times: part * times, st.lists(st.integers(0, 2)), st.just(4))


def choose_penalty(dice: random.Random) -> DryPenalty | None:
    """Settings of a row; a quarter of the rows asks for nothing."""
    if dice.random() < 0.25:
        return None
    return DryPenalty(
        multiplier=dice.choice([0.5, 0.8, 3.0]),
        base=dice.choice([1.0, 1.1, 1.75, 4.0]),
        allowed_length=dice.choice([0, 1, 2, 2, 3, 5]),
        last_n=dice.choice([-1, -1, *range(1, 30)]),
        breakers=dice.choice([(), (), (1,), (0, 5)]),
    )


def choose_text(dice: random.Random, most: int) -> list[int]:
    """One to so many tokens, of few kinds or with a part again and again."""
    kinds = range(dice.randint(1, VOCABULARY))
    part = dice.choices(kinds, k=dice.randint(1, most))
    return part if dice.random() < 0.5 else (part[: dice.randint(1, 6)] * most)[:most]


def make_row(number: int, dry: DryPenalty | None, text: list[int], *, drawn: int) -> LiveRow:
    """A row with this text, of which so many tokens are drawn."""
    cut = len(text) - drawn
    row = LiveRow(job(number, tuple(text[:cut]), sampling=Sampling(dry=dry)))
    row.drawn = text[cut:]
    return row


def follow(dice: random.Random, steps: int) -> None:
    """Feed rows of any texts, and fail where a penalty is not llama.cpp's."""
    settings = [choose_penalty(dice) for _ in range(dice.randint(1, 4))] + [DryPenalty(1.0)]
    whole = [choose_text(dice, 40) for _ in settings]
    rows = [
        make_row(i, dry, text, drawn=dice.randrange(len(text)))
        for i, (dry, text) in enumerate(zip(settings, whole, strict=True))
    ]
    fed = [choose_text(dice, steps) * steps for _ in rows]
    for row, tokens in zip(rows, fed, strict=True):
        row.fresh = dice.random() < 0.5
        tokens[:0] = [row.last] if row.fresh else []
    processor = Dry(rows, VOCABULARY)
    for step in range(steps):
        logits = np.array([[dice.gauss(0, 1) for _ in range(VOCABULARY)] for _ in rows], np.float32)
        inputs = mx.array([each[step] for each in fed], dtype=mx.uint32)
        found = np.array(processor(mx.array(logits), inputs))
        for i, (row, dry) in enumerate(zip(rows, settings, strict=True)):
            if step or not row.fresh:
                whole[i].append(fed[i][step])
            if dry is None:
                assert (found[i] == logits[i]).all()
                continue
            expected = logits[i] - expect(whole[i], dry, VOCABULARY)
            np.testing.assert_allclose(found[i], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(examples(40)))
def test_the_penalties_are_llama_cpps(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(12):
        follow(dice, 10)


@given(texts | repeating)
def test_repetitions_are_found_as_by_comparing_all(text: list[int]) -> None:
    found = repetitions(np.array(text, dtype=np.int32)).tolist()
    for place in range(len(text) - 1):
        length = 0
        while length <= place and text[place - length] == text[-1 - length]:
            length += 1
        assert found[place] == length
    assert found[-1:] in ([], [0])


def test_a_penalty_stays_finite() -> None:
    """A grammar may leave no other token."""
    dry = DryPenalty(100.0, base=100.0, allowed_length=0)
    row = make_row(0, dry, [1] * 60, drawn=30)
    logits = np.array(Dry([row], VOCABULARY)(mx.zeros((1, VOCABULARY)), mx.array([1])))
    assert np.isfinite(logits).all()
    assert logits[0, 1] < -1e27


def assert_follows(model: Any, tokens: Sequence[int], drawn: list[int], dry: DryPenalty) -> None:
    """Fails unless these are the greedy tokens behind the penalties."""
    passed = model(mx.array([*tokens, *drawn[:-1]])[None])[0, len(tokens) - 1 :]
    for i, logits in enumerate(np.array(passed, dtype=np.float64)):
        expected = logits - expect([*tokens, *drawn[:i]], dry, len(logits))
        best = np.sort(expected)[-2:]
        assert drawn[i] == expected.argmax() or best[1] - best[0] < 1e-4


@pytest.mark.slow
def test_rows_draw_what_they_draw_alone_whatever_rows_come_and_go(models: Any) -> None:
    """Some ask, with other settings each, and some do not."""
    model = models("qwen3")
    settings: list[DryPenalty | None] = [
        DryPenalty(2.0, allowed_length=1, breakers=(7, 20)),
        None,
        DryPenalty(50.0, allowed_length=0, last_n=9),
        None,
        DryPenalty(0.8),
        DryPenalty(1.0, base=1.0, last_n=12),
    ]
    lengths = [40, 25, 12, 30, 20, 33]

    def submit(batch: Any, number: int, sampling: Sampling) -> None:
        own = replace(sampling, dry=settings[number])
        batch.submit(job(number, prompt(number) * 2, lengths[number], sampling=own))

    for sampling in (GREEDY, Sampling(seed=5)):
        batch = make(model, max_rows=3)
        for number in range(len(settings)):
            submit(batch, number, sampling)
        together = run(batch)
        for number, dry in enumerate(settings):
            drawn = ids_of(together, number)
            assert len(drawn) == lengths[number]
            alone = make(model)
            submit(alone, number, sampling)
            assert ids_of(run(alone), number) == drawn
            if sampling is GREEDY and dry is not None:
                assert_follows(model, prompt(number) * 2, drawn, dry)
