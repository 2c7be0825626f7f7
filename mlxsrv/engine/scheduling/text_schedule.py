"""The work items of a round for the rows of one model.

A round of a model is, in this order: rows are admitted and freed; one step of all rows, and one of
a suspect; at most one slice of prompts, and one of texts to embed. Tokens are delivered before a
slice, so that no stream waits for the prompt of another job longer than it must.

- Which prompt is read next: `prompt_queue`; how much of it: `pace`. Of texts: `embed_schedule`.
- Rows whose lengths differ much have KV caches of their own: see `groups`.
- After a fault the rows of its step are suspects, and are read anew: see `recovery`.
- What KV caches may take, and which rows are preempted where that is too much: see `memory_budget`.
- Where tokens are proposed: see `proposers`; whether it is worth it: see `speculation`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from mlxsrv.engine.events import Failed, Finished, Progress, PromptRead, Token
from mlxsrv.engine.orders import Job, StorageReport
from mlxsrv.engine.outcomes import (
    Decoded,
    EmbedFacts,
    Fault,
    Outcome,
    PromptsRead,
    TextFacts,
)
from mlxsrv.engine.plans import (
    Admit,
    Decode,
    EmbedSlice,
    Proposal,
    Read,
    ReadDraft,
    Release,
    WorkItem,
)
from mlxsrv.engine.scheduling.embed_schedule import EmbedSchedule
from mlxsrv.engine.scheduling.groups import Groups
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.prompt_index import PromptIndex
from mlxsrv.engine.scheduling.prompt_queue import PromptQueue
from mlxsrv.engine.scheduling.proposers import MOST, make_proposer
from mlxsrv.engine.scheduling.reading import Reading
from mlxsrv.engine.scheduling.recovery import blame, find_guilty, suspect_row
from mlxsrv.engine.scheduling.row import Incident, Row, RowState
from mlxsrv.engine.scheduling.row_book import RowBook
from mlxsrv.engine.scheduling.row_memory import RowMemory
from mlxsrv.engine.scheduling.spans import SpanMaker
from mlxsrv.engine.scheduling.speculation import Speculation
from mlxsrv.engine.scheduling.store_schedule import StoreSchedule
from mlxsrv.engine.scheduling.text_queue import TextQueue

_log = logging.getLogger("mlxsrv.engine")


class TextSchedule:
    """The rows of one model.

    Args:
        model: the model's number.
        client: the number of the client that it belongs to.
        max_rows: rows decoded together, those being read included.
        pace: decides how many tokens of prompts are read between two steps.
        facts: of the model.
        embed: the same, of texts to embed; those of a decoder, unless given.
        budget: of the client; without bounds, unless given.

    Attributes:
        memory: what the rows take.
        embeddings: plans the slices of texts to embed.
        budget: as above.
    """

    def __init__(
        self,
        model: int,
        *,
        client: int = 0,
        max_rows: int,
        pace: Pace,
        facts: TextFacts,
        embed: EmbedFacts | None = None,
        budget: MemoryBudget | None = None,
    ) -> None:
        self._tokens = 0  # that were delivered
        self._model = model
        self._facts = facts
        self._pace = pace
        self._max_rows = max_rows if facts.batched else 1
        self._index = PromptIndex(facts.prompt_cache_bytes, cuts=facts.cuts)
        proposer = make_proposer(facts)
        proposed = 0 if proposer is None else MOST
        self._groups = Groups(facts, self._max_rows, proposed)
        self._queue = PromptQueue(facts, self._index, self._groups)
        embed = EmbedFacts(slices=True) if embed is None else embed
        texts = TextQueue(slices=embed.slices, most=pace.most)
        self._spans = SpanMaker(facts, pace, self._queue, self._index)
        self._speculation = None if proposer is None else Speculation(proposer)
        self.budget = MemoryBudget() if budget is None else budget
        self._events = self.budget.events
        self._store: StoreSchedule | None = None
        if facts.store is not None:
            self._store = StoreSchedule(model, facts, pace, self._index, self._queue)
        self._book = RowBook(
            model,
            client,
            self._index,
            self._queue,
            texts,
            self._groups,
            self.budget.numbers,
            self._events,
            self._store,
            proposer,
        )
        self.memory = RowMemory(facts, embed, pace.most, self._book)
        self.budget.register(self.memory)
        self.embeddings = EmbedSchedule(model, embed, pace, self.budget, self.memory, self._book)
        # Of the plan under way.
        self._slice: list[Reading] = []
        self._slice_beside_steps = False
        self._stepped: float | None = None  # when the last step ended, if rows are the same since
        self._plain = True  # nothing was proposed in it

    # What there is.

    @property
    def streaming(self) -> bool:
        """Whether rows are being decoded."""
        return self._groups.count > 0

    @property
    def pending(self) -> bool:
        """Whether there is something to read, or to be read when there is memory: prompts, or texts
        of rows without a KV cache."""
        return bool(self._queue) or self._book.waits

    @property
    def idle(self) -> bool:
        """Whether a plan would be empty: there are no rows, or all wait for memory."""
        waits = self._book.waits or self._book.texts.large is not None
        return self._book.settled and not (waits and self.budget.admits_more)

    def statistics(self) -> dict[str, int]:
        return {
            "rows": self._groups.count,
            "groups": len(self._groups),
            "reading": self._queue.rows,
            "waiting": len(self._queue.waiting),
            "waiting_for_memory": self._book.short,
            **({} if self._speculation is None else self._speculation.counters()),
            **self.memory.counters(),
            **({} if self._store is None else self._store.counters()),
            "prompt_cache_bytes": self._index.bytes,
            "prompt_cache_entries": len(self._index),
            "tokens": self._tokens,
        }

    # Jobs.

    def submit(self, job: Job) -> None:
        """Take a job. Raises ValueError or OverflowError if it cannot be."""
        if job.texts:
            self.embeddings.check(job)
        self._book.enqueue(job)

    def cancel(self, job_ids: Collection[int]) -> None:
        """Free the rows of these jobs, at whatever stage they are."""
        self._book.cancel(job_ids)

    def end_all(self, reason: str) -> list[WorkItem]:
        """End every job, since the model is unloaded. Returns the model's last work items. With
        `--prompt-cache-dir` these write the cached prompts to disk."""
        self.budget.unregister(self.memory)
        return self._book.end_all(reason)

    def note_report(self, order: StorageReport) -> None:
        """Take a report of the storage thread."""
        if self._store is not None:
            self._store.note_report(order)

    def fail(self, reason: str) -> list[Failed]:
        """End every job, since the model is unloaded. Nothing is planned for them any more."""
        self.budget.unregister(self.memory)
        return self._book.fail_all(reason)

    def watch(self, *, active: bool) -> None:
        """Note whether activations are looked at from now on."""
        self._queue.watched = active

    # Planning.

    def plan_rows(self) -> list[WorkItem]:
        """The work items that admit and free rows, and drop cached prompts. They come first in a
        round, and before whatever changes the steering that rows ask for."""
        return self._book.plan_changes()

    def plan_steps(self) -> list[WorkItem]:
        """One step of all rows, and one of a suspect."""
        items: list[WorkItem] = []
        if self._groups.count:
            if (groups := self._groups.take_changed()) is not None:
                self._stepped = None
            # Proposals are in the order that the rows have in this step.
            proposals = self._propose()
            items.append(Decode(model=self._model, groups=groups, proposals=proposals))
        if (tried := self._queue.tried) is not None:
            items.append(Decode(model=self._model, suspect=tried.rows[0].id))
        return items

    def plan_slice(self, *, beside: bool) -> WorkItem | None:
        """One slice of prompts, a shorter one if `beside` (other models have streams);
        or of the text that the proposer has to read."""
        if not self._choose_readings(beside):
            return self._plan_draft()
        self._slice_beside_steps = decoding = self.streaming
        spans = self._spans.make(self._slice, decoding=decoding, beside=beside)
        return Read(model=self._model, spans=spans)

    def _choose_readings(self, beside: bool) -> bool:
        """Choose the texts of the next slice. Returns whether there are any."""
        self._slice = []
        queue = self._queue
        if queue and (free := self._book.free) + queue.rows > 0:
            limit = self._pace.limit(decoding=self.streaming, long=False, beside=beside)
            self._slice = queue.choose(free, limit)
        return bool(self._slice)

    def _propose(self) -> tuple[Proposal, ...]:
        """Find what is proposed to the rows in the next step."""
        if self._speculation is None:
            return ()
        return self._speculation.propose(self._find_proposable())

    def _find_proposable(self) -> Sequence[Row]:
        """All rows, if one pass verifies what is proposed to them, no prompt waits for one of them
        to end, and no activations are watched; else none."""
        together = self._facts.shares or len(self._groups) == 1
        waited = self._max_rows > 1 and self.pending
        free = together and not (waited or self._queue.watched)
        return self._groups.rows if free else ()

    def _plan_draft(self) -> WorkItem | None:
        """Have the proposer read a slice of a row's text, if it lacks much of it."""
        if self._speculation is None or not self._speculation.proposer.computes:
            return None
        limit = self._pace.limit(decoding=True, long=True)
        part = self._speculation.plan_reading(self._find_proposable(), limit)
        if part is None:
            return None
        row, begin, tokens = part
        return ReadDraft(model=self._model, row=row.id, begin=begin, tokens=tokens)

    # Outcomes.

    def settle(self, work: WorkItem, outcome: Outcome) -> None:
        """Take the outcome of a work item of this model."""
        match work:
            case Decode():
                self._settle_step(work, outcome)
            case Read():
                self._settle_slice(work, outcome)
            case EmbedSlice():
                self.embeddings.settle(work, outcome)
            case Admit():
                self._book.settle_admission(work, outcome)
            case Release():
                self._settle_release(work, outcome)
            case ReadDraft():
                self._settle_draft(work, outcome)
            case _ if self._store is not None:
                self._store.settle(work, outcome)

    def _settle_release(self, work: Release, outcome: Outcome) -> None:
        self._book.settle_release(work, outcome)
        if outcome.fault is not None:  # KV caches may be half changed
            self._lose(self._groups.rows, outcome.fault, certain=False)

    def _settle_draft(self, work: ReadDraft, outcome: Outcome) -> None:
        self._stepped = None  # the next step waits for the draft, which is not its own time
        if self._speculation is None:
            return
        if outcome.fault is not None:
            self._give_up_speculation()
            return
        self._speculation.saw_reading(self._book.find(work.row), work.begin, work.tokens, outcome)

    def _give_up_speculation(self) -> None:
        _log.warning("the draft model may be to blame, and is no longer used")
        self._book.proposer = self._speculation = None

    # A slice of prompts.

    def _settle_slice(self, work: Read, outcome: Outcome) -> None:
        readings, self._slice = self._slice, []
        for reading in readings:  # rows that could not be admitted have left meanwhile
            reading.rows = [row for row in reading.rows if not row.ended]
        done = outcome.done if isinstance(outcome.done, PromptsRead) else PromptsRead()
        self._index.confirm([span.keep for span in work.spans], done.kept)
        if outcome.fault is not None:
            self._read_again(work, readings, outcome.fault)
            return
        tokens = 0
        for reading, span in zip(readings, work.spans, strict=True):
            tokens += span.end - span.begin if reading.rows else 0  # or nothing was read
            reading.began = reading.began if reading.opened else outcome.began
            reading.done, reading.opened = span.end, True
            for row in reading.rows:
                if not row.read:
                    row.tokens_read = reading.done - reading.cached
        self._pace.saw_slice(tokens, outcome.seconds, decoding=self._slice_beside_steps)
        self._events += self._book.find_unreported(done.activations)
        if done.broken:
            self._book.fail_all_broken(done.broken)
            for reading in readings:
                reading.rows = [row for row in reading.rows if not row.ended]
        if work.spans[0].joins is not None:
            self.memory.note_joining(readings)
            self._join(readings, outcome.ended, done)
        moved = [*self._queue.partly_read, *self._queue.preempted]
        self._events += [Progress(row.id) for row in moved]

    def _join(self, readings: Sequence[Reading], ended: float, done: PromptsRead) -> None:
        """Have the rows of these prompts decoded from the next step on."""
        group: list[Row] = []
        for reading in readings:
            self._queue.finish_reading(reading)
            seconds = ended - reading.began
            for row in reading.rows:
                if not row.read:
                    self._events.append(PromptRead(row.id, reading.cached, seconds))
                row.read = True
                if row.job.max_tokens > 0:
                    row.enter(RowState.FRESH)
                    group.append(row)
        if done.scores is not None and self._book.find(done.scores.job) is not None:
            self._events.append(done.scores)
        for reading in readings:
            for row in [row for row in reading.rows if row.job.max_tokens == 0]:
                self._events.append(Finished(row.id))
                self._book.end(row)
        if group:
            self._groups.join(group)

    def _read_again(self, work: Read, readings: Sequence[Reading], fault: Fault) -> None:
        incident = self._note(fault)
        for span in work.spans:
            if span.source is not None:  # it may be to blame, so the texts are read without it
                self._index.drop(span.source)
        copied = any(reading.cached and not reading.opened for reading in readings)
        held = [self._book.find(span.from_row) for span in work.spans if span.from_row is not None]
        # What another row held may have been lost in this round, which counts against nobody.
        incident.explained |= any(row is None or row.waits for row in held)
        self._queue.abandon(readings)
        for reading in readings:
            reading.restart()
        rows = [row for reading in readings for row in reading.rows]
        certain = len(readings) == 1 and not copied
        self._queue.put_back(self._end_guilty(rows, incident, certain=certain))

    # A step.

    def _settle_step(self, work: Decode, outcome: Outcome) -> None:
        # A step that failed outside of the decoder has no results.
        done = outcome.done if isinstance(outcome.done, Decoded) else Decoded()
        # Those of the step before, in which there were rows that have ended since.
        find = self._book.find
        self._events += [each for each in done.activations if find(each.job) is not None]
        if work.suspect is not None and (tried := self._queue.tried) is not None:
            for _, token in done.tokens:
                tried.append(token)
        ended = self._take_tokens(done, kept=outcome.fault is None)
        self.memory.note_step()
        if outcome.fault is None:
            self._start_fresh(work)
        self._book.fail_all_broken(done.broken)
        for failure in done.failures:
            if (row := self._book.find(failure.row)) is not None:
                self._book.fail(row, failure.reason, failure.clear, kept=outcome.fault is None)
        before, self._stepped = self._stepped, None
        if outcome.fault is not None:
            self._lose_step(work, outcome.fault)
        elif work.suspect is None:
            self._time_step(work, outcome, before)
        if self._book.fitting < self._max_rows:
            self._book.widen(ended, busy=self.streaming or self.pending)

    def _take_tokens(self, done: Decoded, *, kept: bool) -> int:
        """Give the rows their tokens. Returns how many rows have ended with theirs; their KV caches
        may be `kept`."""
        ended = 0
        rows, events, likelihoods = self._book.rows, self._events, done.likelihoods
        known = len(events)
        for job_id, token in done.tokens:
            row = rows.get(job_id)
            if row is None:  # it ended with a token before, in the same round
                continue
            finish = row.draw(token)
            events.append(Token(job_id, token, finish, likelihoods.get(job_id)))
            if finish is not None:
                ended += 1
                self._book.end(row, kept=kept)
        self._tokens += len(events) - known
        return ended

    def _start_fresh(self, work: Decode) -> None:
        """Note that rows have made their first step."""
        if work.groups is None:
            return
        fresh = RowState.FRESH
        for row in self._groups.rows:
            if row.state is fresh:
                row.enter(RowState.DECODING)

    def _time_step(self, work: Decode, outcome: Outcome, before: float | None) -> None:
        """Learn from what a step of all rows took since the step `before` ended."""
        plain, self._plain = self._plain, not work.proposals
        if self._plain:
            self._pace.saw_step(outcome.ended - before if plain and before is not None else None)
        self._stepped = outcome.ended
        if self._speculation is not None:
            self._speculation.saw_step(outcome, before, plain=plain)

    def _lose_step(self, work: Decode, fault: Fault) -> None:
        """Have the rows of a step that failed read anew."""
        rows = self._groups.rows
        if work.suspect is not None:
            suspect = self._book.find(work.suspect)  # None: its constraint has failed, too
            rows = () if suspect is None else (suspect,)
        if self._speculation is not None and work.suspect is None:
            self._speculation.saw_fault()
            if work.proposals and self._speculation.proposer.computes:
                self._give_up_speculation()
        self._lose(rows, fault, certain=len(rows) == 1 and not work.proposals)

    def _lose(self, rows: Sequence[Row], fault: Fault, *, certain: bool) -> None:
        """Preempt rows that have lost their KV caches in a fault, which are suspects then.

        Args:
            rows: all rows of the work item that failed.
            fault: of it.
            certain: nothing but one of the rows can have caused it.
        """
        for row in self._end_guilty(rows, self._note(fault), certain=certain):
            suspect_row(row)
            self._book.preempt(row)
        if fault.memory and rows:
            self._book.shrink(max(len(rows) // 2, self._groups.count))

    def _end_guilty(self, rows: Sequence[Row], incident: Incident, *, certain: bool) -> list[Row]:
        """End the rows of a work item that failed that are to blame. Returns the others."""
        for row in find_guilty(rows, incident, certain=certain):
            self._events.append(blame(row))
            self._book.end(row, kept=False)
        return [row for row in rows if not row.ended]

    def _note(self, fault: Fault) -> Incident:
        self._book.short_of_memory |= fault.memory
        return Incident(fault)
