"""The continuous batch of one model: rows that decode together, joining and leaving at any step.

- Greedy text is mlx-lm's token for token: its models, its cache classes, and prompts read as its
  own generators read them.
- Prompts are read between two steps: see `prefill`. A step is the Decoder's: see `decoding`.
- A step that fails ends nobody but who is to blame for it. Its rows lose their caches and are
  tried one by one, each alone in a decoder of its own beside the others: see `faults`.
- Models whose caches cannot be merged run one row at a time through the same code, unmerged.

Everything here is called on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.cache.row_caches import Caches
from mlxsrv.engine.events import Event, Failed, Started, Token
from mlxsrv.engine.execution.decode import Decoder
from mlxsrv.engine.execution.prefill import Prefill
from mlxsrv.engine.execution.recovery import MOST_FAULTS, blame, exhausted, short
from mlxsrv.engine.execution.speculation import Speculation, find_obstacle
from mlxsrv.engine.execution.sub_batches import SubBatch
from mlxsrv.engine.faults import Fault, note
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Row
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation import Constraint

_log = logging.getLogger("mlxsrv.engine")

_LEAST_PASS = 4 * 1024 * 1024  # bytes; a pass of the smallest model costs as much in calls
_TRIAL = 2  # tokens: a fault of a step shows when its token is read, or the one before


class Batch:
    """Decodes all rows of one model together.

    Args:
        model: a model of mlx-lm's.
        max_rows: rows decoded together, those being read included.
        pace: how much of a prompt is read between two steps.
        cached: prompts that have been read before; rows that end are kept there.
        caches: makes the caches of rows; the model's own kind, unless given.
        padding: the most bytes of it for which rows share a pass; as many as the weights have,
            unless given.
        draft: a small model that proposes tokens to a row that is alone. Unused where a cache
            cannot be cut back; ValueError where its vocabulary is another.
        steerer: what jobs can be steered with; nothing, unless given.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        pace: Pace,
        cached: PromptCache,
        caches: Caches | None = None,
        padding: int | None = None,
        draft: Any | None = None,
        steerer: Steerer | None = None,
    ) -> None:
        self._model = model
        self._steerer = Steerer(model) if steerer is None else steerer
        self._pace = pace
        self._cached = cached
        caches = Caches(model) if caches is None else caches
        self._prefill = Prefill(
            model, pace=pace, cached=cached, caches=caches, steerer=self._steerer
        )
        self.batched = self._prefill.batched
        self.cuts = self._prefill.cuts
        self._max_rows = max_rows if self.batched else 1
        self._fitting = self._max_rows  # rows that memory has room for, as far as known
        usable = draft is not None and find_obstacle(model, draft) is None
        self._speculation = Speculation(model, draft) if usable else None
        decoder = partial(
            Decoder,
            model,
            cached=cached,
            batched=self.batched,
            padding=most_padding(model) if padding is None else padding,
            steerer=self._steerer,
        )
        self._main = decoder(pace=pace, speculation=self._speculation)
        self._trial = decoder()  # of one row that was in a step that failed
        self._unsent: list[Event] = []

    @property
    def _sub_batches(self) -> list[SubBatch]:
        return self._main.sub_batches + self._trial.sub_batches

    @property
    def _rows(self) -> list[Row]:
        return [row for sub_batch in self._sub_batches for row in sub_batch.rows]

    @property
    def streaming(self) -> bool:
        """Whether rows are being decoded."""
        return bool(self._main.sub_batches or self._trial.sub_batches)

    @property
    def idle(self) -> bool:
        return not (self.streaming or self._prefill.asked or self._unsent)

    @property
    def pending(self) -> bool:
        """Whether prompts wait or are being read."""
        return self._prefill.asked

    def statistics(self) -> dict[str, int]:
        return {
            "rows": len(self._rows),
            "lanes": len(self._sub_batches),
            "reading": self._prefill.reading,
            "waiting": self._prefill.waiting + self._prefill.lost,
            **({} if self._speculation is None else self._speculation.statistics()),
        }

    def submit(self, job: Job, constraint: Constraint | None = None) -> list[Event]:
        try:
            self._prefill.submit(job, constraint)
        except ValueError as error:
            return [Failed(job.id, str(error))]
        return [Started(job.id)]

    def replan(self) -> None:
        """What is watched has changed."""
        self._main.replan()
        self._trial.replan()

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Free the rows of these jobs, at whatever stage they are."""
        gone = set(job_ids)
        self._prefill.cancel(gone)
        for decoder in (self._main, self._trial):
            for row in decoder.rows:
                row.ended = row.ended or row.job.id in gone
            self._guard(decoder, decoder.drop_ended, self._unsent)

    # One slice of work is decode(), then prefill(): tokens are delivered between the two, so that
    # no stream waits for somebody else's prompt longer than it must.

    def decode(self) -> list[Event]:
        """Launch a step for all rows; return the tokens of the step before.

        Or run a round: several tokens of the one row there is.
        """
        events, self._unsent = self._unsent, []
        if self._main.sub_batches:
            # Not by `_guard`, which is a call more than a step wants.
            fault = None
            try:
                waited = self._max_rows > 1 and self._prefill.asked
                self._main.decode(events, waited=waited)
            except Exception as error:
                fault = note(error, "a step failed")
            if fault is not None:
                self._recover(self._main, fault, events, stepping=True)
        if self._trial.sub_batches:
            self._try_on(events)
        if self._fitting < self._max_rows:
            self._widen(events)
        return events

    def _try_on(self, events: list[Event]) -> None:
        """A step of the row that is on trial; it joins the others once it has passed."""
        step = partial(self._trial.decode, events, waited=True)
        self._guard(self._trial, step, events, stepping=True)
        self._main.skip()
        for row in self._trial.rows:
            if row.trial is None or len(row.drawn) >= row.trial:
                row.trial = None
                self._guard(self._main, partial(self._main.absorb, self._trial), events, [row])
                self._trial.abandon()

    def _widen(self, events: list[Event]) -> None:
        """Each row that ends well leaves room for one more than there was room for at last."""
        ended = sum(type(event) is Token and event.finish is not None for event in events)
        self._fitting = min(self._fitting + ended, self._max_rows)
        if self.idle:
            self._fitting = self._max_rows

    def prefill(self, *, beside: bool = False) -> list[Event]:
        """Read at most one slice of prompts, shorter if `beside` are streams of other models. An
        error there fails the jobs that are to blame, no others."""
        if not self._prefill.asked:
            return [] if self._speculation is None else self._prepare_draft()
        lost = self._prefill.lost
        decoded = len(self._rows)
        free = self._fitting - decoded - lost
        trial = lost > 0 and not self._trial.sub_batches and decoded < self._fitting
        if free <= 0 and not trial:
            return self._prepare_draft()
        read = self._prefill.step(free, decoding=self.streaming, beside=beside, trial=trial)
        if read is None:
            return []
        if read.rows:
            into = self._main if read.rows[0].trial is None else self._trial
            self._guard(into, partial(into.join, read.rows, read.cache), read.events, read.rows)
        return read.events

    def take_progress(self) -> list[int]:
        """The jobs that a slice has brought on and that were told of nothing else."""
        return self._prefill.take_moved()

    def _prepare_draft(self) -> list[Event]:
        """Have the draft read a slice of what the only row has seen, if it lacks much of it."""
        events: list[Event] = []
        if self._speculation is not None and (not self._prefill.asked or self._max_rows == 1):
            limit = self._pace.limit(decoding=True, long=True)
            self._guard(self._main, partial(self._main.prepare_draft, limit), events)
        return events

    # Faults.

    def _guard(
        self,
        decoder: Decoder,
        work: Callable[[], None],
        events: list[Event],
        joining: Iterable[Row] = (),
        *,
        stepping: bool = False,
    ) -> None:
        """Do what may cost the decoder's rows, and those `joining`, their caches if it fails.

        A row that was `stepping` alone is to blame for it; but maybe not for a round.
        """
        try:
            work()
            return
        except Exception as error:
            fault = note(error, "a step failed")
        self._recover(decoder, fault, events, joining, stepping=stepping)

    def _recover(
        self,
        decoder: Decoder,
        fault: Fault,
        events: list[Event],
        joining: Iterable[Row] = (),
        *,
        stepping: bool,
    ) -> None:
        """Have all rows read anew and tried, but for one that is to blame.

        Called when the exception is gone: its traceback has kept the step's arrays.
        """
        rows = [row for row in dict.fromkeys((*decoder.rows, *joining)) if not row.ended]
        if decoder.rounding:
            _log.warning("the draft model may be to blame, and is no longer used")
            self._speculation = self._main.speculation = None
            stepping = False
        decoder.abandon()
        if fault.memory:
            self._prefill.spare()
            self._shrink(decoder, len(rows))
        for row in rows:
            row.faults.append(fault)
            patient = fault.memory and short(row) < MOST_FAULTS
            if exhausted(row) or (stepping and len(rows) == 1 and not patient):
                events.append(blame(row, fault))
            else:
                row.trial = len(row.drawn) + _TRIAL
                self._prefill.recover(row)

    def _shrink(self, decoder: Decoder, rows: int) -> None:
        """Memory was short with so many rows: half of them may do. One alone waits for others."""
        fitting = rows // 2 if decoder is self._main else len(self._main.rows)
        self._fitting = max(1, min(self._fitting, fitting))

    def fail(self, reason: str) -> list[Event]:
        """End every job of the batch."""
        jobs = [row.job for row in self._rows] + self._prefill.jobs
        self._prefill.clear()
        self._main.abandon()
        self._trial.abandon()
        events, self._unsent = self._unsent, []
        return [*events, *(Failed(job.id, reason) for job in jobs)]


def most_padding(model: Any) -> int:
    """Bytes of padding that cost as much as another pass of the model."""
    return max(_LEAST_PASS, sum(array.nbytes for array in weights(model)))


def weights(model: Any) -> list[mx.array]:
    """All arrays that were read from the model's files."""
    return [
        array for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    ]
