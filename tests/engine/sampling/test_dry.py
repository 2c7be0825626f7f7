"""DRY against llama.cpp's algorithm, written down here token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.sampling.dry import Dry, repetitions
from mlxsrv.generation.parameters import DryPenalty, Sampling
from tests.engine.sampling.test_processors import GREEDY, ids_of, job, make, prompt, run

Floats = np.ndarray[tuple[int], np.dtype[np.float64]]

VOCABULARY = 7
_HIGHEST = 1e30


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
        if dry.multiplier * float(dry.base) ** (length - dry.allowed_length) < _HIGHEST:
            penalty = dry.multiplier * dry.base ** (length - dry.allowed_length)
            found[token] = max(found[token], penalty)
    return found


penalties = st.builds(
    DryPenalty,
    multiplier=st.sampled_from([0.5, 0.8, 3.0]),
    base=st.sampled_from([1.0, 1.1, 1.75, 4.0]),
    allowed_length=st.integers(0, 5),
    last_n=st.one_of(st.just(-1), st.integers(1, 30)),
    breakers=st.sampled_from([(), (3,), (0, 5)]),
)
texts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=40)
repeating = st.builds(lambda part, times: part * times, st.lists(st.integers(0, 2)), st.just(4))
either = texts | repeating.filter(bool)
asked = st.lists(
    st.tuples(st.none() | penalties, either, either, st.booleans()),
    min_size=1,
    max_size=4,
)


def make_row(number: int, dry: DryPenalty | None, text: list[int], *, drawn: int) -> LiveRow:
    """A row with this text, of which so many tokens are drawn."""
    cut = len(text) - drawn
    row = LiveRow(job(number, tuple(text[:cut]), sampling=Sampling(dry=dry)))
    row.drawn = text[cut:]
    return row


@given(asked, st.integers(0, 2**32 - 1))
def test_the_penalties_are_llama_cpps(
    rows: list[tuple[DryPenalty | None, list[int], list[int], bool]], seed: int
) -> None:
    """Rows of any texts, that have drawn none or many, and are then fed more."""
    live, fed = [], []
    for i, (dry, text, more, fresh) in enumerate(rows):
        row = make_row(i, dry, text, drawn=len(text) // 2)
        row.fresh = fresh
        live.append(row)
        fed.append(([text[-1]] if fresh else []) + more)
    whole = [list(text) for _, text, _, _ in rows]
    if not any(map(Dry.wanted, live)):
        return
    processor = Dry(live, VOCABULARY)
    dice = np.random.default_rng(seed)
    for step in range(min(map(len, fed))):
        for i, row in enumerate(live):
            if step or not row.fresh:
                whole[i].append(fed[i][step])
        logits = dice.standard_normal((len(live), VOCABULARY)).astype(np.float32)
        inputs = mx.array([each[step] for each in fed], dtype=mx.uint32)
        found = np.array(processor(mx.array(logits), inputs))
        for i, row in enumerate(live):
            dry = row.job.sampling.dry
            if dry is None:
                assert (found[i] == logits[i]).all()
                continue
            expected = logits[i] - expect(whole[i], dry, VOCABULARY)
            low = logits[i] - found[i] > _HIGHEST / 10
            np.testing.assert_allclose(found[i][~low], expected[~low], rtol=1e-4, atol=1e-5)


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
