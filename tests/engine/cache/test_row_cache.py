"""The KV cache of one row."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from mlxsrv.engine.cache.quantized import QuantizedCache
from mlxsrv.engine.cache.row_cache import Layers, RowCache


def fed(tokens: int) -> RowCache:
    row = RowCache([KVCache(), CacheList(KVCache(), KVCache())], tokens)
    feed(row, range(tokens))
    return row


def feed(row: RowCache, numbers: range) -> None:
    for layer in (row.layers[0], *row.layers[1].caches):
        keys = mx.array(list(numbers), dtype=mx.float32)[None, None, :, None]
        layer.update_and_fetch(keys, keys)


def numbers(row: RowCache) -> list[float]:
    [kept] = {tuple(layer.keys_and_values()[0].flatten().tolist()) for layer in flat(row)}
    return list(kept)


def flat(row: RowCache) -> Layers:
    return [row.layers[0], *row.layers[1].caches]


def test_a_cut_row_holds_the_first_tokens() -> None:
    row = fed(9)
    assert row.cuts
    row.cut(9)
    row.cut(4)
    assert (row.tokens, numbers(row)) == (4, [0, 1, 2, 3])
    assert row.nbytes == 3 * 2 * 256 * 4


def test_a_copy_goes_its_own_way() -> None:
    row = fed(5)
    other = row.copy()
    other.cut(3)
    feed(other, range(90, 92))
    assert numbers(other) == [0, 1, 2, 90, 91]
    assert (row.tokens, numbers(row)) == (5, [0, 1, 2, 3, 4])


def test_a_copy_that_ends_before_the_start_holds_no_quantized_tokens() -> None:
    row = RowCache([QuantizedCache(10, 32, 4)], 600)
    row.layers[0].update_and_fetch(mx.ones((1, 1, 600, 32)), mx.ones((1, 1, 600, 32)))
    other = row.copy(7)
    assert other.nbytes == 2 * 7 * 32 * 4
    other.layers[0].update_and_fetch(mx.ones((1, 1, 9, 32)), mx.ones((1, 1, 9, 32)))
    assert other.layers[0].later.offset == 6


def test_a_row_cannot_be_cut_to_more_than_it_holds() -> None:
    with pytest.raises(ValueError, match="5 tokens cannot be cut to 6"):
        fed(5).cut(6)


@pytest.mark.parametrize(
    "layer",
    [ArraysCache(1), ChunkedKVCache(4), CacheList(KVCache(), ArraysCache(1)), RotatingKVCache(4)],
    ids=["recurrent", "chunked", "list", "full window"],
)
def test_layers_that_have_lost_tokens_cannot_be_cut(layer: object) -> None:
    row = RowCache([layer], 6)
    if isinstance(layer, (RotatingKVCache, ChunkedKVCache)):
        assert row.cuts
        layer.update_and_fetch(mx.ones((1, 1, 6, 1)), mx.ones((1, 1, 6, 1)))
    if isinstance(layer, ChunkedKVCache):
        assert row.cuts
        layer.maybe_trim_front()
    assert not row.cuts
    with pytest.raises(ValueError, match="cannot be cut"):
        row.cut(5)
    row.cut(6)
