"""Rows of a batch are cut by different numbers of tokens, and each keeps its own text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import BatchKVCache, KVCache, make_prompt_cache
from mlx_lm.utils import load_model

from mlxsrv.engine.cache.kv_caches import PaddedKVCache, merge
from mlxsrv.engine.cache.row_cache import RowCache
from tests.support.fixtures import ModelFolder
from tests.support.greedy import assert_greedy
from tests.support.tiny import VOCABULARY

HEADS, KEY_SIZE, VALUE_SIZE = 2, 4, 3


class Texts:
    """Rows of a KV cache whose keys and values are numbers, and these numbers row by row."""

    def __init__(self, *lengths: int) -> None:
        self._numbers = 0
        self.texts = [self._count(length) for length in lengths]
        [merged] = merge([RowCache([single(text)], len(text)) for text in self.texts])
        assert type(merged) is PaddedKVCache
        self.cache = merged

    def _count(self, tokens: int) -> list[int]:
        self._numbers += tokens
        return list(range(self._numbers - tokens + 1, self._numbers + 1))

    def feed(self, tokens: int, window: int | None = None) -> None:
        """One pass of so many tokens for each row; each query sees the row's text before it."""
        new = [self._count(tokens) for _ in self.texts]
        for text, more in zip(self.texts, new, strict=True):
            text += more
        mask = self.cache.make_mask(tokens, window_size=window)
        offset = self.cache.offset
        keys, values = self.cache.update_and_fetch(*arrays(new))
        assert offset.tolist() == [len(text) - tokens for text in self.texts]
        columns = keys.shape[2]
        assert values.shape[2] == columns
        if mask is None:
            mask = mx.ones((1, 1, 1, columns), mx.bool_)
        seen: Any = mx.broadcast_to(mask, (len(self.texts), 1, tokens, columns))[:, 0].tolist()
        for row, text in enumerate(self.texts):
            for query in range(tokens):
                for found in (keys, values):
                    numbers: Any = found[row, 0, :, 0].tolist()
                    visible = [n for n, sees in zip(numbers, seen[row][query], strict=True) if sees]
                    begin = max(0, len(text) - tokens + query + 1 - (window or len(text)))
                    assert visible == text[begin : len(text) - tokens + query + 1]

    def cut(self, surplus: Sequence[int]) -> None:
        self.cache.cut(surplus)
        self.texts = [
            text[: len(text) - tokens] for text, tokens in zip(self.texts, surplus, strict=True)
        ]

    def keep(self, indices: Sequence[int]) -> None:
        self.cache.filter(mx.array(list(indices)))
        self.texts = [self.texts[i] for i in indices]

    def join(self, other: Texts) -> None:
        self.cache.extend(other.cache)
        self.texts += other.texts
        self._numbers = max(self._numbers, other._numbers)

    def check_rows(self) -> None:
        for row, text in enumerate(self.texts):
            alone = self.cache.extract(row)
            assert alone.offset == len(text)
            for array in (alone.keys, alone.values):
                assert array[0, -1, :, -1].tolist() == text


