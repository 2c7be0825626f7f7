"""The sampler against what its parameters promise."""

from __future__ import annotations

from collections import Counter

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlxsrv.engine import sampling
from mlxsrv.engine.sampling import Sampler
from mlxsrv.events import Sampling

PROBABILITIES = [0.25, 0.07, 0.5, 0.03, 0.15]  # in no order
LOGITS = np.log(PROBABILITIES)


def ids(tokens: mx.array) -> list[int]:
    return [int(token) for token in np.array(tokens)]


def draw(sampling: Sampling, times: int) -> list[int]:
    """`times` draws of one row."""
    sampler = Sampler([sampling], [0])
    logits = mx.array(LOGITS)[None]
    return [ids(sampler(logits))[0] for _ in range(times)]


def draw_wide(sampling: Sampling, rows: int) -> Counter[int]:
    """One draw of each of many rows, each with its own seed."""
    seeded = [
        Sampling(sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, seed)
        for seed in range(rows)
    ]
    sampler = Sampler(seeded, [0] * rows)
    tokens = sampler(mx.broadcast_to(mx.array(LOGITS), (rows, len(LOGITS))))
    return Counter(ids(tokens))


def test_temperature_0_is_the_likeliest() -> None:
    assert draw(Sampling(temperature=0), 5) == [2] * 5


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_those_of_the_scaled_distribution(temperature: float) -> None:
    scaled = np.exp(LOGITS / temperature)
    scaled /= scaled.sum()
    n = 20_000
    counts = draw_wide(Sampling(temperature=temperature), n)
    for token, expected in enumerate(scaled):
        # five standard deviations of a binomial count
        margin = 5 * np.sqrt(n * expected * (1 - expected))
        assert abs(counts[token] - n * expected) < margin


@pytest.mark.parametrize("temperature", [0.004, 0.0156, 0.0157, 1.0])
def test_low_temperatures_are_temperatures_like_others(temperature: float) -> None:
    n = 20_000
    sampler = Sampler([Sampling(temperature, seed=seed) for seed in range(n)], [0] * n, ahead=1)
    logits = mx.array([0.0, -temperature / 2])  # the second weighs exp(-1/2) at any temperature
    count = sum(ids(sampler(mx.broadcast_to(logits, (n, 2)))))
    expected = n / (1 + np.exp(0.5))
    assert abs(count - expected) < 5 * np.sqrt(expected * (1 - expected / n))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("damage", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 7, 19])
def test_a_token_that_means_nothing_shows(temperature: float, damage: float, place: int) -> None:
    logits = np.zeros((3, 20), np.float32)
    logits[1, place] = damage
    logits[2] = -np.inf
    sampler = Sampler([Sampling(temperature, top_p=0.9)] * 3, [0] * 3)
    tokens, highest = sampler.draw(mx.array(logits))
    assert np.isfinite(np.array(highest)).tolist() == [[True], [False], [False]]
    assert all(0 <= token < 20 for token in ids(tokens))  # it may be fed before that is seen


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_p=0.5), {2}),
        (Sampling(top_p=0.51), {2, 0}),
        (Sampling(top_p=0.9), {2, 0, 4}),
        (Sampling(top_p=0.0), {2}),
        (Sampling(top_k=1), {2}),
        (Sampling(top_k=3), {2, 0, 4}),
        (Sampling(min_p=0.28), {2, 0, 4}),
        (Sampling(min_p=1.0), {2}),
        (Sampling(top_k=2, top_p=0.99), {2, 0}),
        # top-p counts over what top-k left: 0.5 of 0.75 is two thirds
        (Sampling(top_k=2, top_p=0.66), {2}),
    ],
)
def test_filters_keep_exactly_what_they_say(sampling: Sampling, kept: set[int]) -> None:
    assert set(draw_wide(sampling, 4000)) == kept


def test_a_rows_tokens_depend_on_its_seed_and_place_alone() -> None:
    alone = draw(Sampling(seed=42), 30)
    sampler = Sampler([Sampling(seed=42)], [0])
    logits = mx.array(LOGITS)[None]
    together = [ids(sampler(logits))[0] for _ in range(10)]
    # then two others join: greedy, and one with filters, which changes the path taken
    others = [Sampling(temperature=0), Sampling(seed=42), Sampling(seed=7, top_p=0.9)]
    sampler = Sampler(others, [3, 10, 0])
    wide = mx.broadcast_to(mx.array(LOGITS), (3, len(LOGITS)))
    rows = [ids(sampler(wide)) for _ in range(20)]
    assert [row[0] for row in rows] == [2] * 20
    assert together + [row[1] for row in rows] == alone


