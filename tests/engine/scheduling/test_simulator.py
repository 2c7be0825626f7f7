"""The simulator of `benchmarks.simulate`: what its clock says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.costs import CostDevice, Costs, Speed, fit
from benchmarks.simulate import Figures, Request, Simulated, Traffic, serve
from mlxsrv.engine.orders import Load
from tests.support.fake_device import FACTS

COSTS = Costs(step=0.01, slice=0.02, token=0.0001)
ORDER = Load(model="m", path="", max_rows=8, prefill_chunk=512, max_gap=0.2, prompt_cache_bytes=0)


def simulate(*requests: Request, **device: Any) -> Figures:
    return serve(Simulated(CostDevice(COSTS, FACTS, **device)), requests, ORDER)


def test_one_request_takes_what_its_passes_take() -> None:
    alone = simulate(Request(1.0, 101, 20))
    # The prompt is read but for its last token, and a step draws a token behind that.
    assert alone.first_p50 == pytest.approx(0.02 + 100 * 0.0001 + 0.01)
    assert alone.gap_p50 == pytest.approx(0.01)


def test_where_a_launch_takes_as_long_as_its_step_tokens_come_a_step_later() -> None:
    alone = simulate(Request(1.0, 101, 20), blocks=True)
    assert alone.first_p50 == pytest.approx(0.02 + 100 * 0.0001 + 2 * 0.01)
    assert alone.gap_p50 == pytest.approx(0.01)


def test_a_machine_is_slow_for_a_while() -> None:
    """Between the seconds 1 and 2 all takes twice as long."""
    began = [place / 10 + 0.05 for place in range(30)]
    taken = [2.0 if 10 <= place < 20 else 1.0 for place in range(30)]
    speed = Speed(began, taken, [1.0] * 30)
    assert [speed.at(0.5), speed.at(1.5), speed.at(2.5)] == [1.0, 2.0, 1.0]
    assert speed.mean == speed.at(99.0) == pytest.approx(4 / 3)
    before, then = (simulate(Request(at, 101, 20), speed=speed) for at in (0.1, 1.1))
    assert then.first_p50 == pytest.approx(2 * before.first_p50)
    assert then.gap_p50 == pytest.approx(2 * before.gap_p50)


def test_costs_are_found_again_in_what_rounds_took() -> None:
    features: list[list[float]] = [[1, 1, n, 10 * n, 0, 0, 0, 0] for n in range(1, 9)]
    features += [[1, 0, 0, 0, 1, tokens, tokens**2 / 2, 0] for tokens in (8, 64, 256)]
    costs = Costs(work=1e-4, step=1e-2, row=1e-3, slice=2e-2, token=1e-4, pair=1e-7)
    seconds = [float(costs.values @ each) for each in features]
    found = fit(features, seconds)
    assert [float(found.values @ each) for each in features] == pytest.approx(seconds)


def test_the_same_requests_have_the_same_figures() -> None:
    requests = Traffic(40, 5.0, 100, 30).draw(1)
    assert simulate(*requests) == simulate(*requests)
