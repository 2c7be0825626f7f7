"""The continuous batch of one model: rows that decode together, joining and leaving at any step.

- Greedy text is mlx-lm's token for token: its models, its cache classes, and prompts read as its
  own generators read them.
- Prompts are read between two steps, see `prefill`; a step is the Decoder's, see `decode`.
- A failed step ends only the row that caused it, see `recovery`.
- Models whose KV caches cannot be merged run one row at a time through the same code.

Everything here is called on the device thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.events import Event, Failed, Started
from mlxsrv.engine.execution.decode import Decoder
from mlxsrv.engine.execution.prefill import Prefill
from mlxsrv.engine.execution.recovery import Recovery
from mlxsrv.engine.execution.speculation import Speculation, find_obstacle
from mlxsrv.engine.execution.sub_batches import SubBatch
from mlxsrv.engine.orders import Job
from mlxsrv.engine.row import Row
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint

_LEAST_PASS = 4 * 1024 * 1024  # bytes; a pass of the smallest model costs as much in calls


class Batch:
    """Decodes all rows of one model together.

    Args:
        model: a model of mlx-lm's.
        max_rows: rows decoded together, those being read included.
        pace: decides how many tokens of prompts are read between two steps.
        cached: prompts that were read before; the KV caches of rows that end are kept there.
        caches: makes the KV caches of rows; the model's own kind, unless given.
        padding: the most bytes of it for which rows share a pass; as many as the weights have,
            unless given.
        draft: a small model that proposes tokens to a row that is alone. Unused where a KV cache
            cannot be cut back.
        steerer: what jobs can be steered with; nothing, unless given.

    Raises:
        ValueError: the vocabulary of the draft is another.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_rows: int,
        pace: Pace,
        cached: PromptCache,
        caches: KVCacheFactory | None = None,
        padding: int | None = None,
        draft: Any | None = None,
        steerer: Steerer | None = None,
    ) -> None:
        self._pace = pace
        self._cached = cached
        caches = KVCacheFactory(model) if caches is None else caches
        steerer = Steerer(model) if steerer is None else steerer
        self._prefill = Prefill(model, pace=pace, cached=cached, caches=caches, steerer=steerer)
        self.batched = self._prefill.batched
        self.cuts = self._prefill.cuts
        self._max_rows = max_rows if self.batched else 1
        usable = draft is not None and find_obstacle(model, draft) is None
        decoder = partial(
            Decoder,
            model,
            cached=cached,
            batched=self.batched,
            padding=most_padding(model) if padding is None else padding,
            steerer=steerer,
        )
        self._main = decoder(pace=pace, speculation=Speculation(model, draft) if usable else None)
        self._trial = decoder()  # of one row that was in a step that failed
        self._recovery = Recovery(self._main, self._trial, self._prefill, self._max_rows)
        self._unsent: list[Event] = []

    @property
    def _speculation(self) -> Speculation | None:
        return self._main.speculation

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
        return not (self.streaming or self.pending or self._unsent)

    @property
    def pending(self) -> bool:
        """Whether there is something to read: prompts, or texts of rows without a KV cache."""
        return self._prefill.asked or self._recovery.lost > 0

    def statistics(self) -> dict[str, int]:
        return {
            "rows": len(self._rows),
            "lanes": len(self._sub_batches),
            "reading": self._prefill.reading,
            "waiting": self._prefill.waiting + self._recovery.lost,
            **({} if self._speculation is None else self._speculation.statistics()),
        }

    def submit(self, job: Job, constraint: Constraint | None = None) -> list[Event]:
        try:
            self._prefill.submit(job, constraint)
        except ValueError as error:
            return [Failed(job.id, str(error))]
        return [Started(job.id)]

    def replan(self) -> None:
        """Have the next step look at other features: what is watched has changed."""
        self._main.replan()
        self._trial.replan()

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Free the rows of these jobs, at whatever stage they are."""
        gone = set(job_ids)
        self._prefill.cancel(gone)
        self._recovery.cancel(gone)
        for decoder in (self._main, self._trial):
            self._recovery.guard(decoder, partial(decoder.cancel, gone), self._unsent)

    # A slice of work is decode(), then prefill(): tokens are delivered between the two, so that no
    # stream waits for the prompt of another job longer than it must.

    def decode(self) -> list[Event]:
        """Launch a step for all rows; return the tokens of the step before.

        Or run a speculative round, which gives several tokens of the only row.
        """
        events, self._unsent = self._unsent, []
        if self._main.sub_batches:
            waited = self._max_rows > 1 and self.pending
            step = partial(self._main.decode, events, waited=waited)
            self._recovery.guard(self._main, step, events, stepping=True)
        self._recovery.step(events)
        return events

    def prefill(self, *, beside: bool = False) -> list[Event]:
        """Read at most one slice of prompts, a shorter one if other models have streams, which
        `beside` tells."""
        decoding = self.streaming
        events = self._recovery.read_lost(decoding=decoding, beside=beside)
        if events is not None:
            return events
        free = self._recovery.fitting - len(self._rows) - self._recovery.lost
        if free <= 0 or not self._prefill.asked:
            return self._prepare_draft()
        prompts = self._prefill.choose(free, decoding=decoding, beside=beside)
        if not prompts:
            return []
        return self._recovery.read_slice(prompts, self._main, decoding=decoding, beside=beside)

    def take_progress(self) -> list[int]:
        """The jobs that a slice has brought on and that were told of nothing else: their prompts
        are half read, or their KV caches lost."""
        moved = self._prefill.take_moved()
        jobs = [*self._prefill.half_read, *self._recovery.jobs] if moved else []
        return [job.id for job in jobs]

    def _prepare_draft(self) -> list[Event]:
        """Have the draft read a slice of the only row's text, if it lacks much of it."""
        events: list[Event] = []
        if self._speculation is not None and (not self.pending or self._max_rows == 1):
            limit = self._pace.limit(decoding=True, long=True)
            read = partial(self._main.prepare_draft, limit)
            self._recovery.guard(self._main, read, events)
        return events

    def fail(self, reason: str) -> list[Event]:
        """End every job of the batch."""
        jobs = [row.job for row in self._rows] + self._prefill.jobs + self._recovery.jobs
        self._prefill.clear()
        self._recovery.clear()
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
