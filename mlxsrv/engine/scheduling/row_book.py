"""The rows of one model that have not ended: they are admitted, preempted and freed here.

A row stands in the line first (see `fair_queue`). It gets a slot when it is its turn, a slot is
free, and there is memory to read its text: the memory budget looks at the head of each line, and
nobody behind it is served before. Texts to embed need no memory to begin.

A row that has ended is freed by the next plan. Its KV cache goes to the prompt cache, where later
prompts may begin with its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mlxsrv.engine.events import Activations, Event, Failed, Finished, Shortage, Started
from mlxsrv.engine.faults import NOT_A_NUMBER
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Admitted, Kept, Outcome
from mlxsrv.engine.plans import Admit, Forget, FreedRow, Release, Rewind, WorkItem
from mlxsrv.engine.scheduling.fair_queue import FairQueue
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.engine.scheduling.prompt_index import PromptIndex, Tokens, as_tokens
from mlxsrv.engine.scheduling.prompt_queue import PromptQueue
from mlxsrv.engine.scheduling.proposers import Proposer
from mlxsrv.engine.scheduling.row import Row, RowState
from mlxsrv.engine.scheduling.store_schedule import StoreSchedule
from mlxsrv.engine.scheduling.text_queue import TextQueue


class RowBook:
    """Rows by the ids of their jobs.

    Args:
        model: the model's number.
        client: the number of the client that it belongs to.
        index: the cached prompts.
        queue, texts, groups: a row is in one of them, once it has a slot.
        numbers: those of rows, in the order in which their turns come, over all models.
        events: those that are to be sent to the client; more are appended here.
        store: prompts on disk; None: there are none.
        proposer: proposes tokens to the rows; None: nothing does.

    Attributes:
        rows: by the ids of their jobs.
        line: rows that wait for a slot.
        short_of_memory: the next plan drops whatever is not needed.
        fitting: rows whose KV caches fit into memory together, as far as faults have told.
        index, queue, texts, groups, proposer: as above.
    """

    def __init__(
        self,
        model: int,
        client: int,
        index: PromptIndex,
        queue: PromptQueue,
        texts: TextQueue,
        groups: Groups,
        numbers: Iterator[int],
        events: list[Event],
        store: StoreSchedule | None = None,
        proposer: Proposer | None = None,
    ) -> None:
        self.rows: dict[int, Row] = {}
        self.line = FairQueue[Row]()
        self.short_of_memory = False
        self._model = model
        self._client = client
        self._store = store
        self.index = index
        self.queue = queue
        self.texts = texts
        self.groups = groups
        self.fitting = groups.max_rows
        self.proposer = proposer
        self._numbers = numbers
        self._numbered: Row | None = None  # the head that has got its number
        self._events = events
        # For the next plan.
        self._coming: list[Job] = []
        self._ended_rows: list[tuple[Row, Tokens | None]] = []  # with what is to be cached
        self._rewound: list[Row] = []

    @property
    def settled(self) -> bool:
        """Whether the runner has nothing to admit, to free, to drop or to embed, and no row has a
        KV cache."""
        # First what is seen at once, for this is asked several times a round.
        if (
            self.groups.count
            or self.texts.ready
            or (self._store is not None and not self._store.idle)
            or self._coming
            or self._ended_rows
            or self._rewound
            or self.short_of_memory
            or self.index.dropped
            or (self.proposer is not None and self.proposer.evicted)
        ):
            return False
        fetching = sum(row.state is RowState.FETCHING for row in self.rows.values())
        waiting = len(self.queue.waiting) + fetching + len(self.texts.jobs) + len(self.line)
        return len(self.rows) == waiting

    @property
    def waits(self) -> bool:
        """Whether there are rows that may be read and have no KV cache."""
        return bool(self.queue.waiting or self.head)

    @property
    def head(self) -> Row | None:
        """The row whose turn it is, where there is a slot for it: it waits for memory."""
        row = self.line.next if self._free_slots > 0 else None
        if row is not None and row is not self._numbered:
            self._numbered = row
            row.number = next(self._numbers)
        return row

    @property
    def _free_slots(self) -> int:
        # Where memory was short in a fault, fewer rows are served than there are slots.
        return self.fitting - (len(self.rows) - len(self.line))

    @property
    def short(self) -> int:
        """The number of rows that wait for memory, and for nothing else."""
        short = sum(not row.suspect for row in self.queue.preempted) + len(self.texts.short)
        return short + (0 if self.head is None else min(self._free_slots, len(self.line)))

    @property
    def free(self) -> int:
        """The number of rows that may be read or decoded beside the others: those that may run,
        less those that are read or decoded."""
        return self.fitting - self.groups.count - self.queue.rows

    def shrink(self, rows: int) -> None:
        """Decode at most so many rows together, since memory was short with more."""
        self.fitting = max(1, min(self.fitting, rows))

    def widen(self, ended: int, *, busy: bool) -> None:
        """Let one more row decode for each that ended well, and all rows when none is left."""
        most = self.groups.max_rows
        self.fitting = min(self.fitting + ended, most) if busy else most

    def count_texts(self) -> int:
        """Texts that wait or are being read in several slices."""
        queued = [len(row.job.texts) for row in self.rows.values() if row.queued]
        return sum(queued) + len(self.texts)

    def find(self, job_id: int) -> Row | None:
        """None if the row has ended."""
        return self.rows.get(job_id)

    def enqueue(self, job: Job) -> None:
        """Take a job: its row stands in the line.

        Raises:
            ValueError: its prompt is empty, or its id is that of another row.
            OverflowError: a number in its prompt is not a token id.
        """
        if not (job.prompt or job.texts):
            raise ValueError("its prompt has no tokens")
        if job.id in self.rows:
            raise ValueError("there is a job of this id")
        last = next(reversed(self.rows.values()), None)
        # The choices of one request share a prompt, so they share the array made of it.
        known = last is not None and last.job.prompt is job.prompt
        prompt = last.prompt if last is not None and known else as_tokens(job.prompt)
        row = Row(job, prompt)
        self.rows[row.id] = row
        if row.steered:
            self._coming.append(job)
        self.line.enqueue(row, job.turn)

    def serve_texts(self) -> None:
        """Give slots to the jobs of texts whose turn it is: they need no memory to begin."""
        while (head := self.head) is not None and head.embeds:
            self._serve()

    def serve_head(self) -> None:
        """Give the head of the line its slot, since there is memory for it."""
        self._serve()
        self.serve_texts()

    def _serve(self) -> None:
        """Give the head of the line its slot: its prompt waits to be read, or its texts to be
        embedded."""
        row, self._numbered = self.line.serve_next(), None
        if row.embeds:
            row.enter(RowState.PREFILLING)
            self.texts.add(row)
        elif self._store is not None and not row.steered:  # what is steered is not on disk
            row.enter(RowState.FETCHING)
        else:
            row.enter(RowState.WAITING)
            self.queue.waiting.append(row)
        if row.admitted:
            self._events.append(Started(row.id))
        elif not row.steered:
            self._coming.append(row.job)

    def preempt(self, row: Row) -> None:
        """Drop a row's KV cache. The row stays, and waits again in its old place."""
        if row.embeds:
            self.texts.put_back(row)
            self._rewound.append(row)
            return
        self._withdraw(row)
        self._rewound.append(row)
        self.queue.put_back([row])

    # Rows that end.

    def end(self, row: Row, state: RowState = RowState.ENDED, *, kept: bool = True) -> None:
        """End a row, and have its KV cache kept, if it has any and `kept` is given."""
        unknown = row.queued and not row.steered  # to the runner
        if row.queued:
            self.line.leave(row)
        else:
            self.line.finish(row, row.tokens_read + len(row.drawn))
        text = self._withdraw(row)
        row.enter(state)
        del self.rows[row.id]
        if unknown:
            return
        self._ended_rows.append((row, text if kept else None))

    def fail(self, row: Row, reason: str, clear: str | None = None, *, kept: bool = True) -> None:
        """End a row that cannot go on; `clear` is what a client may read of the reason."""
        self._events.append(Failed(row.id, reason, clear=clear))
        self.end(row, kept=kept)

    def refuse(self, row: Row, shortage: Shortage) -> None:
        """End a row whose text does not fit into memory. One that has drawn tokens ends as at its
        limit."""
        if row.drawn:
            self._events.append(Finished(row.id))
        else:
            self._events.append(Failed(row.id, shortage.message, shortage=shortage))
        self.end(row, kept=False)

    def fail_broken(self, row: Row) -> None:
        """End a row for which the model computed NaN."""
        self.index.drop_prefixes(row.text, row.job.steering)
        self._events.append(Failed(row.id, NOT_A_NUMBER, clear=NOT_A_NUMBER))
        self.end(row, RowState.BROKEN, kept=False)

    def fail_all_broken(self, job_ids: Iterable[int]) -> None:
        """End these rows, for which the model computed NaN."""
        for job_id in job_ids:
            if (row := self.rows.get(job_id)) is not None:
                self.fail_broken(row)

    def cancel(self, job_ids: Iterable[int]) -> None:
        """End the rows of these jobs, at whatever stage they are."""
        for job_id in job_ids:
            if (row := self.rows.get(job_id)) is not None:
                self.end(row)

    def end_all(self, reason: str) -> list[WorkItem]:
        """End all rows, since the model is unloaded. Where prompts are stored on disk, all cached
        prompts are written, and what these rows have read. Returns the last work items."""
        if self._store is None:
            self._events += self.fail_all(reason)
            return []
        self._events += [Failed(job_id, reason) for job_id in self.rows]
        self.cancel(list(self.rows))
        items = self._plan_rows()
        freed_rows = [freed for work in items if isinstance(work, Release) for freed in work.rows]
        promised = [freed.keep.entry for freed in freed_rows if freed.keep is not None]
        return [*items, *self._store.plan_all(promised)]

    def fail_all(self, reason: str) -> list[Failed]:
        """Forget all rows, since the model is unloaded. Nothing is planned for them any more."""
        events = [Failed(job_id, reason) for job_id in self.rows]
        self.rows.clear()
        return events

    def _withdraw(self, row: Row) -> Tokens | None:
        """Remove the row from the queue or group that it is in. Returns the tokens that its KV
        cache holds, if it has one to itself."""
        match row.state:
            case RowState.DECODING | RowState.FRESH:
                self.groups.remove(row)
                return row.text[: row.held]
            case RowState.WAITING | RowState.PREEMPTED:
                self.queue.waiting.remove(row)
            case RowState.PREFILLING if row.embeds:
                self.texts.remove(row)
            case RowState.PREFILLING:
                return self.queue.stop_reading(row)
        return None

    # Planning.

    def plan_changes(self) -> list[WorkItem]:
        """The work items that admit and free rows, drop cached prompts, and write and fetch
        prompts."""
        items = self._plan_rows()
        if self._store is not None:
            streaming = self.groups.count > 0
            items += self._store.plan(streaming=streaming, busy=streaming or bool(self.queue))
        return items

    def _plan_rows(self) -> list[WorkItem]:
        items: list[WorkItem] = []
        if self._coming:
            items.append(Admit(model=self._model, client=self._client, jobs=tuple(self._coming)))
            self._coming = []
        spare, self.short_of_memory = self.short_of_memory, False
        if spare:
            self.index.clear()
            if self.proposer is not None:
                self.proposer.evict()
            self._rewound += self.queue.shrink()
        if rows := tuple([row.id for row in self._rewound if not row.ended]):
            items.append(Rewind(model=self._model, rows=rows))
        self._rewound = []
        freed_rows = tuple([self._plan_release(*ended) for ended in self._ended_rows])
        # First drop cached prompts: others that are cached now may need their memory.
        dropped = self.index.take_dropped()
        draft = self.proposer is not None and self.proposer.take_evicted()
        if dropped or draft or spare:
            items.append(Forget(model=self._model, entries=dropped, draft=draft, spare=spare))
        if freed_rows:
            items.append(Release(model=self._model, rows=freed_rows))
            self._ended_rows = []
        return items

    def _plan_release(self, row: Row, text: Tokens | None) -> FreedRow:
        if text is None:
            return FreedRow(row.id)
        asked, steering = row.prompt.size, row.job.steering
        return FreedRow(row.id, self.index.plan_keep(text, steering, asked=asked, uses=row.uses))

    def settle_admission(self, work: Admit, outcome: Outcome) -> None:
        """Send events of the jobs that are admitted, and of those that are not."""
        done = outcome.done if isinstance(outcome.done, Admitted) else Admitted()
        failed = {failure.row: failure for failure in done.failures}
        for job in work.jobs:
            row = self.rows.get(job.id)
            if row is None:
                continue
            if outcome.fault is not None:
                self.fail(row, outcome.fault.reason)
            elif (failure := failed.get(job.id)) is not None:
                self.fail(row, failure.reason, failure.clear)
            elif row.queued:
                row.admitted = True
            else:
                self._events.append(Started(job.id))
        if self._store is not None:
            found = (self.rows.get(job.id) for job in work.jobs)
            fetching = [row for row in found if row and row.state is RowState.FETCHING]
            self._store.note_admitted(fetching, done)

    def settle_release(self, work: Release, outcome: Outcome) -> None:
        kept = outcome.done.prompts if isinstance(outcome.done, Kept) else ()
        self.index.confirm([freed.keep for freed in work.rows], kept)

    def find_unreported(self, activations: Iterable[Activations]) -> Iterator[Activations]:
        """Return the activations that were not sent yet: after a fault or a preemption, tokens are
        read again, and their activations come a second time."""
        for each in activations:
            row = self.rows.get(each.job)
            if row is not None and not row.read and each.position >= row.reported:
                yield each
