"""The KV cache of a batch masks decode steps as mlx-lm's own does."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import BatchKVCache, KVCache

from mlxsrv.engine.cache.kv_caches import PaddedKVCache, merge
from mlxsrv.engine.cache.row_cache import RowCache


def row(tokens: int) -> RowCache:
    cache = KVCache()
    if tokens:
        cache.update_and_fetch(mx.ones((1, 2, tokens, 4)), mx.ones((1, 2, tokens, 4)))
    return RowCache([cache], tokens)


def rows(*lengths: int) -> PaddedKVCache:
    [merged] = merge([row(length) for length in lengths])
    assert type(merged) is PaddedKVCache
    return merged


def feed(cache: PaddedKVCache, tokens: int = 1) -> None:
    count = cache.left_padding.shape[0]
    cache.update_and_fetch(mx.ones((count, 2, tokens, 4)), mx.ones((count, 2, tokens, 4)))


def mask(cache: PaddedKVCache, tokens: int = 1, **options: Any) -> mx.array:
    made = cache.make_mask(tokens, **options)
    assert made is not None
    return made


def agrees(cache: PaddedKVCache) -> bool:
    expected = BatchKVCache.make_mask(cache, 1)
    made = cache.make_mask(1)
    if made is None:
        return bool(mx.all(expected).item())
    return made.shape == expected.shape and bool(mx.array_equal(made, expected).item())


@pytest.mark.parametrize("seed", range(8))
def test_masks_are_mlx_lm_s_whatever_rows_do(seed: int) -> None:
    dice = random.Random(seed)
    cache = rows(*(dice.randrange(1, 40) for _ in range(dice.randrange(1, 4))))
    for _ in range(120):
        match dice.randrange(8):
            case 0 if cache.left_padding.shape[0] > 1:
                count = cache.left_padding.shape[0]
                keep = sorted(dice.sample(range(count), dice.randrange(1, count)))
                cache.filter(mx.array(keep))
            case 1 if cache.left_padding.shape[0] < 6:
                cache.extend(rows(dice.randrange(1, 60)))
            case 2:
                cache.trim(1)
            case _:
                assert agrees(cache)
                feed(cache)
    assert agrees(cache)


def test_a_mask_is_made_once_for_many_steps_and_anew_in_time() -> None:
    cache = rows(3, 5)
    made = set()
    for _ in range(2 * BatchKVCache.step + 10):
        assert agrees(cache)
        made.add(id(cache._ahead))
        feed(cache)
    assert len(made) <= 3


def test_a_row_that_is_alone_needs_no_mask() -> None:
    cache = rows(4, 9)
    assert cache.make_mask(1) is not None
    cache.filter(mx.array([0]))
    assert cache.make_mask(1) is None
    assert cache.left_padding.tolist() == [0]
    assert mask(cache, return_array=True).tolist() == [[[[True] * 5]]]
    cache.extend(rows(2))
    assert agrees(cache)
    assert cache.make_mask(1) is not None


def test_padding_on_the_right_that_moved_to_the_left_counts() -> None:
    cache = rows(0, 0)
    cache.prepare(lengths=[2, 6], right_padding=[4, 0])
    feed(cache, 6)
    assert mask(cache).tolist() == [[[[True] * 7]]] * 2
    cache.finalize()
    assert agrees(cache)
    assert mask(cache)[0, 0, 0].tolist() == [False] * 4 + [True] * 3


def test_other_masks_are_mlx_lm_s_own() -> None:
    cache = rows(3, 5)
    for tokens, window in ((4, None), (1, 3), (4, 3)):
        expected = BatchKVCache.make_mask(cache, tokens, window_size=window)
        assert mx.array_equal(mask(cache, tokens, window_size=window), expected).item()
