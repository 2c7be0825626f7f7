"""The sampler draws from the distribution that its parameters define."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlxsrv.engine.sampling.sampler import _DRAWS, Sampler, _Uniforms
from mlxsrv.generation.parameters import Sampling
from tests.support.effort import often

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


SETTINGS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=0.6, top_p=0.95, top_k=20),
    Sampling(top_k=20),
    Sampling(top_k=700, top_p=0.6),
    Sampling(top_k=20, min_p=0.2),
    Sampling(top_p=0.9),
    Sampling(top_p=0.8, min_p=0.05),
    Sampling(temperature=1.5, top_p=0.999),
    Sampling(top_p=0.3),
    Sampling(top_p=0.02),
    Sampling(top_p=0),
    Sampling(min_p=0.1),
    Sampling(top_k=300, min_p=0.01),
]
SMALL, LARGE = 200, 4500  # entries of vocabularies that are drawn from in different ways


@pytest.mark.parametrize(
    ("sampling", "vocabulary"),
    often(
        product(SETTINGS, (SMALL, LARGE)),
        [*product(SETTINGS, [SMALL]), *product((*SETTINGS[::4], SETTINGS[10]), [LARGE])],
    ),
    ids=repr,
)
def test_what_neighbours_ask_for_changes_nothing(sampling: Sampling, vocabulary: int) -> None:
    """There are several methods; only a row's own settings may choose among them."""
    rows, steps = 24, 6
    mine = [msgspec.structs.replace(sampling, seed=seed) for seed in range(rows)]
    neighbours = [
        Sampling(top_k=5),
        Sampling(top_k=1024),
        Sampling(top_k=400, top_p=0.1),
        Sampling(top_p=0.05),
        Sampling(top_p=0.7, min_p=0.1),
        Sampling(temperature=0.001),
        Sampling(temperature=0),
        Sampling(min_p=0.5),
        Sampling(),
    ]
    logits = random_logits(rows + len(neighbours), vocabulary)
    alone = Sampler(mine, [9] * rows)
    beside = Sampler(mine + neighbours, [9] * rows + [0] * len(neighbours))
    for _ in range(steps):
        assert ids(beside(logits))[:rows] == ids(alone(logits[:rows]))
    last = Sampler(neighbours + mine, [0] * len(neighbours) + [9] * rows)
    assert ids(last(mx.concatenate([logits[rows:], logits[:rows]])))[len(neighbours) :] == ids(
        Sampler(mine, [9] * rows)(logits[:rows])
    )


