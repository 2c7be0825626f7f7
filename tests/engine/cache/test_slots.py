"""Slots: whatever rows do, each layer shows each row its own tokens, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from mlxsrv.engine.cache import slots
from mlxsrv.engine.cache.attention_sinks import KEPT, SinkCache
from mlxsrv.engine.cache.quantized import PartlyQuantized, QuantizedCache
from mlxsrv.engine.cache.row_cache import Layers, RowCache
from mlxsrv.engine.cache.row_caches import RowCaches, can_share
from mlxsrv.engine.cache.slots import Slots
from tests.support.buffers import address_of

HEADS, SIZE = 2, 32
WINDOW, BOUND = 7, 11


def cuttable() -> Layers:
    return [KVCache(), QuantizedCache(4, 32, 8), CacheList(KVCache(), KVCache())]


def windowed() -> Layers:
    return [RotatingKVCache(WINDOW), SinkCache(BOUND), KVCache(), ArraysCache(1)]


def flat(layers: Layers) -> Layers:
    lists = [layer.caches if isinstance(layer, CacheList) else [layer] for layer in layers]
    return [each for layer in lists for each in layer]


def arrays(numbers: Sequence[Sequence[int]], dtype: mx.Dtype = mx.float32) -> mx.array:
    """`(rows, heads, tokens, size)`: all elements of a token are its number."""
    found = mx.array([list(row) for row in numbers], dtype=dtype)[:, None, :, None]
    return mx.broadcast_to(found, (len(numbers), HEADS, len(numbers[0]), SIZE))


def numbers(kept: Any, row: int = 0) -> list[int]:
    """The numbers of a row's tokens `(rows, heads, tokens, size)`, partly quantized or not."""
    if not isinstance(kept, PartlyQuantized):
        found = kept[row, -1, :, -1].tolist()
        return [round(number) for number in found]
    weights, scales, biases = kept.later
    later = mx.dequantize(weights, scales, biases, group_size=32, bits=8)
    first = [] if kept.first is None else numbers(kept.first, row)
    return [*first, *numbers(later, row)]


def seen(layer: Any, text: Sequence[int]) -> list[int]:
    """The tokens that a row with this text sees in this layer, its last one included."""
    if isinstance(layer, SinkCache):
        return [*text[:KEPT], *text[KEPT:][-(BOUND - KEPT) :]]
    return [*text[-WINDOW:]] if isinstance(layer, RotatingKVCache) else [*text]


