"""The scheduler and its clients: models that come and go, SAEs, and questions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxsrv.engine.events import Attached, Loaded, Report
from mlxsrv.engine.orders import (
    Attach,
    Budget,
    Close,
    Detach,
    GetMemory,
    ImportModelCode,
    Job,
    MakeReport,
    Submit,
    Unload,
    Watch,
)
from mlxsrv.engine.plans import (
    Admit,
    DetachSAE,
    LoadSlice,
    UnloadModel,
    WatchFeatures,
)
from mlxsrv.errors import ModelNotLoaded, SAEIncompatible
from tests.support.fake_device import FakeDevice
from tests.support.scheduling import (
    ORDER,
    STEERED,
    Bench,
    job,
    make,
)


def test_two_clients_may_give_their_jobs_the_same_ids() -> None:
    bench = Bench(clients=(1, 2))
    for client in (1, 2):
        bench.load(ORDER, client)
        bench.submit(job(7, 20, 2 + client), client=client)
    bench.finish()
    assert len(bench.job(7).tokens) == 3
    assert len(bench.job(7, 2).tokens) == 4
    assert {work.client for work in bench.items(Admit)} == {1, 2}


def test_one_client_cancels_its_own_job_only() -> None:
    bench = Bench(clients=(1, 2))
    for client in (1, 2):
        bench.load(ORDER, client)
        bench.submit(job(7, 20, 9), client=client)
    bench.round()
    bench.cancel(7, client=2)
    bench.finish()
    assert len(bench.job(7).tokens) == 9


def test_what_a_client_has_goes_with_it() -> None:
    bench = Bench(clients=(1, 2))
    bench.load(ORDER, client=2)
    bench.ask(msgspec.structs.replace(ORDER, model="n"), client=2)
    bench.submit(job(1, 100, 50), client=2)
    bench.rounds(2)
    bench.send(Close(), client=2)
    bench.send(Submit(job(2, 5)), client=2)  # it came too late
    bench.round()
    assert len(bench.items(UnloadModel)) == 2
    assert not bench.runner.models
    assert bench.done


def test_of_two_loads_of_one_folder_one_has_slices() -> None:
    bench = Bench(FakeDevice(load_slices=3))
    first = bench.ask(ORDER)
    second = bench.ask(msgspec.structs.replace(ORDER, model="n"))
    third = bench.ask(msgspec.structs.replace(ORDER, model="o", path="/b"))
    bench.rounds(3)
    assert [work.model for work in bench.items(LoadSlice)] == [1, 3] * 3
    slices = [work.limit for work in bench.items(LoadSlice) if work.model == 1]
    assert bench.weights_read[1, "m"] == sum(slices[:-1]), "with the last it is loaded"
    bench.finish()
    assert all(isinstance(bench.answers[1, each], Loaded) for each in (first, second, third))


def test_a_load_that_is_unloaded_is_refused() -> None:
    bench = Bench(FakeDevice(load_slices=3))
    number = bench.ask(ORDER)
    bench.round()
    again = bench.ask(ORDER)
    bench.send(Unload("m"))
    bench.round()
    assert isinstance(bench.answers[1, number], ModelNotLoaded)
    assert isinstance(bench.answers[1, again], ModelNotLoaded)
    assert not bench.runner.models
    assert bench.done
    bench.load(ORDER)


def test_jobs_of_a_model_that_goes_fail() -> None:
    bench = make()
    bench.submit(job(1, 5, 50), job(2, 500), job(3, 5))
    bench.rounds(2)
    bench.submit(job(4, 5))
    bench.send(Unload("m"))
    bench.submit(job(5, 5))
    bench.finish()
    assert all(bench.job(number).failed is not None for number in range(1, 6))
    assert not bench.runner.models


def test_orders_for_models_that_are_not_there_are_refused() -> None:
    bench = Bench()
    bench.submit(job(1, 5))
    bench.submit(Job(2, "m", texts=((1, 2),)))
    attached = bench.ask(Attach("m", 1, "/sae", 1))
    bench.send(Detach("m"))
    bench.send(Watch("m", (1,)))
    bench.send(Unload("m"))
    bench.finish()
    assert bench.job(1).failed is not None
    assert bench.job(2).failed is not None
    assert isinstance(bench.answers[1, attached], ModelNotLoaded)


def test_an_encoder_embeds_and_does_not_generate() -> None:
    bench = make(FakeDevice(text=None))
    bench.submit(job(1, 5))
    bench.submit(Job(2, "m", texts=((1, 2), (3,))))
    attached = bench.ask(Attach("m", 1, "/sae", 1))
    bench.send(Detach("m"))
    bench.send(Watch("m", (1,)))
    bench.finish()
    assert bench.job(1).failed is not None
    assert bench.job(2).failed is None
    assert isinstance(bench.answers[1, attached], SAEIncompatible)


def test_a_job_that_came_before_a_detachment_is_taken_before_it() -> None:
    bench = make()
    attached = bench.ask(Attach("m", 1, "/sae", 1))
    bench.finish()
    assert isinstance(bench.answers[1, attached], Attached)
    bench.submit(job(1, 5, steering=STEERED))
    bench.send(Detach("m"))
    bench.submit(job(2, 5))
    bench.send(Watch("m", (1,)))
    plan = bench.round()
    kinds = [type(work) for work in plan.items]
    assert kinds[:4] == [Admit, DetachSAE, WatchFeatures, Admit]


def test_a_job_that_waits_for_its_turn_stays_steered_by_an_sae_that_goes() -> None:
    bench = make(max_rows=1)
    bench.ask(Attach("m", 1, "/sae", 1))
    bench.finish()
    bench.submit(job(1, 5, 30))
    bench.rounds(3)
    bench.submit(job(2, 5, steering=STEERED), job(3, 5, steering=STEERED))
    bench.send(Detach("m"))
    bench.rounds(2)
    assert not bench.job(2).events, "it is not its turn yet"
    bench.cancel(3)
    bench.finish()
    assert len(bench.job(2).tokens) == 4
    assert not bench.job(3).events


@pytest.mark.parametrize(
    ("question", "value"), [(GetMemory(), 1 << 30), (ImportModelCode("/a"), None)]
)
def test_questions_are_answered(question: Any, value: Any) -> None:
    bench = Bench()
    number = bench.ask(question)
    bench.finish()
    assert bench.answers[1, number] == value


def test_a_report_has_the_numbers_of_the_clients_models() -> None:
    bench = make()
    bench.submit(job(1, 5, 50), job(2, 500))
    bench.rounds(3)
    number = bench.ask(MakeReport())
    bench.round()
    report = bench.answers[1, number]
    assert isinstance(report, Report)
    assert report.models["m"]["rows"] == 1
    assert report.models["m"]["reading"] == 1


def test_a_report_has_the_budget_of_its_client() -> None:
    bench = Bench(clients=(1, 2))
    bench.send(Budget(1000))
    bench.send(Budget(2000))
    numbers = [bench.ask(MakeReport(), client) for client in (1, 2)]
    bench.round()
    reports = [bench.answers[client, numbers[client - 1]] for client in (1, 2)]
    assert [report.budget for report in reports] == [2000, None]


def test_text_and_texts_have_slices_by_turns_beside_streams() -> None:
    bench = make()
    bench.submit(job(1, 5, 100))
    bench.rounds(3)
    bench.submit(job(2, 1000))
    bench.submit(Job(3, "m", texts=tuple((1,) * 60 for _ in range(10))))
    bench.finish()
    for plan in bench.plans:
        names = [type(work).__name__ for work in plan.items]
        assert not {"Read", "EmbedSlice"} <= {*names} or "Decode" not in names
