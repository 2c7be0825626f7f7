"""A shared layer: each group's rows are written into its own slots, and attend to these alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import base, qwen3
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxsrv.engine.cache.quantized import QuantizedCache
from mlxsrv.engine.cache.row_cache import RowCache
from mlxsrv.engine.cache.row_caches import RowCaches
from mlxsrv.engine.cache.shared_layers import share_layers
from mlxsrv.engine.patches.attention import patch_attention

HEADS, SIZE = 2, 32
GROUPS = ((70,), (5, 9), (20,))
"""The lengths of the rows of each group."""
KINDS = {
    "full": KVCache,
    "quantized": lambda: QuantizedCache(4, 32, 8),
    "window": lambda: RotatingKVCache(12),
}


def random(rows: int, tokens: int, heads: int = HEADS) -> mx.array:
    return mx.random.normal((rows, heads, tokens, SIZE))


def make_row(empty: Any, tokens: int) -> RowCache:
    empty.update_and_fetch(random(1, tokens), random(1, tokens))
    return RowCache([empty], tokens)


def make_groups(make: Any, lengths: Sequence[Sequence[int]] = GROUPS) -> list[RowCaches]:
    groups: list[RowCaches] = []
    for each in lengths:
        groups.append(RowCaches([make()]))
        groups[-1].arrange([make_row(make(), length) for length in each], len(each), 128)
    return groups


def attend(layer: Any, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
    """Attention as a model calls it."""
    mask = create_attention_mask(queries[:, 0], layer)
    keys, values = layer.update_and_fetch(keys, values)
    attention: Any = vars(qwen3)["scaled_dot_product_attention"]
    found: mx.array = attention(queries, keys, values, cache=layer, scale=0.2, mask=mask)
    return found


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [("full", 1), ("full", 3), ("quantized", 1), ("quantized", 3), ("window", 1)],
)
def test_rows_attend_as_their_group_alone(kind: str, tokens: int) -> None:
    assert patch_attention()
    mx.random.seed(1)
    alone = make_groups(KINDS[kind])
    mx.random.seed(1)
    together = make_groups(KINDS[kind])
    for _ in range(3):
        queries, keys, values = (random(4, tokens, heads) for heads in (2 * HEADS, HEADS, HEADS))
        [layer] = share_layers(together)
        assert layer.offset.tolist() == [n for group in alone for n in group.lengths]
        found = attend(layer, queries, keys, values)
        assert layer.offset.tolist() == [n + tokens for group in alone for n in group.lengths]
        begin = 0
        for group in alone:
            rows = slice(begin, begin + len(group.lengths))
            own = attend(group.layers[0], queries[rows], keys[rows], values[rows])
            assert mx.array_equal(found[rows], own)
            begin = rows.stop
        for group in (*alone, *together):
            group.advance(tokens)


def test_states_are_those_of_all_rows_and_go_back_to_their_groups() -> None:
    groups = [RowCaches([CacheList(ArraysCache(2), KVCache())]) for _ in range(2)]
    for group, rows in zip(groups, (1, 2), strict=True):
        group.arrange([RowCache([CacheList(ArraysCache(2), KVCache())]) for _ in range(rows)], 2, 9)
    states = share_layers(groups)[0][0]
    assert states[0] is None
    assert states.make_mask(1) is None
    groups[1].layers[0][0][0] = mx.ones((2, 5))
    assert share_layers(groups)[0][0][0].tolist() == [[0] * 5, [1] * 5, [1] * 5]
    states[1] = mx.arange(3)[:, None]
    assert [group.layers[0][0][1].tolist() for group in groups] == [[[0]], [[1], [2]]]


def test_who_takes_keys_for_an_array_is_told() -> None:
    groups = make_groups(KVCache)
    [layer] = share_layers(groups)
    keys, values = layer.update_and_fetch(random(4, 1), random(4, 1))
    with pytest.raises(TypeError):
        mx.fast.scaled_dot_product_attention(random(4, 1), keys, values, scale=1.0)
    with pytest.raises(TypeError):
        keys @ values
    with pytest.raises(AttributeError):
        layer.make_mask(1).dtype  # noqa: B018


def test_the_patch_leaves_mlx_lms_own_function_as_it_is() -> None:
    own = base.scaled_dot_product_attention
    assert patch_attention()
    assert base.scaled_dot_product_attention is own
    assert vars(qwen3)["scaled_dot_product_attention"] is not own
