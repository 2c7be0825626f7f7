"""The line of a model: one place to wait, for a slot and for memory."""

from __future__ import annotations

from typing import Any

from mlxsrv.engine.events import Embedded, Report, Started
from mlxsrv.engine.orders import Budget, Job, MakeReport, Turn
from mlxsrv.engine.plans import Rewind
from mlxsrv.engine.scheduling.groups import STEP
from tests.support.fake_device import FACTS
from tests.support.scheduling import Bench, job, make, read_order

ONE_ROW = (100 + STEP - 1) * FACTS.kv_bytes(1)
"""Bytes for one row of 150 tokens."""


def crowd(number: int, client: str = "crowd", **more: Any) -> list[Job]:
    return [job(i, 100, 50, turn=Turn(client, arrival=i), **more) for i in range(1, number + 1)]


def numbers(bench: Bench) -> dict[str, int]:
    asked = bench.ask(MakeReport())
    bench.round()
    report = bench.answers[1, asked]
    assert isinstance(report, Report)
    return report.models["m"]


def test_clients_take_turns_for_memory() -> None:
    """A request waits for one of a client that has twenty, also where slots are free."""
    bench = make()
    bench.send(Budget(ONE_ROW))
    bench.submit(*crowd(20))
    bench.rounds(3)
    bench.submit(job(21, 100, 50, turn=Turn("other")))
    bench.finish()
    order = read_order(bench)
    assert order.index(21) <= 2
    assert [number for number in order if number != 21] == [*range(1, 21)]
    assert not bench.items(Rewind)


def test_a_job_starts_when_it_has_a_slot_and_memory() -> None:
    bench = make()
    bench.send(Budget(ONE_ROW))
    bench.submit(*crowd(10))
    bench.rounds(10)
    assert isinstance(bench.job(1).events[0], Started)
    assert not any(bench.job(number).events for number in range(2, 11))
    told = numbers(bench)
    assert (told["rows"], told["queued"], told["waiting"]) == (1, 9, 0)
    assert told["waiting_for_memory"] == 7, "so many slots are free"
    bench.cancel(*range(2, 11))
    told = numbers(bench)
    assert (told["queued"], told["waiting_for_memory"]) == (0, 0)


def test_a_prompt_that_never_fits_is_refused_before_it_starts_and_others_go_on() -> None:
    bench = make()
    bench.send(Budget(ONE_ROW))
    bench.submit(job(1, 2000), job(2, 100))
    bench.round()
    assert bench.shortages
    bench.send(Budget(ONE_ROW))
    bench.finish()
    [refusal] = bench.job(1).events
    assert refusal == bench.job(1).failed
    assert bench.job(2).tokens


def test_a_lower_priority_number_has_the_next_memory() -> None:
    bench = make()
    bench.send(Budget(ONE_ROW))
    bench.submit(*crowd(3))
    bench.rounds(3)
    bench.submit(job(4, 100, 50, turn=Turn("other", priority=-1)))
    bench.finish()
    assert read_order(bench) == [1, 4, 2, 3]


def test_requests_of_a_client_are_served_in_the_order_of_their_arrival() -> None:
    bench = make(max_rows=1)
    bench.submit(job(1, 5, 30))
    bench.rounds(3)
    for number, arrival in ((2, 9), (3, 7), (4, 8)):
        bench.submit(job(number, 5, turn=Turn(arrival=arrival)))
    bench.finish()
    assert read_order(bench) == [1, 3, 4, 2]


def test_texts_to_embed_stand_in_the_line_of_rows() -> None:
    bench = make(max_rows=1)
    bench.submit(job(1, 5, 30))
    bench.rounds(3)
    for number in (2, 3, 4):
        bench.submit(Job(number, "m", texts=((1, 2), (3,))))
    bench.submit(job(5, 5))
    bench.rounds(2)
    assert not any(bench.job(number).events for number in (2, 3, 4, 5))
    bench.cancel(3)
    bench.finish()
    for number in (2, 4):
        first, *_, last = bench.job(number).events
        assert isinstance(first, Started)
        assert isinstance(last, Embedded)
    assert not bench.job(3).events
    assert len(bench.job(5).tokens) == 4
    assert numbers(bench)["queued"] == 0