def random_logits(rows: int, vocabulary: int = 200) -> mx.array:
    return mx.random.normal((rows, vocabulary), key=mx.random.key(3)) * 2


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(top_p=0.9),
        Sampling(top_p=0.8, min_p=0.05),
        Sampling(temperature=1.5, top_p=0.999),
        Sampling(min_p=0.1),
        Sampling(top_p=0.3),
        Sampling(top_k=20),
        Sampling(),
    ],
)
def test_whether_neighbours_sort_the_vocabulary_changes_nothing(sampling: Sampling) -> None:
    """Which way filters take depends on all rows; what a row draws must not."""
    rows, steps = 64, 6
    mine = [msgspec.structs.replace(sampling, seed=seed) for seed in range(rows)]
    neighbours = [
        Sampling(top_k=5),
        Sampling(top_p=0.05),
        Sampling(top_p=0.7),
        Sampling(temperature=0.001),
        Sampling(temperature=0),
        Sampling(),
    ]
    logits = random_logits(rows + len(neighbours))
    alone = Sampler(mine, [9] * rows)
    beside = Sampler(mine + neighbours, [9] * rows + [0] * len(neighbours))
    for _ in range(steps):
        assert ids(beside(logits))[:rows] == ids(alone(logits[:rows]))


@pytest.mark.parametrize("top_p", [0.52, 0.7, 0.9, 0.97, 0.9999, 0.2])
@pytest.mark.parametrize("min_p", [0.0, 0.02])
def test_top_p_draws_from_the_nucleus_as_it_is(top_p: float, min_p: float) -> None:
    logits = np.array(random_logits(1, 40))[0]
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights)
    likelier = np.concatenate([[0], np.cumsum(weights[order])[:-1]]) / weights.sum()
    kept = {int(token) for token, mass in zip(order, likelier, strict=True) if mass < top_p}
    kept = {token for token in kept if weights[token] >= min_p}
    n = 20_000
    sampler = Sampler([Sampling(1.0, top_p, 0, min_p, seed) for seed in range(n)], [0] * n, ahead=1)
    counts = Counter(ids(sampler(mx.broadcast_to(mx.array(logits), (n, len(logits))))))
    assert set(counts) <= kept
    total = sum(weights[token] for token in kept)
    for token in kept:
        expected = weights[token] / total
        assert abs(counts[token] - n * expected) <= 5 * np.sqrt(n * expected * (1 - expected)) + 1


def test_where_tries_would_take_too_much_memory_tokens_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [Sampling(top_p=0.9 - i % 3 * 0.1, seed=i) for i in range(64)]
    logits = random_logits(len(rows))
    tried = Sampler(rows, [0] * len(rows))
    wanted = [ids(tried(logits)) for _ in range(4)]
    monkeypatch.setattr(sampling, "_MOST_TRIED", 0)
    monkeypatch.setattr(Sampler, "_within_nucleus", None)
    sorted_ = Sampler(rows, [0] * len(rows))
    assert [ids(sorted_(logits)) for _ in range(4)] == wanted


def test_tries_that_all_miss_leave_the_likeliest() -> None:
    """Once in 2**16 times at most: so the numbers are made up."""
    sampler = Sampler([Sampling(top_p=0.9)], [0])
    logits = mx.array(LOGITS)[None]
    sampler(logits)
    sampler._uniforms = mx.full(sampler._uniforms.shape, 0.99)
    assert ids(sampler(mx.array([[0.0, 0.0, 0.0, -1.0, -2.5, -3.5]]))) == [0]


def test_numbers_drawn_ahead_are_those_of_their_places() -> None:
    logits = random_logits(1)
    long, short = (Sampler([Sampling(seed=5)], [0], ahead=ahead) for ahead in (64, 3))
    assert [ids(long(logits)) for _ in range(70)] == [ids(short(logits)) for _ in range(70)]


def test_seeds_differ_in_all_their_bits() -> None:
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**63 - 1, -(2**63)]
    texts = {tuple(draw(Sampling(seed=seed), 40)) for seed in seeds}
    assert len(texts) == len(seeds)


def test_no_token_of_probability_0_is_drawn() -> None:
    logits = mx.array([[0.0, -np.inf, 0.0] + [-np.inf] * 50])
    rows = 3000
    sampler = Sampler([Sampling(seed=i) for i in range(rows)], [0] * rows)
    drawn = set(ids(sampler(mx.broadcast_to(logits, (rows, 53)))))
    assert drawn == {0, 2}