def distribution(logits: np.ndarray[Any, Any], sampling: Sampling) -> np.ndarray[Any, Any]:
    """Return the tokens' probabilities by definition: temperature, top-k, top-p, min-p."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / sampling.temperature)
    order = np.argsort(-logits, kind="stable")
    left = np.zeros(len(logits), bool)
    left[order[: sampling.top_k or len(logits)]] = True
    total = weights[left].sum()
    ordered = np.sort(weights[left])
    sums = np.append(ordered[::-1].cumsum()[::-1], 0)
    likelier = sums[np.searchsorted(ordered, weights, side="right")]
    if sampling.top_p < 1:
        left &= (likelier < sampling.top_p * total) | (weights == 1)
    left &= weights >= sampling.min_p
    probabilities: np.ndarray[Any, Any] = np.where(left, weights, 0) / weights[left].sum()
    return probabilities


@pytest.mark.parametrize(
    ("sampling", "vocabulary"),
    often(
        [(sampling, size) for sampling in SETTINGS for size in (40, LARGE)],
        [(sampling, 40) for sampling in SETTINGS]
        + [(sampling, LARGE) for sampling in (*SETTINGS[::4], SETTINGS[10])],
    ),
    ids=repr,
)
@pytest.mark.slow
def test_frequencies_are_exact(sampling: Sampling, vocabulary: int) -> None:
    """Pearson's chi-square test. Tokens with an expected count below ten are counted together. The
    batch has rows with other settings as well."""
    logits = np.array(random_logits(1, vocabulary))[0] * 1.5
    expected = distribution(logits, sampling)
    rows, steps = 200, 50
    mine = [msgspec.structs.replace(sampling, seed=seed) for seed in range(rows)]
    sampler = Sampler([*mine, Sampling(temperature=0), Sampling(top_k=3)], [0] * (rows + 2))
    wide = mx.broadcast_to(mx.array(logits), (rows + 2, vocabulary))
    counts = np.zeros(vocabulary)
    for _ in range(steps):
        np.add.at(counts, np.array(sampler(wide))[:rows], 1)
    assert not counts[expected == 0].any()
    n = rows * steps
    often = n * expected >= 10
    observed = np.append(counts[often], counts[~often].sum())
    predicted = n * np.append(expected[often], expected[~often].sum())
    if predicted[-1] < 1e-6:
        observed, predicted = observed[:-1], predicted[:-1]
    freedom = max(len(predicted) - 1, 1)
    statistic = ((observed - predicted) ** 2 / predicted).sum()
    # Wilson and Hilferty's normal approximation: 4 deviations are once in 30,000 times
    deviations = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) * np.sqrt(
        9 * freedom / 2
    )
    assert deviations < 4


@pytest.mark.parametrize("vocabulary", often([40, LARGE], [LARGE]))
@pytest.mark.parametrize(
    "logits", ["all equal", "few values", "one spike a block", "two tokens", "first block", "last"]
)
@pytest.mark.parametrize(
    "sampling",
    often([SETTINGS[i] for i in (0, 2, 6, 9, 12)], [SETTINGS[i] for i in (2, 9, 12)]),
    ids=repr,
)
@pytest.mark.slow
def test_shapes_that_blocks_might_mistake(sampling: Sampling, vocabulary: int, logits: str) -> None:
    dice = np.random.default_rng(5)
    entries = {
        "all equal": np.zeros(vocabulary),
        "few values": dice.integers(0, 3, vocabulary).astype(float),
        "one spike a block": np.where(np.arange(vocabulary) % 128 == 77, 0.0, -np.inf),
        "two tokens": np.where(np.isin(np.arange(vocabulary), [0, vocabulary - 1]), 0.0, -np.inf),
        "first block": np.append([0.0, -0.7, -1.9], np.full(vocabulary - 3, -np.inf)),
        "last": np.append(np.full(vocabulary - 3, -np.inf), [-1.9, -0.7, 0.0]),
    }[logits]
    if not np.isfinite(entries).any():
        entries[7] = 0
    expected = distribution(entries, sampling)
    rows = 1500
    mine = [msgspec.structs.replace(sampling, seed=seed) for seed in range(rows)]
    wide = mx.broadcast_to(mx.array(entries.astype(np.float32)), (rows, vocabulary))
    counts = np.bincount(np.array(Sampler(mine, [0] * rows)(wide)), minlength=vocabulary)
    assert not counts[expected == 0].any()
    # by parts of the vocabulary, because a single token comes too rarely
    for part in [*np.array_split(np.arange(vocabulary), 8), np.array([0]), np.array([1])]:
        p = expected[part].sum()
        assert abs(counts[part].sum() - rows * p) <= 5 * np.sqrt(rows * p * (1 - p)) + 1


@pytest.mark.parametrize("vocabulary", [40, LARGE])
def test_top_k_keeps_exactly_so_many_of_equal_tokens(vocabulary: int) -> None:
    """The lowest ids are kept, so top_k 1 is the same as temperature 0."""
    logits = np.full(vocabulary, 1.0, np.float32)
    logits[[3, 30]] = 2.0, -1.0
    rows = 300
    wide = mx.broadcast_to(mx.array(logits), (rows, vocabulary))
    for count, kept in ((1, {3}), (4, {0, 1, 2, 3})):
        sampler = Sampler([Sampling(top_k=count, seed=seed) for seed in range(rows)], [0] * rows)
        assert set(ids(sampler(wide))) == kept


@pytest.mark.parametrize("top_k", [1, 20, 1024])
def test_no_vocabulary_is_sorted(top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = 151_936
    widths: list[int] = []
    for name in ("sort", "argsort", "partition", "argpartition", "topk"):
        function = getattr(mx, name)

        def spy(array: mx.array, *args: Any, function: Any = function, **more: Any) -> mx.array:
            widths.append(array.shape[-1])
            result: mx.array = function(array, *args, **more)
            return result

        monkeypatch.setattr(mx, name, spy)
    rows = [Sampling(top_k=top_k), Sampling(top_p=0.9), Sampling(min_p=0.1), Sampling()]
    Sampler(rows, [0] * 4)(random_logits(4, vocabulary))
    assert widths
    assert max(widths) < vocabulary / 8


@pytest.mark.parametrize(
    ("sampling", "vocabulary"),
    [
        (Sampling(top_p=0.9), LARGE),
        (Sampling(top_p=0.9), SMALL),
        (Sampling(top_p=0.5, top_k=20), LARGE),
    ],
)
def test_tries_that_all_fail_leave_the_likeliest(
    sampling: Sampling, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens once in a million times at most, so the test sets the random numbers."""
    last = mx.full((1, _DRAWS, 1), 0.9999999)
    monkeypatch.setattr(_Uniforms, "next", lambda self: [last] * self._sets)
    logits = mx.where(mx.arange(vocabulary) == 5, 2.0, 1.0 - mx.arange(vocabulary) / vocabulary)
    assert ids(Sampler([sampling], [0])(logits[None])) == [5]


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
