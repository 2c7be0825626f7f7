"""The likeliest tokens, compared with a stable sort."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxsrv.engine.sampling.blocks import Blocks


def make_logits(kind: str, vocabulary: int) -> np.ndarray[Any, Any]:
    values = 3 * np.random.default_rng(vocabulary).standard_normal((5, vocabulary))
    if kind == "ties":
        values = np.round(values) + 0.0  # no -0
    elif kind == "crossed":  # equal entries in other combs of a block, the last of which is first
        places = np.arange(vocabulary) % 128
        values[:] = (places % 7 == 1) & (places >= 71) & (places <= 120)
    elif kind == "equal":
        values = np.zeros_like(values)
    elif kind == "few":
        values[:, 9:] = -np.inf
    elif kind == "rising":
        values = np.sort(values)
    return values.astype(np.float32)


@pytest.mark.parametrize("kind", ["random", "ties", "crossed", "equal", "few", "rising"])
@pytest.mark.parametrize("vocabulary", [1, 5, 128, 129, 1000, 5000, 50_257])
def test_top_is_a_stable_sorts(kind: str, vocabulary: int) -> None:
    logits = make_logits(kind, vocabulary)
    blocks = Blocks(mx.array(logits))
    order = np.argsort(-logits, axis=-1, kind="stable")
    for count in (1, 2, 20, 64, 300, 1024, 6000):
        found, values = (np.array(part) for part in blocks.top(count))
        assert (found == order[:, :count]).all()
        assert (values == np.take_along_axis(logits, order[:, :count], axis=-1)).all()
    assert (np.array(blocks.likeliest()) == order[:, :1]).all()
    assert (np.array(blocks.highest)[:, 0] == logits.max(axis=-1)).all()


@pytest.mark.parametrize("count", [20, 300, 1024])
@pytest.mark.parametrize("kind", ["random", "ties"])
def test_unordered_top_is_the_same_set(kind: str, count: int) -> None:
    logits = make_logits(kind, 5000)
    found, values = (np.array(part) for part in Blocks(mx.array(logits)).top_unordered(count))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
    assert (np.sort(found) == np.sort(order)).all()
    assert (values == np.take_along_axis(logits, found, axis=-1)).all()


def test_the_order_of_a_rows_top_is_its_own() -> None:
    logits = mx.array(make_logits("random", 50_257))
    together = np.array(Blocks(logits).top_unordered(1024)[0])
    for i in range(len(logits)):
        alone = np.array(Blocks(logits[i : i + 1]).top_unordered(1024)[0])
        assert (alone[0] == together[i]).all()


def test_halves_are_taken_as_they_are() -> None:
    logits = mx.array(make_logits("random", 5000)).astype(mx.bfloat16)
    ids, values = Blocks(logits).top(30)
    exact = np.array(logits.astype(mx.float32))
    order = np.argsort(-exact, axis=-1, kind="stable")[:, :30]
    assert (np.array(ids) == order).all()
    assert (np.array(values) == np.take_along_axis(exact, order, axis=-1)).all()


@pytest.mark.parametrize("place", [0, 5, 77, 127, 128, 4999])
def test_a_number_that_is_none_shows(place: int) -> None:
    logits = make_logits("random", 5000)
    logits[1, place] = np.nan
    highest = np.array(Blocks(mx.array(logits)).highest)[:, 0]
    assert np.isnan(highest).tolist() == [False, True, False, False, False]


def test_rows_can_be_taken() -> None:
    logits = mx.array(make_logits("ties", 5000))
    wanted = Blocks(logits).top(7)[0][mx.array([3, 1])]
    for blocks in (Blocks(logits), Blocks(logits[:4])):
        assert mx.array_equal(blocks.select_rows(mx.array([3, 1])).top(7)[0], wanted)
