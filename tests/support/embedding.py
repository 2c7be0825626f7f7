"""A schedule of texts and an embedder, driven by hand."""

from __future__ import annotations

from time import perf_counter

from mlxsrv.engine.embedding.embedder import Embedder
from mlxsrv.engine.events import Event
from mlxsrv.engine.faults import describe
from mlxsrv.engine.outcomes import Fault, Outcome, TextsRead
from mlxsrv.engine.plans import AdmitTexts, EmbedSlice, ReleaseTexts
from mlxsrv.engine.scheduling.embed_schedule import EmbedSchedule


def run_slice(
    schedule: EmbedSchedule, embedder: Embedder, *, decoding: bool = False, beside: bool = False
) -> list[Event]:
    """Do a round's work: the jobs that came and went, and a slice if there is one."""
    events: list[Event] = []
    for work in schedule.take_changes():
        events += schedule.settle(work, do(work, embedder))
    slice = schedule.plan(decoding=decoding, beside=beside)
    if slice is not None:
        events += schedule.settle(slice, do(slice, embedder))
    return events


def do(work: AdmitTexts | EmbedSlice | ReleaseTexts, embedder: Embedder) -> Outcome:
    """Do one work, and measure it."""
    began = perf_counter()
    done: TextsRead | None = None
    fault = None
    try:
        match work:
            case AdmitTexts():
                embedder.admit(work.order)
            case ReleaseTexts():
                embedder.release(work.jobs)
            case EmbedSlice():
                done = embedder.embed(work)
    except Exception as error:
        fault = Fault(describe(error))
    return Outcome(began, perf_counter(), done, fault)
