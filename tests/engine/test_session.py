"""A client's session, driven by hand on this thread: orders that meet each other half way."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from mlxsrv.engine.session import Session

from mlxsrv.engine.events import Answered, Attached, Event, Failed, Loaded, Token
from mlxsrv.engine.mailbox import Mailbox
from mlxsrv.engine.orders import Ask, Attach, Cancel, Detach, Job, Load, MakeReport, Submit, Unload
from mlxsrv.engine.watchdog import Clock
from mlxsrv.errors import ModelNotLoaded, SAEIncompatible
from mlxsrv.generation.parameters import Sampling
from tests.support.fixtures import ModelFolder
from tests.support.saes import write_sae


class Box(Mailbox):
    """Keeps what is posted; with `closed` its loop is gone."""

    def __init__(self) -> None:
        super().__init__(asyncio.new_event_loop(), lambda events: None)
        self.events: list[Event] = []
        self.closed = False

    def post(self, events: Sequence[Event]) -> bool:
        if not self.closed:
            self.events += events
        return not self.closed


@pytest.fixture
def box() -> Iterator[Box]:
    box = Box()
    yield box
    box._loop.close()


@pytest.fixture
def session(box: Box) -> Session:
    return Session(box, Clock(), list)


def load(folder: Path, name: str = "m") -> Load:
    return Load(model=name, path=str(folder), max_rows=4, prefill_chunk=64, max_gap=0.2)


def job(number: int, model: str = "m", max_tokens: int = 10**6) -> Job:
    return Job(number, model, (5, 6, 7), max_tokens, frozenset(), Sampling(temperature=0))


def obey(session: Session, order: Any) -> None:
    """As the device thread does."""
    try:
        session.obey(order)
    except Exception as error:
        session.refuse(order, error)


def answer(session: Session, box: Box, number: int) -> Any:
    for _ in range(1000):
        for event in box.events:
            if isinstance(event, Answered) and event.number == number:
                return event.value
        session.step()
    raise AssertionError("no answer")


def test_a_model_that_is_unloaded_under_an_attachment(
    session: Session, box: Box, model_folder: ModelFolder, tmp_path: Path
) -> None:
    sae = write_sae(tmp_path / "sae", d_in=64, d_sae=256, layer=1)
    obey(session, Ask(1, load(model_folder("qwen3"))))
    assert isinstance(answer(session, box, 1), Loaded)
    obey(session, Ask(2, Attach("m", 1, str(sae), 1)))
    session.step()
    obey(session, Unload("m"))
    gone = answer(session, box, 2)
    assert isinstance(gone, ModelNotLoaded)
    assert gone.message == "its model was unloaded"
    assert gone.__traceback__ is None  # its frames would keep the session's models
    assert session.idle


def test_an_attachment_says_what_is_wrong(
    session: Session, box: Box, model_folder: ModelFolder, tmp_path: Path
) -> None:
    sae = write_sae(tmp_path / "sae", d_in=32, d_sae=256, layer=1)
    obey(session, Ask(1, Attach("m", 1, str(sae), 1)))
    assert isinstance(answer(session, box, 1), ModelNotLoaded)
    obey(session, Ask(2, load(model_folder("qwen3"))))
    answer(session, box, 2)
    obey(session, Ask(3, Attach("m", 1, str(sae), 1)))
    assert isinstance(answer(session, box, 3), SAEIncompatible)
    right = write_sae(tmp_path / "right", d_in=64, d_sae=256, layer=1)
    obey(session, Ask(4, Attach("m", 2, str(right), 1)))
    assert isinstance(answer(session, box, 4), Attached)


def test_orders_for_a_model_that_is_not_there(session: Session, box: Box) -> None:
    obey(session, Submit(job(1)))
    assert box.events == [Failed(1, "its model is not loaded")]
    for order in (Detach("m"), Unload("m"), Cancel(1)):
        obey(session, order)
    session.cancel_jobs()
    session.step()
    assert len(box.events) == 1


def test_a_client_whose_loop_is_gone_holds_nothing(
    session: Session, box: Box, model_folder: ModelFolder
) -> None:
    obey(session, Ask(1, load(model_folder("qwen3"))))
    answer(session, box, 1)
    obey(session, Submit(job(2)))
    while not any(isinstance(event, Token) for event in box.events):
        session.step()
    obey(session, Ask(3, load(model_folder("llama"), "other")))
    box.closed = True
    session.step()
    session.step()
    assert session.gone
    assert session.idle
    assert session.models == {}


def test_an_order_that_fails_is_logged_and_told(
    session: Session,
    box: Box,
    model_folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    obey(session, Ask(1, load(model_folder("qwen3"))))
    answer(session, box, 1)

    def fail(*_: Any) -> None:
        raise RuntimeError("no  room\nleft")

    monkeypatch.setattr(session.models["m"].batch, "submit", fail)
    monkeypatch.setattr(session.models["m"], "statistics", fail)
    obey(session, Submit(job(2)))
    obey(session, Ask(3, MakeReport()))
    assert box.events[-2] == Failed(2, "RuntimeError: no room left")
    assert isinstance(box.events[-1], Answered)
    assert box.events[-1].value.message == "RuntimeError: no room left"
    assert [record.getMessage() for record in caplog.records] == ["an order failed"] * 2
