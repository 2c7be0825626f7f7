"""Prompts that were read before: what is kept, what is found, and what is dropped."""

from __future__ import annotations

from itertools import takewhile

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache

from mlxsrv.engine.cache.prompt_cache import LEAST, Cache, PromptCache, common_prefix

IDS = st.lists(st.integers(0, 3), max_size=80)


@given(IDS, IDS, IDS)
def test_a_common_prefix_is_what_it_says(head: list[int], a: list[int], b: list[int]) -> None:
    one, two = head + a, head + b
    expected = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False))))
    assert common_prefix(np.array(one, np.uint32), np.array(two, np.uint32)) == expected


def attention(tokens: int) -> Cache:
    """One layer's cache that has seen `tokens` tokens."""
    layer = KVCache()
    layer.update_and_fetch(mx.zeros((1, 1, tokens, 4)), mx.zeros((1, 1, tokens, 4)))
    return [layer]


def recurrent() -> Cache:
    layer = ArraysCache(1)
    layer[0] = mx.zeros((1, 4))
    return [layer]


def prompt(n: int, start: int = 0) -> list[int]:
    return list(range(start, start + n))


def test_an_attention_cache_is_cut_back_to_what_is_shared() -> None:
    cached = PromptCache(1 << 20)
    cached.put(prompt(200), attention(200))
    asked = prompt(100) + prompt(50, 1000)
    assert cached.shared(asked) == 100
    taken = cached.take(asked)
    assert taken is not None
    cache, shared = taken
    assert (cache[0].offset, shared) == (100, 100)
    assert cached.take(prompt(300)) is not None  # the entry itself is as it was
    assert cached.shared(prompt(300)) == 200


def test_a_recurrent_cache_serves_only_prompts_that_begin_with_all_of_it() -> None:
    cached = PromptCache(1 << 20)
    cached.put(prompt(100), recurrent())
    assert cached.take(prompt(99)) is None
    assert cached.take(prompt(90) + prompt(50, 1000)) is None
    assert cached.shared(prompt(120)) == 100


def test_what_a_longer_entry_covers_is_dropped_only_if_it_can_be_cut() -> None:
    cached = PromptCache(1 << 20)
    cached.put(prompt(100), attention(100))
    cached.put(prompt(150), attention(150))
    assert len(cached) == 1
    cached.put(prompt(100, 5000), recurrent())
    cached.put(prompt(150, 5000), recurrent())
    assert len(cached) == 3


def test_short_beginnings_are_not_kept_nor_looked_for() -> None:
    cached = PromptCache(1 << 20)
    cached.put(prompt(LEAST - 1), attention(LEAST - 1))
    assert len(cached) == 0
    cached.put(prompt(LEAST), attention(LEAST))
    assert cached.take(prompt(LEAST - 1)) is None
    assert cached.shared(prompt(LEAST)) == LEAST


def test_the_least_recently_used_go_first() -> None:
    size = PromptCache(1 << 20)
    size.put(prompt(100), attention(100))
    cached = PromptCache(3 * size.nbytes)
    for i in range(3):
        cached.put(prompt(100, 1000 * i), attention(100))
    assert cached.take(prompt(100)) is not None  # the oldest is now the newest
    cached.put(prompt(100, 9000), attention(100))
    assert cached.nbytes <= cached.max_bytes
    assert cached.shared(prompt(100)) == 100
    assert cached.shared(prompt(100, 1000)) == 0


def test_no_bytes_keep_nothing() -> None:
    cached = PromptCache(0)
    assert not cached.wants(1000)
    cached.put(prompt(100), attention(100))
    assert len(cached) == 0
