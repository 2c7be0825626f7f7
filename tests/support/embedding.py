"""A schedule of texts and an embedder, driven by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.embedding.embedding_models import (
    EmbeddingDecoder,
    EmbeddingEncoder,
)
from mlxsrv.engine.embedding.encoders.load import load_encoder
from mlxsrv.engine.events import Embedded, Event, Progress, Started
from mlxsrv.engine.faults import describe_error
from mlxsrv.engine.loading.load import ResidentModel
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Admitted, Done, EmbedFacts, Fault, Outcome
from mlxsrv.engine.plans import Admit, EmbedSlice, Release, Rewind, WorkItem
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.text_schedule import TextSchedule
from mlxsrv.generation.outputs import Vectors
from tests.support.fake_device import FACTS


def make_schedule(facts: EmbedFacts, pace: Pace, model: int = 1) -> TextSchedule:
    """The schedule of a model whose jobs are texts, and all of them have slots."""
    return TextSchedule(model, max_rows=1 << 30, pace=pace, facts=FACTS, embed=facts)


def take_events(schedule: TextSchedule) -> list[Event]:
    """The events since the last call, but for Started."""
    events: list[Event] = [
        event for event in schedule.budget.events if not isinstance(event, Started)
    ]
    schedule.budget.events.clear()
    return events


def run_slice(
    schedule: TextSchedule,
    embedder: Embedder,
    *,
    decoding: bool = False,
    beside: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> list[Event]:
    """Do a round's work: the jobs that came and went, and a slice if there is one. Returns the
    events of the jobs that ended."""
    schedule.budget.begin_round()
    for work in schedule.plan_rows():
        schedule.settle(work, do(work, embedder, clock))
    slice = schedule.embeddings.plan(decoding=decoding, beside=beside)
    if slice is not None:
        schedule.settle(slice, do(slice, embedder, clock))
    return [event for event in take_events(schedule) if not isinstance(event, Progress)]


def do(work: WorkItem, embedder: Embedder, clock: Callable[[], float] = perf_counter) -> Outcome:
    """Do one work, and measure it."""
    began = clock()
    done: Done | None = None
    fault = None
    try:
        match work:
            case Admit():
                done = Admitted(embedder.admit(work.jobs))
            case Release():
                embedder.release([freed.row for freed in work.rows])
            case Rewind():
                embedder.rewind(work.rows)
            case EmbedSlice():
                done = embedder.embed(work)
            case _:
                raise AssertionError(work)
    except Exception as error:
        fault = Fault(describe_error(error))
    return Outcome(began, clock(), done, fault)


Texts = tuple[tuple[int, ...], ...]


def make_texts(*lengths: int, seed: int = 0) -> Texts:
    random = np.random.default_rng(seed)
    return tuple(tuple(random.integers(3, 500, length).tolist()) for length in lengths)


TEXTS = make_texts(3, 40, 9, 33, 1, 25, 40, 17, 60, 38)


class Bench:
    """An embedder of one tiny model, and what it has said. Each work is said to take a millisecond,
    so slices are the same on every machine."""

    def __init__(self, folder: Path, *, chunk: int = 4096, name: str = "m") -> None:
        config = json.loads((folder / "config.json").read_text())
        model: Any = (
            EmbeddingEncoder(load_encoder(folder))
            if config["model_type"] == "bert"
            else EmbeddingDecoder(load_model(folder)[0])
        )
        self.model = model
        self.embedder = Embedder(model, folder, name)
        self.schedule = make_schedule(self.embedder.facts, Pace(chunk, 1.0))
        self.events: list[Event] = []
        self._clock = partial(next, count(0.0, 1e-3))
        self.slices: list[list[int]] = []  # the lengths of the texts in each
        inner = model.run

        def seen(tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
            self.slices.append(cast(list[int], mask.sum(axis=1).tolist()))
            return cast(mx.array, inner(tokens, mask, firsts))

        model.run = seen

    def submit(self, number: int, texts: Texts, firsts: tuple[int, ...] = ()) -> None:
        self.schedule.submit(Job(number, "m", texts=texts, firsts=firsts))

    def step(self, *, decoding: bool = False, beside: bool = False) -> None:
        self.events += run_slice(
            self.schedule, self.embedder, decoding=decoding, beside=beside, clock=self._clock
        )

    def finish(self, **streams: bool) -> None:
        while not self.schedule.idle:
            self.step(**streams)
        assert not self.embedder._jobs
        assert self.embedder._long is None

    def embed(self, texts: Texts, firsts: tuple[int, ...] = (), **streams: bool) -> Vectors:
        self.submit(0, texts, firsts)
        self.finish(**streams)
        return self.vectors(0)

    def vectors(self, number: int) -> Vectors:
        [event] = [event for event in self.events if cast(Any, event).job == number]
        assert isinstance(event, Embedded), event
        return event.vectors

    @property
    def ended(self) -> list[int]:
        return [cast(Any, event).job for event in self.events]


def embed(resident: ResidentModel, texts: Texts) -> Vectors:
    """The vectors of texts by a model that is loaded."""
    embedder = resident.embedder
    schedule = make_schedule(embedder.facts, Pace(64, 1.0))
    schedule.submit(Job(1, "m", texts=texts))
    events: list[Event] = []
    while not schedule.idle:
        events += run_slice(schedule, embedder)
    [event] = events
    assert isinstance(event, Embedded)
    return event.vectors
