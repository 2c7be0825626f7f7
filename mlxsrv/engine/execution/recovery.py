"""Recovery: what happens to the rows of a step, or of a slice of prompts, that failed.

An exception does not tell which row caused it, for a step is one pass for all rows. So:

- Prompts of a slice that failed are read again, each alone. One that fails alone ends.
- Rows of a step that failed lose their KV caches, since these may already contain part of the
  failed step. Their texts are read anew, one row at a time. Each row is then tried in a decoder of
  its own, beside the others, until it is past the token at which the step failed. A row that fails
  alone ends. The others join again and go on with the same tokens as if nothing had been: the token
  that was drawn and not delivered is drawn again, with the same key.
- A row that was in several failed slices for which no cause was found ends as well.
- Where memory was short, there were just too many rows. So fewer are decoded together, until some
  have ended, and a row that fails alone has more attempts.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from mlxsrv.engine.cache.prompt_cache import as_tokens
from mlxsrv.engine.events import Event, Failed, Token
from mlxsrv.engine.execution.decode import Decoder
from mlxsrv.engine.execution.prefill import Prefill
from mlxsrv.engine.execution.prefill_stages import PartialPrompt, QueuedPrompt
from mlxsrv.engine.faults import Fault, note
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Row, RowState

_log = logging.getLogger("mlxsrv.engine")

_MOST_FAULTS = 3  # of one row that are not explained, or in which memory was short
# A fault appears when its token is read, or one token earlier, so two tokens must pass.
_TRIAL = 2


class Recovery:
    """Runs work of a model that may fail, and brings the rows of failed work back.

    Args:
        main: decodes the rows of the model.
        trial: a second decoder, for one row that was in a step that failed.
        prefill: reads prompts.
        max_rows: rows that are decoded together while memory suffices.
    """

    def __init__(self, main: Decoder, trial: Decoder, prefill: Prefill, max_rows: int) -> None:
        self.fitting = max_rows  # rows whose KV caches fit into memory, as far as known
        self._main = main
        self._trial = trial
        self._prefill = prefill
        self._max_rows = max_rows
        self._lost: deque[QueuedPrompt] = deque()  # rows to be read anew and tried, in turn
        self._reading: PartialPrompt | None = None  # the text of the first of them
        # Tokens that the row must have drawn, counted from its beginning, before its trial ends.
        self._passed = 0

    @property
    def lost(self) -> int:
        """Rows without a KV cache, one of them perhaps half read."""
        return len(self._lost) + (self._reading is not None)

    @property
    def jobs(self) -> list[Job]:
        """The jobs of rows without a KV cache."""
        reading = [] if self._reading is None else self._reading.jobs
        return [*reading, *(queued.job for queued in self._lost)]

    def cancel(self, job_ids: set[int]) -> None:
        """Forget those of these jobs whose rows have lost their KV caches."""
        for queued in self._lost:
            if queued.job.id in job_ids:
                queued.row.enter(RowState.ENDED)
        self._lost = deque(queued for queued in self._lost if not queued.row.ended)
        if self._reading is not None and self._reading.drop(job_ids):
            self._reading = None

    def clear(self) -> None:
        self._lost.clear()
        self._reading = None

    # Work that may fail.

    def guard(
        self,
        decoder: Decoder,
        work: Callable[[], None],
        events: list[Event],
        joining: Iterable[Row] = (),
        *,
        stepping: bool = False,
    ) -> None:
        """Do `work`. If it fails, the decoder's rows and those `joining` lose their KV caches.

        Args:
            decoder: the decoder whose caches `work` changes.
            work: what may fail.
            events: takes the ends of rows that are found to be the cause.
            joining: rows that `work` adds to the decoder.
            stepping: `work` is a step, so a row that is alone in it is the cause of a fault.
        """
        try:
            work()
            return
        except Exception as error:
            fault = note(error, "a step failed")
        # Outside of `except`: the exception's traceback holds the arrays of the step.
        self._recover(decoder, fault, events, joining, stepping=stepping)

    def read_slice(
        self, prompts: list[PartialPrompt], into: Decoder, *, decoding: bool, beside: bool
    ) -> list[Event]:
        """Read a slice of these prompts. Rows whose text is read join the decoder `into`.

        If it fails, the prompts are read again, or end.
        """
        outcome = None
        try:
            outcome = self._prefill.read(prompts, decoding=decoding, beside=beside)
        except Exception as error:
            fault = note(error, "reading prompts failed")
        if outcome is None:
            return self._read_again(prompts, fault)
        rows, cache, events = outcome
        if rows:
            self.guard(into, partial(into.join, rows, cache), events, rows)
        return events

    # Rows on trial.

    def step(self, events: list[Event]) -> None:
        """Decode a step of the row on trial, if there is one. Once it has passed, it joins the
        others."""
        if self._trial.sub_batches:
            step = partial(self._trial.decode, events, waited=True)
            self.guard(self._trial, step, events, stepping=True)
            self._main.skip()
            for row in self._trial.rows:
                if len(row.drawn) >= self._passed:
                    self.guard(self._main, partial(self._main.absorb, self._trial), events, [row])
                    self._trial.abandon()
        if self.fitting < self._max_rows:
            self._widen(events)

    def read_lost(self, *, decoding: bool, beside: bool) -> list[Event] | None:
        """Read a slice of the next row that is to be tried; None if none may be now."""
        if not self.lost or self._trial.sub_batches or len(self._main.rows) >= self.fitting:
            return None
        if self._reading is None:
            self._reading = self._prefill.resume(self._lost[0])
            self._lost.popleft()
            self._passed = len(self._reading.queued[0].row.drawn) + _TRIAL
        prompt = self._reading
        events = self.read_slice([prompt], self._trial, decoding=decoding, beside=beside)
        if not prompt.left:
            self._reading = None
        return events

    def _widen(self, events: Iterable[Event]) -> None:
        """Let one more row decode for each that ends well, and all rows when none is left."""
        ended = sum(type(event) is Token and event.finish is not None for event in events)
        busy = self._main.sub_batches or self._trial.sub_batches or self.lost or self._prefill.asked
        self.fitting = min(self.fitting + ended, self._max_rows) if busy else self._max_rows

    # Rows of failed work.

    def _recover(
        self,
        decoder: Decoder,
        fault: Fault,
        events: list[Event],
        joining: Iterable[Row],
        *,
        stepping: bool,
    ) -> None:
        """Have all rows read anew and tried, but for one that is the cause."""
        rows = [row for row in dict.fromkeys((*decoder.rows, *joining)) if not row.ended]
        if decoder.rounding:
            _log.warning("the draft model may be to blame, and is no longer used")
            decoder.speculation = None
            stepping = False
        decoder.abandon()
        if fault.memory:
            self._prefill.spare()
            self._shrink(decoder, len(rows))
        for row in rows:
            row.faults.append(fault)
            if _exhausted(row) or (stepping and len(rows) == 1 and not _may_wait([row], fault)):
                events.append(_blame(row, fault))
            else:
                row.enter(RowState.RECOVERING)
                self._lost.append(QueuedPrompt(row, as_tokens(row.seen)[:-1], alone=True))

    def _read_again(self, prompts: Sequence[PartialPrompt], fault: Fault) -> list[Event]:
        """Have the prompts of a slice that failed read again, each alone; or end the only one."""
        self._prefill.abandon(prompts)
        recovering = self._reading in prompts
        if recovering:
            self._reading = None
        if fault.memory:
            self._prefill.spare()
        again = [queued for prompt in prompts for queued in prompt.restart()]
        for queued in again:
            queued.row.faults.append(fault)
            queued.alone = True
        rows = [queued.row for queued in again]
        if len(prompts) == 1 and not _may_wait(rows, fault):
            return [_blame(row, fault) for row in rows]
        if recovering:
            self._lost.extendleft(reversed(again))
        else:
            self._prefill.put_back(again)
        return []

    def _shrink(self, decoder: Decoder, rows: int) -> None:
        """Decode fewer rows together, since memory was short with so many: half of them. A row
        that was short of it alone waits until others have ended."""
        fitting = rows // 2 if decoder is self._main else len(self._main.rows)
        self.fitting = max(1, min(self.fitting, fitting))


def _blame(row: Row, fault: Fault) -> Failed:
    """End the row that caused the fault. Its faults do not count against other rows any more."""
    row.enter(RowState.ENDED)
    for each in row.faults:
        each.explained = True
    return fault.failed(row.job.id)


def _exhausted(row: Row) -> bool:
    """Whether too many of the row's slices have failed for causes that were not found."""
    return sum(not fault.explained for fault in row.faults) >= _MOST_FAULTS


def _may_wait(rows: Iterable[Row], fault: Fault) -> bool:
    """Whether rows that failed alone may wait for memory that others hold."""
    if not fault.memory:
        return False
    return all(sum(each.memory for each in row.faults) < _MOST_FAULTS for row in rows)