def arrays(texts: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
    """Keys and values, `(rows, heads, tokens, size)`, all elements of a token with its number."""
    numbers = mx.array([list(text) for text in texts], dtype=mx.float32)[:, None, :, None]
    shape = (len(texts), HEADS, len(texts[0]))
    return (
        mx.broadcast_to(numbers, (*shape, KEY_SIZE)),
        mx.broadcast_to(numbers, (*shape, VALUE_SIZE)),
    )


def single(text: Sequence[int]) -> KVCache:
    cache = KVCache()
    if text:
        cache.update_and_fetch(*arrays([text]))
    return cache


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_each_row_keeps_its_own_text_whatever_rows_do(data: st.DataObject) -> None:
    lengths = st.lists(st.integers(1, 12), min_size=1, max_size=3)
    texts = Texts(*data.draw(lengths))
    for _ in range(data.draw(st.integers(1, 14))):
        match data.draw(st.sampled_from(["feed", "round", "round", "round", "keep", "join"])):
            case "feed":
                texts.feed(1)
            case "round":
                tokens = data.draw(st.integers(1, 9))
                texts.feed(tokens, data.draw(st.sampled_from([None, None, 3])))
                texts.cut(data.draw(st.tuples(*[st.integers(0, tokens)] * len(texts.texts))))
            case "keep":
                rows = range(len(texts.texts))
                texts.keep(sorted(data.draw(st.sets(st.sampled_from(rows), min_size=1))))
            case "join":
                other = Texts(*data.draw(lengths))
                tokens = data.draw(st.integers(1, 5))
                other.feed(tokens)
                other.cut(data.draw(st.tuples(*[st.integers(0, tokens)] * len(other.texts))))
                texts.join(other)
        texts.check_rows()
    texts.feed(1)


def test_ragged_rows_outgrow_their_columns() -> None:
    texts = Texts(3, 5)
    for _ in range(2 * BatchKVCache.step // 6):
        texts.feed(8)
        texts.cut([0, 4])
    texts.check_rows()
    texts.feed(1)


def test_a_cut_copies_nothing() -> None:
    texts = Texts(30, 50)
    texts.feed(4)
    keys = texts.cache.keys
    texts.cut([0, 3])
    assert texts.cache.keys is keys


def test_rows_that_end_together_again_are_decoded_as_before() -> None:
    texts = Texts(3, 5)
    texts.feed(4)
    texts.cut([0, 3])
    assert texts.cache._short == [0, 3]
    texts.feed(4)
    texts.cut([3, 0])
    assert texts.cache._short == []
    texts.feed(1)


@pytest.mark.parametrize("change", ["leave", "join"])
def test_rows_are_aligned_where_they_are_copied_anyway(change: str) -> None:
    texts = Texts(3, 5, 4)
    texts.feed(4)
    texts.cut([0, 3, 1])
    if change == "leave":
        texts.keep([1, 2])
    else:
        texts.join(Texts(7))
    assert texts.cache._short == []
    texts.check_rows()
    texts.feed(1)


def test_a_row_that_is_alone_needs_no_mask_after_a_cut() -> None:
    texts = Texts(6)
    texts.feed(4)
    texts.cut([3])
    assert texts.cache.make_mask(1) is None
    texts.feed(1)


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_rows_say_in_rounds_what_they_say_alone(model_folder: ModelFolder, family: str) -> None:
    model, _ = load_model(model_folder(family))
    dice = random.Random(0)
    prompts = [dice.choices(range(VOCABULARY), k=tokens) for tokens in (40, 3, 17)]
    caches = [make_prompt_cache(model) for _ in prompts]
    for prompt, cache in zip(prompts, caches, strict=True):
        model(mx.array(prompt[:-1])[None], cache=cache)
    layers = merge([RowCache(each) for each in caches])
    texts = [list(prompt) for prompt in prompts]
    alone = [write_greedily(model, prompt, 40) for prompt in prompts]
    while min(map(len, texts)) < 40:
        tokens = dice.randint(1, 6)
        fed = []
        for text, whole in zip(texts, alone, strict=True):
            proposed = whole[len(text) : len(text) + tokens - 1]
            proposed += [0] * (tokens - 1 - len(proposed))
            if proposed and dice.random() < 0.7:
                proposed[dice.randrange(len(proposed))] ^= 1
            fed.append([text[-1], *proposed])
        drawn = model(mx.array(fed), cache=layers).argmax(-1).tolist()
        surplus = []
        for text, row, found in zip(texts, fed, drawn, strict=True):
            held = 1
            while held < tokens and row[held] == found[held - 1]:
                held += 1
            text += found[:held]
            surplus.append(tokens - held)
        for layer in layers:
            layer.cut(surplus)
    for prompt, text, whole in zip(prompts, texts, alone, strict=True):
        assert text[: len(whole)] == whole[: len(text)]
        assert_greedy(model, prompt, text[len(prompt) :], len(text) - len(prompt))


def write_greedily(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """The prompt, and the `count` tokens that mlx-lm draws behind it."""
    steps = generate_step(mx.array(list(prompt)), model, max_tokens=count)
    return [*prompt, *(int(token) for token, _ in steps)]
