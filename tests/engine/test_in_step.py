"""Loads on several ranks: phases begin together, and a failure on one is told to all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mlxsrv.engine.ranks.in_step import Meet, in_step
from mlxsrv.engine.ranks.rank_group import RankGroup

Slices = Generator[Meet | None, None, str]


class Room:
    """The place where threads, each in the role of a rank, exchange bytes."""

    def __init__(self, size: int) -> None:
        self.table: list[bytes] = [b""] * size
        self.barrier = threading.Barrier(size, timeout=20)


class ThreadRank(RankGroup):
    """One rank of several in this process."""

    def __init__(self, rank: int, room: Room) -> None:
        self.rank = rank
        self._room = room

    def exchange(self, data: bytes) -> list[bytes]:
        self._room.table[self.rank] = data
        self._room.barrier.wait()
        reported = list(self._room.table)
        self._room.barrier.wait()  # nobody writes before all have read
        return reported


def run(*loads: Callable[[], Slices]) -> list[str | Exception]:
    """Each rank's result, or its error."""
    room = Room(len(loads))

    def do(rank: int) -> str | Exception:
        slices = in_step(loads[rank](), ThreadRank(rank, room))
        try:
            while True:
                next(slices)
        except StopIteration as done:
            return str(done.value)
        except ValueError as error:
            return error

    with ThreadPoolExecutor(len(loads)) as pool:
        return list(pool.map(do, range(len(loads))))


@pytest.mark.parametrize("counts", [(1, 5), (5, 1), (3, 3)])
def test_no_rank_goes_on_before_all_have_come(counts: tuple[int, int]) -> None:
    events: list[str] = []

    def load(count: int) -> Slices:
        for _ in range(count):
            events.append("read")
            yield None
        yield Meet.HERE
        events.append("run")
        return f"read {count}"

    results = run(*(partial(load, count) for count in counts))
    assert results == [f"read {count}" for count in counts]
    assert events == ["read"] * sum(counts) + ["run"] * 2


@pytest.mark.parametrize("texts", [("a", "a"), ("a", "b"), ("", "long")])
def test_ranks_that_differ_are_all_refused(texts: tuple[str, str]) -> None:
    room = Room(2)

    def compare(rank: int) -> str:
        try:
            ThreadRank(rank, room).require_alike("vectors", texts[rank])
        except ValueError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(2) as pool:
        reported = list(pool.map(compare, range(2)))
    assert reported == ["" if len({*texts}) == 1 else "its ranks would have different vectors"] * 2


def test_a_failure_on_one_rank_is_told_to_all() -> None:
    def fail() -> Slices:
        yield None
        raise ValueError("there is no file")

    def read() -> Slices:
        for _ in range(5):
            yield None
        yield Meet.HERE
        raise AssertionError("the others never come")

    first, second, third = run(read, fail, read)
    assert str(first) == str(third) == "rank 1 failed: there is no file"
    assert str(second) == "there is no file"
