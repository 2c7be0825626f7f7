"""Bounded KV caches: a token attends to the first tokens and to the last, in any batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxsrv.engine.cache.attention_sinks import KEPT, SinkCache
from tests.support.effort import examples

SIZE = 16


class Row:
    """A row's texts so far: its tokens are numbers that no other row has."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.length = 0

    def grow(self, count: int) -> list[int]:
        self.length += count
        return list(range(self.first + self.length - count, self.first + self.length))

    def visible(self, back: int) -> set[int]:
        """Return what the token `back` places before the last may see: the first, and the last."""
        own = self.length - 1 - back
        places = {*range(min(KEPT, own + 1)), *range(max(0, own + 1 - (SIZE - KEPT)), own + 1)}
        return {self.first + place for place in places}


def feed(cache: Any, tokens: Sequence[Sequence[int]]) -> list[list[set[int]]]:
    """Give each row its tokens, whose keys are their numbers; what each token may see."""
    count = len(tokens[0])
    mask = cache.make_mask(count)
    keys = mx.array(list(tokens), dtype=mx.float32)[:, None, :, None]
    seen, values = cache.update_and_fetch(keys, -keys)
    assert (seen == -values).all().item()
    shape = (len(tokens), count, seen.shape[2])
    if mask is None:
        mask = mx.ones(shape, dtype=mx.bool_)
    elif isinstance(mask, str):
        mask = mx.tril(mx.ones(shape[1:], dtype=mx.bool_), k=shape[2] - count)
    visible = np.broadcast_to(np.array(mask).reshape(-1, *shape[1:]), shape)
    return [
        [set(np.array(seen)[i, 0, row, 0].astype(int).tolist()) for row in visible[i]]
        for i in range(len(tokens))
    ]


def check(rows: Sequence[Row], seen: list[list[set[int]]]) -> None:
    for row, own in zip(rows, seen, strict=True):
        assert own == [row.visible(back) for back in reversed(range(len(own)))]


def read_alone(row: Row, chunks: Sequence[int]) -> SinkCache:
    cache = SinkCache(SIZE)
    for chunk in chunks:
        check([row], feed(cache, [row.grow(chunk)]))
    return cache


def read_together(rows: list[Row], lengths: list[int], caches: list[SinkCache]) -> Any:
    """One pass, right-padded, as prompts are read."""
    batch = SinkCache.merge(caches)
    padding = [max(lengths) - length for length in lengths]
    batch.prepare(lengths=lengths, right_padding=padding)
    tokens = [
        row.grow(length) + [0] * pad
        for row, length, pad in zip(rows, lengths, padding, strict=True)
    ]
    seen = feed(batch, tokens)
    check(rows, [own[:length] for own, length in zip(seen, lengths, strict=True)])
    batch.finalize()
    return batch


@pytest.mark.parametrize("cached", [3, 11, 12, 13, 16, 30])
@pytest.mark.parametrize("lengths", [(2, 1), (9, 1), (20, 3)])
def test_a_row_leaves_with_its_first_tokens_whatever_padding_it_was_read_with(
    cached: int, lengths: tuple[int, int]
) -> None:
    longer, row = Row(1000), Row(2000)
    caches = [SinkCache(SIZE), read_alone(row, [cached])]
    cache = read_together([longer, row], list(lengths), caches).extract(1)
    assert (cache.offset, cache.max_size) == (row.length, SIZE)
    batch = SinkCache.merge([cache])
    for _ in range(3):
        check([row], feed(batch, [row.grow(1)]))


chunks = st.lists(st.integers(1, 20), max_size=4)


@given(
    st.lists(chunks, min_size=1, max_size=3),
    st.lists(st.integers(1, 20), min_size=3, max_size=3),
    st.integers(0, 60),
    st.data(),
)
@settings(max_examples=examples(80))
def test_tokens_see_the_first_and_the_last(
    prompts: list[list[int]],
    more: list[int],
    steps: int,
    data: st.DataObject,
) -> None:
    numbers = iter(range(1000, 100_000, 1000))
    new: Callable[[], Row] = lambda: Row(next(numbers))  # noqa: E731
    rows = [new() for _ in prompts]
    caches = [read_alone(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]
    batch = read_together(rows, more[: len(rows)], caches)

    def decode(count: int) -> None:
        for _ in range(count):
            check(rows, feed(batch, [row.grow(1) for row in rows]))

    decode(steps)
    i = data.draw(st.integers(0, len(rows) - 1))
    row, cache = rows[i], batch.extract(i)
    assert (cache.offset, cache.max_size) == (row.length, SIZE)
    for chunk in data.draw(chunks):
        check([row], feed(cache, [row.grow(chunk)]))
    rows, batch = [row], SinkCache.merge([cache])
    decode(3)
