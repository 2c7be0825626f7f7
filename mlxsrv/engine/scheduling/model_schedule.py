"""The work items of a round for one model, and what becomes of its jobs after an error."""

from __future__ import annotations

from mlxsrv.engine.events import Embedded, Failed, Finished, Token
from mlxsrv.engine.faults import note
from mlxsrv.engine.orders import Job, Load
from mlxsrv.engine.outcomes import EmbedFacts, Outcome, TextFacts, Watched
from mlxsrv.engine.plans import DetachSAE, Reset, WatchFeatures, WorkItem
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.text_schedule import TextSchedule

_NO_TEXT = "this model does not generate text"
_ENCODER = TextFacts(
    batched=True, cuts=True, pads=True, padding=0, vocabulary=0, prompt_cache_bytes=0
)
"""The facts of a model whose jobs are texts to embed only."""


class ModelSchedule:
    """One model that is loaded.

    Args:
        number: the model's.
        client: the number of the client that it belongs to.
        order: the load's.
        text: of the model; None for an encoder.
        embed: of the model.
        budget: of the client; without bounds, unless given.

    Attributes:
        rows: the schedule of its rows.
    """

    def __init__(
        self,
        number: int,
        client: int,
        order: Load,
        text: TextFacts | None,
        embed: EmbedFacts,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.number = number
        self.client = client
        self.name = order.model
        self._order = order
        self._facts = text, embed
        self._budget = MemoryBudget() if budget is None else budget
        self._events = self._budget.events
        self._watched = False
        self._reset = False  # the runner is to forget what it has of jobs that are forgotten here
        self._start()

    def _start(self) -> None:
        text, embed = self._facts
        self.rows = TextSchedule(
            self.number,
            client=self.client,
            max_rows=self._order.max_rows,
            pace=Pace(self._order.prefill_chunk, self._order.max_gap),
            facts=_ENCODER if text is None else text,
            embed=embed,
            budget=self._budget,
        )
        self.rows.watch(active=self._watched)
        self._texts_are_next = False

    @property
    def generates(self) -> bool:
        """Whether it generates text."""
        text, _ = self._facts
        return text is not None

    @property
    def idle(self) -> bool:
        """Whether a plan would be empty."""
        return self.rows.idle and not self._reset

    def statistics(self) -> dict[str, int]:
        """In numbers, as `/health` lists them."""
        book = self.rows.memory.book
        return {"texts": book.count_texts(), "queued": len(book.line)} | self.rows.statistics()

    # Jobs.

    def submit(self, job: Job) -> None:
        """Take a job. Raises ValueError or OverflowError if the model cannot do it."""
        if not (self.generates or job.texts):
            raise ValueError(_NO_TEXT)
        self.rows.submit(job)

    def end_all(self, reason: str) -> list[WorkItem]:
        """End all jobs, since the model is unloaded. Returns the last work items."""
        if self._reset:  # what the runner has is of no use any more
            self._events += self.rows.fail(reason)
            return []
        return self.rows.end_all(reason)

    def contain(self, error: Exception) -> None:
        """End the jobs of this model only, after an error in deciding for it."""
        fault = note(error, f"deciding for model {self.name!r} failed: all its jobs end")
        self.begin_anew(fault.reason)

    def begin_anew(self, reason: str) -> None:
        """End all jobs and forget all that was decided, after an error in deciding.

        With the next plan the runner forgets its part. Outcomes of work items that were planned
        before are ignored.
        """
        ended = {
            event.job
            for event in self._events
            if isinstance(event, (Embedded, Failed, Finished))
            or (isinstance(event, Token) and event.finish is not None)
        }
        self._events += [event for event in self.rows.fail(reason) if event.job not in ended]
        self._reset = True
        self._start()

    def watch(self, *, active: bool) -> None:
        """Note whether activations are looked at from now on."""
        self._watched = active
        self.rows.watch(active=active)

    # Planning.

    def plan_reset(self) -> list[WorkItem]:
        """Have the runner forget what it has of jobs that are forgotten here."""
        if not self._reset:
            return []
        self._reset = False
        return [Reset(model=self.number)]

    def plan_rows(self) -> list[WorkItem]:
        """The same, as far as rows are concerned: asked for early, when an order is about to change
        steering."""
        return [*self.plan_reset(), *self.rows.plan_rows()]

    def plan_changes(self) -> list[WorkItem]:
        """The work items that admit and free rows, and drop cached prompts."""
        items = self.plan_reset()
        # Where all is idle nothing is decided, so nothing can go wrong again and again.
        if not self.rows.idle:
            items += self.rows.plan_rows()
        return items

    def plan(self, *, beside: bool) -> list[WorkItem]:
        """The other work items of a round. `beside`: other models have streams."""
        if self.idle:
            return []
        rows, items = self.rows, self.rows.plan_steps()
        prompts, texts = self._choose(beside=beside)
        if prompts and (work := rows.plan_slice(beside=beside)) is not None:
            items.append(work)
        slice = rows.embeddings.plan(decoding=rows.streaming, beside=beside) if texts else None
        return items if slice is None else [*items, slice]

    def _choose(self, *, beside: bool) -> tuple[bool, bool]:
        """Whether a slice of prompts is read, and one of texts: both, if there are texts. But while
        there are streams they take turns, since a slice of each may fill the streams' gap."""
        texts = self.rows.embeddings.pending
        both = texts and self.rows.pending
        if not both or not (beside or self.rows.streaming):
            return True, texts
        self._texts_are_next = not self._texts_are_next
        return not self._texts_are_next, self._texts_are_next

    def settle(self, work: WorkItem, outcome: Outcome) -> None:
        """Take the outcome of a work item."""
        if isinstance(work, (WatchFeatures, DetachSAE)):
            self.watch(active=isinstance(outcome.done, Watched) and outcome.done.active)
            return
        if self._reset or isinstance(work, Reset):
            return
        self.rows.settle(work, outcome)
