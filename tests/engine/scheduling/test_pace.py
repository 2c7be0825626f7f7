"""The length of a slice of prompts follows the streams."""

from __future__ import annotations

import pytest

from mlxsrv.engine.scheduling.pace import Pace


def test_a_slice_is_as_long_as_streams_can_bear() -> None:
    pace = Pace(512, max_gap=0.1)
    assert pace.limit(decoding=False, long=True) == 512
    assert pace.limit(decoding=True, long=True) == 512  # nothing is known yet
    pace.saw_step(0.010)
    pace.saw_slice(100, 0.020 + 100 * 0.0002, decoding=True)
    pace.saw_step(0.020 + 100 * 0.0002)
    # turns of 10 ms at 0.2 ms a token
    assert pace.limit(decoding=True, long=True) == 50
    # a gap of 100 ms leaves 80 ms
    assert pace.limit(decoding=True, long=False) == 400
    assert pace.limit(decoding=False, long=True) == 512


def test_the_first_stream_beside_prompts_that_were_begun_waits_no_longer_than_a_gap() -> None:
    """Its steps are not known while each gap has a slice in it; what tokens take is."""
    pace = Pace(512, max_gap=0.1)
    pace.saw_slice(512, 512 * 0.001, decoding=False)
    assert pace.limit(decoding=False, long=True) == 512
    assert pace.limit(decoding=True, long=True) == pace.limit(decoding=True, long=False) == 100


def test_where_a_step_fills_the_gap_reading_takes_turns_with_it() -> None:
    pace = Pace(512, max_gap=0.005)
    pace.saw_step(0.010)
    pace.saw_slice(100, 0.020 + 100 * 0.0002, decoding=True)
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
    pace.saw_slice(100, 0.020 + 100 * 0.0002, decoding=True)
    pace.saw_step(0.020 + 100 * 0.0002)
    assert pace.limit(decoding=True, long=True) == pytest.approx(tokens, abs=1)


@pytest.mark.parametrize(("prompts", "tokens"), [(1, 50), (3, 150), (8, 400), (9, 400)])
def test_each_prompt_that_is_to_be_read_has_a_steps_time(prompts: int, tokens: int) -> None:
    pace = Pace(512, max_gap=0.1)
    pace.saw_step(0.010)
    pace.saw_slice(100, 0.020 + 100 * 0.0002, decoding=True)
    pace.saw_step(0.020 + 100 * 0.0002)
    assert pace.limit(decoding=True, long=True, prompts=prompts) == tokens


def test_a_slice_never_reads_next_to_nothing() -> None:
    pace = Pace(512, max_gap=0.001)
    pace.saw_step(0.010)
    pace.saw_slice(100, 0.5, decoding=True)
    pace.saw_step(0.5)
    assert pace.limit(decoding=True, long=True) == 8


def test_what_a_gap_was_corrects_the_next() -> None:
    """A machine on which tokens take twice what a first look said still keeps the gap."""
    step, token, target = 0.010, 0.0004, 0.030
    pace = Pace(512, max_gap=1.0)
    pace.saw_step(step)
    pace.saw_slice(100, 100 * token / 2, decoding=False)
    gap = 0.0
    for _ in range(40):
        tokens = pace.limit(decoding=True, long=True)
        pace.saw_slice(tokens, 0.0, decoding=True)
        gap = 1.5 * step + tokens * token
        pace.saw_step(gap)
    assert gap == pytest.approx(target, rel=0.05)


def test_a_gap_in_which_rows_changed_is_not_learnt_from() -> None:
    pace = Pace(512, max_gap=0.1)
    pace.saw_step(0.010)
    pace.saw_slice(100, 0.0, decoding=True)
    pace.saw_step(0.030)
    before = pace.limit(decoding=True, long=True)
    pace.saw_slice(100, 0.0, decoding=True)
    pace.saw_step(None)
    pace.saw_step(0.010)
    assert pace.limit(decoding=True, long=True) == before


def test_beside_streams_of_other_models_a_slice_fills_their_gap_and_no_more() -> None:
    pace = Pace(512, 0.1)
    assert pace.limit(decoding=False, long=True) == 512
    assert pace.limit(decoding=False, long=True, beside=True) == 8, "nothing is known yet"
    for _ in range(40):
        pace.saw_slice(100, 0.2, decoding=False)  # 2 ms a token
    assert 40 <= pace.limit(decoding=False, long=True, beside=True) <= 60
    assert pace.limit(decoding=False, long=True) == 512
