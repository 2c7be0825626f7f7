"""How much is read in a slice, and what is remembered of it."""

from __future__ import annotations

from itertools import takewhile

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, KVCache

from mlxsrv.engine.cache.prompt_cache import LEAST, Cache, PromptCache, common_prefix
from mlxsrv.engine.execution.prefill import Pace

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


def test_a_slice_is_as_long_as_streams_can_bear() -> None:
    pace = Pace(512, max_gap=0.1)
    assert pace.limit(decoding=False, long=True) == 512
    assert pace.limit(decoding=True, long=True) == 512  # nothing is known yet
    pace.saw_step(0.010)
    pace.saw_chunk(100, 0.020 + 100 * 0.0002, decoding=True)
    pace.saw_step(0.020 + 100 * 0.0002)
    # turns of 10 ms at 0.2 ms a token
    assert pace.limit(decoding=True, long=True) == 50
    # a gap of 100 ms leaves 80 ms
    assert pace.limit(decoding=True, long=False) == 400
    assert pace.limit(decoding=False, long=True) == 512


def test_the_first_stream_beside_prompts_that_were_begun_waits_no_longer_than_a_gap() -> None:
    """Its steps are not known while each gap has a slice in it; what tokens take is."""
    pace = Pace(512, max_gap=0.1)
    pace.saw_chunk(512, 512 * 0.001, decoding=False)
    assert pace.limit(decoding=False, long=True) == 512
    assert pace.limit(decoding=True, long=True) == pace.limit(decoding=True, long=False) == 100


def test_where_a_step_fills_the_gap_reading_takes_turns_with_it() -> None:
    pace = Pace(512, max_gap=0.005)
    pace.saw_step(0.010)
    pace.saw_chunk(100, 0.020 + 100 * 0.0002, decoding=True)
    pace.saw_step(0.020 + 100 * 0.0002)
    assert pace.limit(decoding=True, long=True) == pace.limit(decoding=True, long=False) == 50


@pytest.mark.parametrize(
    ("max_gap", "tokens"), [(0.040, 50), (0.028, 40), (0.021, 25), (0.019, 50)]
)
def test_a_long_prompt_keeps_the_gap_as_far_as_that_is_to_be_had(
    max_gap: float, tokens: int
) -> None:
    pace = Pace(512, max_gap)
    pace.saw_step(0.010)
    pace.saw_chunk(100, 0.020 + 100 * 0.0002, decoding=True)
    pace.saw_step(0.020 + 100 * 0.0002)
    assert pace.limit(decoding=True, long=True) == pytest.approx(tokens, abs=1)


def test_a_slice_never_reads_next_to_nothing() -> None:
    pace = Pace(512, max_gap=0.001)
    pace.saw_step(0.010)
    pace.saw_chunk(100, 0.5, decoding=True)
    pace.saw_step(0.5)
    assert pace.limit(decoding=True, long=True) == 8


def test_what_a_gap_was_corrects_the_next() -> None:
    """A machine on which tokens take twice what a first look said still keeps the gap."""
    step, token, target = 0.010, 0.0004, 0.030
    pace = Pace(512, max_gap=1.0)
    pace.saw_step(step)
    pace.saw_chunk(100, 100 * token / 2, decoding=False)
    gap = 0.0
    for _ in range(40):
        tokens = pace.limit(decoding=True, long=True)
        pace.saw_chunk(tokens, 0.0, decoding=True)
        gap = 1.5 * step + tokens * token
        pace.saw_step(gap)
    assert gap == pytest.approx(target, rel=0.05)


def test_a_gap_in_which_rows_changed_is_not_learnt_from() -> None:
    pace = Pace(512, max_gap=0.1)
    pace.saw_step(0.010)
    pace.saw_chunk(100, 0.0, decoding=True)
    pace.saw_step(0.030)
    before = pace.limit(decoding=True, long=True)
    pace.saw_chunk(100, 0.0, decoding=True)
    pace.saw_step(None)
    pace.saw_step(0.010)
    assert pace.limit(decoding=True, long=True) == before


def test_beside_streams_of_other_models_a_slice_fills_their_gap_and_no_more() -> None:
    pace = Pace(512, 0.1)
    assert pace.limit(decoding=False, long=True) == 512
    assert pace.limit(decoding=False, long=True, beside=True) == 8, "nothing is known yet"
    for _ in range(40):
        pace.saw_chunk(100, 0.2, decoding=False)  # 2 ms a token
    assert 40 <= pace.limit(decoding=False, long=True, beside=True) <= 60
    assert pace.limit(decoding=False, long=True) == 512