class Texts:
    """Rows of RowCaches, and the numbers that are their texts."""

    def __init__(self, make: Any, dtype: mx.Dtype = mx.float32) -> None:
        self._make = make
        self._dtype = dtype
        self._empty = flat(make())
        self.caches = RowCaches(make())
        self.texts: list[list[int]] = []
        self.room = (0, 0)
        self._next = 1

    def count(self, tokens: int) -> list[int]:
        self._next += tokens
        return [*range(self._next - tokens, self._next)]

    def _feed(self, numbers: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
        """Keys and values of these tokens."""
        return arrays(numbers, self._dtype), arrays(numbers, self._dtype)

    def row(self, tokens: int, parts: int = 1) -> tuple[RowCache, list[int]]:
        """A row that was read alone, in so many parts."""
        text = self.count(tokens)
        layers = self._make()
        for part in range(parts):
            read = text[part * tokens // parts : (part + 1) * tokens // parts]
            for layer in flat(layers) if read else ():
                if isinstance(layer, ArraysCache):
                    layer[0] = mx.full((1, 3), read[-1])
                else:
                    layer.update_and_fetch(*self._feed([read]))
        return RowCache(layers, tokens), text

    def arrange(
        self, order: Sequence[int], joining: Sequence[int], more: tuple[int, int], parts: int = 1
    ) -> None:
        """Keep these rows in this order, behind them rows of these lengths; with room for more."""
        rows = [self.row(tokens, parts) for tokens in joining]
        texts = [*(self.texts[each] for each in order), *(text for _, text in rows)]
        self.room = len(texts) + more[0], max(map(len, texts)) + more[1]
        self.caches.arrange([*order, *(cache for cache, _ in rows)], *self.room)
        self.texts = texts
        assert all(cache.layers == [None] * len(cache.layers) for cache, _ in rows)

    def feed(self, tokens: int = 1, window: int | None = None) -> None:
        """One pass of so many tokens of each row, as a model does it."""
        if max(map(len, self.texts)) + tokens > self.room[1]:
            self.arrange(range(len(self.texts)), [], (0, tokens + 3))
        new = [self.count(tokens) for _ in self.texts]
        before = [len(text) for text in self.texts]
        for text, more in zip(self.texts, new, strict=True):
            text += more
        for layer, kind in zip(flat(self.caches.layers), self._empty, strict=True):
            if isinstance(layer, ArraysCache):
                layer[0] = mx.array(new) * mx.ones((1, 3))
                continue
            assert layer.offset.tolist() == before
            mask = layer.make_mask(tokens, window_size=window)
            found = layer.update_and_fetch(*self._feed(new))
            assert layer.offset.tolist() == [length + tokens for length in before]
            for each in found:
                self._check_visible(kind, mask, each, tokens, window)
        self.caches.advance(tokens)

    def _check_visible(
        self, kind: Any, mask: Any, found: Any, tokens: int, window: int | None
    ) -> None:
        for row, text in enumerate(self.texts):
            columns = numbers(found, row)
            for query in range(tokens):
                whole = text[: len(text) - tokens + query + 1]
                expected = seen(kind, whole)
                if window is not None:
                    sinks = KEPT if isinstance(kind, SinkCache) else 0
                    expected = [n for n in expected if n in whole[:sinks] + whole[-window:]]
                if mask is None:
                    visible = columns
                elif isinstance(mask, str):
                    visible = columns[: len(columns) - tokens + query + 1]
                else:
                    mask = mx.broadcast_to(mask, (len(self.texts), 1, tokens, len(columns)))
                    sees = mask[row, 0, query].tolist()
                    visible = [n for n, see in zip(columns, sees, strict=True) if see]
                assert sorted(visible) == expected

    def cut(self, surplus: Sequence[int]) -> None:
        self.caches.cut(surplus)
        self.texts = [
            text[: len(text) - less] for text, less in zip(self.texts, surplus, strict=True)
        ]

    def check(self) -> None:
        """A row that is taken out of a slot is a KV cache of mlx-lm's, and goes on as such."""
        assert self.caches.lengths == [len(text) for text in self.texts]
        for number, text in enumerate(self.texts):
            row = self.caches.view_row(number)
            row.materialize()
            assert row.tokens == len(text)
            for layer in flat(row.layers):
                if isinstance(layer, ArraysCache):
                    last = text[-1] if text else 0
                    assert layer[0] is None or layer[0].tolist() == [[last] * 3]
                    continue
                assert layer.offset == len(text)
                keys, values = layer.update_and_fetch(*self._feed([[0]]))
                for kept in (keys, values):
                    assert sorted(numbers(kept)) == sorted(seen(layer, [*text, 0]))


LENGTHS = st.integers(0, 16)
ROOM = st.tuples(st.integers(0, 2), st.integers(0, 9))


def drive(data: st.DataObject, texts: Texts, *, cuts: bool) -> None:
    texts.arrange([], data.draw(st.lists(LENGTHS, min_size=1, max_size=3)), data.draw(ROOM))
    for _ in range(data.draw(st.integers(1, 12))):
        rows = range(len(texts.texts))
        match data.draw(st.sampled_from(["feed", "feed", "round", "leave", "join"])):
            case "round" if cuts:
                tokens = data.draw(st.integers(1, 6))
                texts.feed(tokens, data.draw(st.sampled_from([None, None, 3])))
                texts.cut(data.draw(st.tuples(*[st.integers(0, tokens)] * len(rows))))
            case "leave":
                gone = data.draw(st.sets(st.sampled_from(rows), max_size=len(rows) - 1))
                texts.caches.drop_rows(gone)
                texts.texts = [texts.texts[row] for row in rows if row not in gone]
                order = data.draw(st.permutations(range(len(texts.texts))))
                same = data.draw(st.booleans())
                more = texts.room[0] - len(order), texts.room[1] - max(map(len, texts.texts))
                texts.arrange(order, [], more if same else data.draw(ROOM))
            case "join":
                joining = data.draw(st.lists(LENGTHS, min_size=1, max_size=2))
                order = data.draw(st.permutations(rows))
                texts.arrange(order, joining, data.draw(ROOM), data.draw(st.integers(1, 3)))
            case _:
                texts.feed(1, data.draw(st.sampled_from([None, 3])))
        texts.check()
    texts.feed()


@pytest.mark.parametrize("cuts", [True, False], ids=["tokens", "window"])
@given(st.data())
def test_each_row_sees_its_own_whatever_rows_do(cuts: bool, data: st.DataObject) -> None:
    drive(data, Texts(cuttable if cuts else windowed), cuts=cuts)


def test_a_window_goes_round_many_times() -> None:
    texts = Texts(windowed)
    texts.arrange([], [3, 0, 25], (1, 70))
    for step in range(60):
        texts.feed()
        if step % 9 == 0:
            texts.check()
    texts.arrange([2, 0], [9], (0, 9))
    texts.feed()
    texts.check()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_rows_join_and_leave_without_a_copy_of_the_others(dtype: mx.Dtype) -> None:
    texts = Texts(cuttable, dtype)
    texts.arrange([], [5, 9, 4], (1, 30))
    texts.feed()
    [layer] = [layer for layer in texts.caches.layers if type(layer) is Slots]
    kept = [address_of(part) for part in (layer.keys, layer.values)]
    texts.arrange([0, 1, 2], [6], (0, 29))
    texts.feed()
    texts.caches.drop_rows([1])
    del texts.texts[1]
    texts.arrange([0, 2, 1], [], (1, texts.room[1] - max(map(len, texts.texts))))
    texts.feed(3)
    texts.cut([0, 3, 1])
    texts.feed()
    assert [address_of(part) for part in (layer.keys, layer.values)] == kept
    texts.check()


def test_a_window_of_another_type_is_refilled_alike() -> None:
    texts = Texts(windowed, mx.bfloat16)
    texts.arrange([], [3, 9, 25], (0, 20))
    texts.feed()
    texts.caches.drop_rows([0])
    del texts.texts[0]
    texts.arrange([1, 0], [12], (0, 19))
    texts.check()
    texts.feed()
    texts.check()


def test_a_row_that_takes_the_place_of_the_only_one_leaves_a_kept_prompt_as_it_is() -> None:
    """The only row has the kept prompt's arrays until it is written."""
    texts = Texts(lambda: [KVCache()])
    kept, text = texts.row(5)
    other, _ = texts.row(9)
    texts.caches.arrange([kept.copy()], 1, 256)
    assert texts.caches.layers[0].keys is not None
    texts.caches.drop_rows([0])
    texts.caches.arrange([other], 1, 256)
    assert numbers(kept.layers[0].keys_and_values()[0]) == text


def test_numbers_that_are_none_stay_with_their_row() -> None:
    """A masked column counts nothing, unless it holds NaN: zero times NaN is NaN."""
    caches = RowCaches([KVCache()])
    nan = RowCache([KVCache()], 9)
    nan.layers[0].update_and_fetch(mx.full((1, 1, 9, 4), mx.nan), mx.full((1, 1, 9, 4), mx.nan))
    fine = RowCache([KVCache()], 9)
    fine.layers[0].update_and_fetch(mx.ones((1, 1, 9, 4)), mx.ones((1, 1, 9, 4)))
    other = fine.copy()
    other.cut(3)
    caches.arrange([fine, nan], 2, 20)
    [layer] = caches.layers
    layer.update_and_fetch(mx.full((2, 1, 1, 4), mx.nan), mx.full((2, 1, 1, 4), mx.nan))
    caches.advance(1)
    caches.cut([1, 0])
    caches.drop_rows([1])
    caches.arrange([0, other], 2, 20)
    keys, values = layer.update_and_fetch(mx.ones((2, 1, 1, 4)), mx.ones((2, 1, 1, 4)))
    assert not mx.isnan(keys).any().item()
    assert not mx.isnan(values).any().item()


def test_a_pass_that_has_no_room_is_refused() -> None:
    texts = Texts(cuttable)
    texts.arrange([], [5, 9], (0, 1))
    texts.feed()
    texts.room = (2, 99)
    with pytest.raises(RuntimeError, match="11 tokens of a row in 10 columns"):
        texts.feed()


def test_where_tokens_are_written_is_computed_once_for_all_layers(tmp_path: Path) -> None:
    """A GPU takes long for many small operations."""
    one, four = (count_choices(layers, tmp_path / "graph") for layers in (1, 4))
    assert one == four > 0


def count_choices(layers: int, graph: Path) -> int:
    """The number of choices between numbers in a pass of rows on both sides of the start."""
    texts = Texts(lambda: [QuantizedCache(4, 32, 8) for _ in range(layers)])
    texts.arrange([], [3, 9], (0, 5))
    for layer in texts.caches.layers:
        layer.update_and_fetch(arrays([[1], [2]]), arrays([[1], [2]]))
    written = [array for side in texts.caches.layers for array in slots._flatten(side.keys)]
    mx.export_to_dot(str(graph), *written)
    return graph.read_text().count('"Select"')


def count_bytes(caches: RowCaches) -> int:
    """The bytes of the arrays of all layers."""
    leaves = cast(list[tuple[str, Any]], tree_flatten([layer.state for layer in caches.layers]))
    return sum(leaf.nbytes for _, leaf in leaves if isinstance(leaf, mx.array))


def test_the_only_row_needs_no_copy() -> None:
    row = RowCache([KVCache()], 5)
    row.layers[0].update_and_fetch(arrays([range(5)]), arrays([range(5)]))
    keys = row.layers[0].keys
    caches = RowCaches([KVCache()])
    caches.arrange([row], 1, 256)
    assert caches.layers[0].keys is keys
    assert count_bytes(caches) == 2 * HEADS * 256 * SIZE * 4


def test_a_taken_row_does_not_change_with_its_slot() -> None:
    texts = Texts(cuttable)
    texts.arrange([], [6, 4], (0, 20))
    row = texts.caches.view_row(0)
    row.cut(4)
    row.materialize()
    text = texts.texts[0][:4]
    texts.cut([3, 0])
    texts.feed()
    assert numbers(row.layers[0].keys_and_values()[0]) == text
    assert row.nbytes < count_bytes(texts.caches) / 8


def test_which_kinds_of_layers_share() -> None:
    assert can_share(cuttable())
    assert can_share(windowed())
    assert not can_share([KVCache(), CacheList(KVCache(), object())])
