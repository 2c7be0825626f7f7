"""Each client has its share of the places at a model."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.errors import Overloaded
from mlxsrv.models.pool.clients import Client, Places, Turnover, fair_share


@pytest.mark.parametrize(
    ("rows", "queue", "others", "expected"),
    [
        # A client that is alone: all rows, and three quarters of the queue.
        (4, 4, 0, 7),
        (32, 128, 0, 128),
        (1, 3, 0, 3),
        (1, 2, 0, 2),
        # A queue of one place is for whoever comes first; one without a place is for nobody.
        (1, 1, 0, 2),
        (4, 0, 0, 4),
        # Others have rows, all rows, and some of the queue.
        (4, 4, 2, 5),
        (4, 4, 4, 3),
        (4, 4, 7, 1),
        (4, 4, 8, 0),
        (32, 128, 128, 24),
    ],
)
def test_share(rows: int, queue: int, others: int, expected: int) -> None:
    assert fair_share(rows, queue, others) == expected


@given(st.integers(1, 40), st.integers(0, 200), st.integers(0, 300))
def test_a_share_fits_and_leaves_a_place_to_others(rows: int, queue: int, others: int) -> None:
    others = min(others, rows + queue)
    left = rows + queue - others
    mine = fair_share(rows, queue, others)
    assert (mine > 0) == (left > 0), "who has no place finds one, if there is one"
    assert mine <= left
    if min(queue, left) >= 2:
        assert mine < left, "nobody can take the last one too"
    assert mine >= fair_share(rows, queue, others + 1)


P = ParamSpec("P")


def on_a_loop(test: Callable[P, None]) -> Callable[P, None]:
    """Run a test on an event loop: its limiter belongs to one."""

    @wraps(test)
    def run(*arguments: P.args, **more: P.kwargs) -> None:
        async def body() -> None:
            test(*arguments, **more)

        asyncio.run(body())

    return run


def filled(places: Places, name: str) -> int:
    """Take places until there are none for this client; how many it has got."""
    taken = 0
    while True:
        try:
            places.take(Client(name), "m")
        except Overloaded:
            return taken
        taken += 1


@on_a_loop
def test_clients_who_come_later_find_places() -> None:
    places = Places(32, 128)
    assert [filled(places, name) for name in "abcd"] == [128, 24, 6, 1]
    assert places.taken == 159


@on_a_loop
def test_the_message_says_whose_places_are_taken() -> None:
    places = Places(1, 2)
    assert filled(places, "a") == 2
    with pytest.raises(Overloaded, match="m has 2 requests of this client already"):
        places.take(Client("a"), "m")
    places.take(Client("b"), "m")
    for name in "abc":
        with pytest.raises(Overloaded, match="m has 3 requests already"):
            places.take(Client(name), "m")


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=80))
@on_a_loop
def test_places_are_counted(moves: list[tuple[str, bool]]) -> None:
    places, held = Places(2, 6), Counter[str]()
    for name, takes in moves:
        if takes:
            fits = held[name] < fair_share(2, 6, held.total() - held[name])
            try:
                places.take(Client(name), "m")
            except Overloaded:
                assert not fits
            else:
                assert fits
                held[name] += 1
        elif held[name]:
            places.give_back(Client(name))
            held[name] -= 1
        assert places.taken == held.total()
    for name in held.elements():
        places.give_back(Client(name))
    assert places.taken == 0
    assert filled(places, "z") == fair_share(2, 6, 0)


# When to try again.


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def refused_for(places: Places, name: str) -> int | None:
    with pytest.raises(Overloaded) as refused:
        places.take(Client(name), "m")
    return refused.value.retry_after


@on_a_loop
def test_who_is_refused_is_told_what_the_pace_says() -> None:
    clock = Clock()
    places = Places(2, 6, clock=clock)
    assert filled(places, "a") == 6
    for name in "bc":
        places.take(Client(name), "m")
    assert refused_for(places, "d") == 1, "nothing is known yet"
    clock.now += 7
    assert refused_for(places, "d") == 7, "nobody has left for so long"
    for name in "vwxyz":
        clock.now += 3
        places.give_back(Client("a"))
        places.take(Client(name), "m")
    assert refused_for(places, "d") == 5, "five left in 22 seconds"
    places.give_back(Client("z"))
    assert refused_for(places, "b") == 26, "six did, and one of seven is its own"
    assert places.turn == 22, "five others go before it"
    clock.now += 10_000
    assert refused_for(places, "b") == 60, "no client takes longer advice"


def test_the_pace_is_that_of_late() -> None:
    clock = Clock()
    turnover = Turnover(clock)
    turnover.borrow(1000)
    for seconds in (100.0, 0.5):
        for _ in range(16):
            clock.now += seconds
            turnover.give_back(10)
    assert turnover.seconds(10) == 1
    assert turnover.seconds(200) == 10
    turnover.give_back(1000 - 320)
    clock.now += 10_000
    turnover.borrow(1)
    assert turnover.seconds(1) == 1, "while nothing is taken, nothing can come back"
