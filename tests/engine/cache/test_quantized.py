"""Keys and values that are quantized behind a start."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import mlx.core as mx
import pytest

from mlxsrv.engine.cache import quantized
from mlxsrv.engine.cache.quantized import PartlyQuantized, QuantizedCache, attend_quantized

GROUPS, HEADS, SIZE = 2, 6, 64
START, TOKENS, LAST = 5, 12, 3


def random(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def restore(kept: PartlyQuantized) -> mx.array:
    """The numbers that are read of keys or values."""
    weights, scales, biases = kept.later
    kind = kept.kind
    later = mx.dequantize(weights, scales, biases, group_size=kind.group_size, bits=kind.bits)
    return later if kept.first is None else mx.concatenate([kept.first, later], axis=2)


def masks() -> Iterator[tuple[str, Any]]:
    shown = mx.arange(TOKENS) <= mx.arange(TOKENS - LAST, TOKENS)[:, None]
    apart = random(2, HEADS, LAST, TOKENS) > -1
    yield "none", None
    yield "causal", "causal"
    yield "for all", shown
    yield "by row", shown[None, None] & (random(2, 1, LAST, TOKENS) > -1) | shown[:, :1]
    yield "by head", apart | (mx.arange(TOKENS) == 0)
    yield "of columns", (mx.arange(TOKENS) > 3)[None, None, None]
    yield "added", mx.where(shown, 0.0, -1e9)[None, None]


def test_attention_is_that_of_the_numbers_that_are_kept() -> None:
    mx.random.seed(0)
    for start, (name, mask), sunk in product((0, START), masks(), (False, True)):
        layer = QuantizedCache(start, 32, 8)
        keys, values = layer.update_and_fetch(
            random(2, GROUPS, TOKENS, SIZE), random(2, GROUPS, TOKENS, SIZE)
        )
        queries = random(2, HEADS, LAST, SIZE)
        sinks = random(HEADS) if sunk else None
        found = attend_quantized(queries, keys, values, 0.2, mask, sinks)
        expected = mx.fast.scaled_dot_product_attention(
            queries, restore(keys), restore(values), scale=0.2, mask=mask, sinks=sinks
        )
        assert mx.allclose(found, expected, atol=1e-5), (start, name, sunk)


def test_a_long_slice_of_a_long_text_is_done_some_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With all its scores at once it would take memory that nothing counts."""
    sizes = []
    attend = quantized._attend

    def watch(queries: mx.array, *given: Any) -> mx.array:
        sizes.append(queries.shape[2])
        return attend(queries, *given)

    monkeypatch.setattr(quantized, "_attend", watch)
    for start, (name, mask), sunk in product((0, START), masks(), (False, True)):
        layer = QuantizedCache(start, 32, 8)
        kept = layer.update_and_fetch(*(random(2, GROUPS, TOKENS, SIZE) for _ in range(2)))
        given = (random(2, HEADS, LAST, SIZE), *kept, 0.2, mask, random(HEADS) if sunk else None)
        whole = attend_quantized(*given)
        with monkeypatch.context() as patch:
            patch.setattr(quantized, "_MOST_SCORES", 2 * HEADS * TOKENS * 2)
            assert mx.allclose(attend_quantized(*given), whole, atol=1e-6), (start, name, sunk)
        assert [sizes.pop() for _ in range(3)] == [1, 2, LAST]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_a_text_is_the_same_whatever_slices_it_is_read_in(bits: int) -> None:
    """Also where heads are no multiple of the numbers in a word: five or six bits of 128."""
    keys, values = random(1, GROUPS, 700, 128), random(1, GROUPS, 700, 128)
    whole = QuantizedCache(START, 64, bits)
    expected = whole.update_and_fetch(keys, values)
    for cuts in ((3, 300, 700), (START, 6, 7, 700), (START + 1, 256, 512, 700)):
        layer, begin = QuantizedCache(START, 64, bits), 0
        for end in cuts:
            found = layer.update_and_fetch(keys[:, :, begin:end], values[:, :, begin:end])
            begin = end
        for back in (2, 300, 698):  # a cut, and the same again
            assert layer.trim(back) == back
            assert layer.offset == 700 - back
            found = layer.update_and_fetch(keys[:, :, -back:], values[:, :, -back:])
        for own, other in zip(found, expected, strict=True):
            assert mx.array_equal(own.first, keys[:, :, :START] if own is found[0] else own.first)
            assert mx.array_equal(restore(own), restore(other)), cuts


def test_only_tokens_behind_the_start_are_quantized() -> None:
    keys = random(1, GROUPS, START, SIZE)
    layer = QuantizedCache(START, 32, 4)
    for token in range(START):
        found, _ = layer.update_and_fetch(keys[:, :, token : token + 1], keys[:, :, :1])
    assert mx.array_equal(found, keys)
    found, _ = layer.update_and_fetch(keys[:, :, :1], keys[:, :, :1])
    assert isinstance(found, PartlyQuantized)
