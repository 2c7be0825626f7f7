"""The texts of one model that a slice reads, and how many tokens of them.

- Beside running streams a slice is as long as they can bear: see Pace. Otherwise it takes at most a
  quarter of a second, for a stream may begin at any moment.
- A decoder reads a text that does not fit a slice in several. An encoder looks both ways and reads
  any text whole.
- What texts take of the memory budget, and which of them wait for it: see `embed_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from mlxsrv.engine.events import Embedded, Event, Failed, Progress, Shortage, Started
from mlxsrv.engine.orders import Embed
from mlxsrv.engine.outcomes import EmbedFacts, Outcome, TextsRead
from mlxsrv.engine.plans import AdmitTexts, EmbedSlice, ReleaseTexts, TextSpan
from mlxsrv.engine.scheduling.embed_memory import EmbedMemory
from mlxsrv.engine.scheduling.job_line import JobLine
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.text_queue import QueuedText, TextQueue

_SECONDS = 0.25  # of a slice while nothing streams: how long a new request may have to wait
_MOST_TOKENS = 16 * 1024  # of a slice, padding included; the layers' memory grows with it
_MOST_WHOLE = 4096  # tokens of one text; attention's memory grows with their square
_BESIDE = 4  # many slices in a row may take one part in so many of other models' gaps
_UNBOUNDED = 1 << 30  # slots
_LEAST = 16  # tokens; a slice of fewer would cost a whole pass for next to nothing


class EmbedSchedule:
    """The texts that one model has to embed.

    In each round come first the work items of `take_changes`, and then the slice of `plan`. Each
    outcome comes back through `settle` before the next slice is planned.

    Args:
        model: its number.
        facts: what it can do.
        pace: how long a slice may be beside streams; shared with the prompts of the same model.
        budget: of the client; without bounds, unless given.
        line: of the model; its own, in which nobody waits, unless given.
    """

    def __init__(
        self,
        model: int,
        facts: EmbedFacts,
        pace: Pace,
        budget: MemoryBudget | None = None,
        line: JobLine | None = None,
    ) -> None:
        self._model = model
        self._facts = facts
        self._pace = pace
        self.budget = MemoryBudget() if budget is None else budget
        self._line = JobLine(_UNBOUNDED, self.budget.numbers) if line is None else line
        self._queued: dict[int, Embed] = {}  # jobs that stand in the line
        self._queue = TextQueue(slices=facts.slices, most=pace.most)
        self._memory = EmbedMemory(facts, pace.most, self._queue, self._refuse)
        self.budget.register_texts(self._memory)
        self._admissions: dict[int, Embed] = {}  # by job; the runner does not have them yet
        self._releases: list[int] = []  # jobs that ended, which the runner still has
        # The streams that there were when the last slice was planned.
        self._decoding = self._beside = False
        self._rate: float | None = None  # tokens a second, padding included

    @property
    def idle(self) -> bool:
        """Whether there is nothing to plan: no texts that can be read now, and nothing for the
        runner to admit or to free."""
        if self._queue.ready or self._admissions or self._releases:
            return False
        return not (self._queue.jobs and self._memory.waits and self.budget.admits_more)

    @property
    def pending(self) -> bool:
        """Whether there are texts that can be read now."""
        return self._queue.ready

    def statistics(self) -> dict[str, int]:
        queued = sum(len(order.texts) for order in self._queued.values())
        return {"texts": queued + len(self._queue)}

    @property
    def reading_bytes(self) -> int:
        """Bytes of texts that are large, or are read in several slices."""
        return self._memory.held

    # Jobs.

    def submit(self, order: Embed) -> None:
        """Take the job. Raises ValueError if the model cannot do it."""
        self._check(order)
        self._queued[order.id] = order
        self._line.join_texts(order.id, order.turn, partial(self._begin, order.id))

    def _begin(self, job: int) -> None:
        """Queue the texts of a job whose turn it is."""
        order = self._queued.pop(job)
        self._queue.add(order, next(self.budget.numbers))
        self._admissions[job] = order
        self.budget.events.append(Started(job))

    def _check(self, order: Embed) -> None:
        if order.id in self._queued or order.id in self._queue.jobs:
            raise ValueError("there is a job of this id")
        if not order.texts or not all(order.texts):
            raise ValueError("there are no texts, or one of them has no tokens")
        # Now and not in a slice, where an error would fail the other jobs with texts in it.
        most, bound = max(map(len, order.texts)), self._facts.longest
        if bound is not None and most > bound:
            raise ValueError(f"a text of {most} tokens is too long: this model reads {bound}")
        if self._facts.labels:
            if len(order.firsts) != len(order.texts):
                raise ValueError("this model judges pairs of texts and makes no vectors")
        elif order.firsts:
            raise ValueError("this model makes vectors and does not judge pairs of texts")

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Forget these jobs; ids of other jobs are ignored."""
        for job in job_ids:  # one that leaves may let the next one begin
            if job in self._queued:
                del self._queued[job]
                self._line.leave(job)
        self._drop(job_ids)

    def fail(self) -> list[int]:
        """Forget all jobs, since the model is unloaded. Returns their ids; nothing is planned for
        them."""
        jobs = [*self._queued, *self._queue.jobs]
        self._queued.clear()
        self._queue.remove(jobs)
        self.budget.unregister_texts(self._memory)
        return jobs

    def _refuse(self, job: int, shortage: Shortage) -> None:
        """End a job with a text that does not fit into memory."""
        self._drop([job])
        self.budget.events.append(Failed(job, shortage.message, shortage=shortage))

    def _drop(self, job_ids: Iterable[int]) -> list[int]:
        """Forget jobs that the runner is to forget as well. Returns their ids."""
        dropped = self._remove(job_ids)
        for job in dropped:
            if self._admissions.pop(job, None) is None:
                self._releases.append(job)
        return dropped

    def _remove(self, job_ids: Iterable[int]) -> list[int]:
        """Take jobs that have ended out of the queue, and give their slots back. Returns those that
        were there."""
        tokens = {job: self._queue.jobs[job].tokens for job in job_ids if job in self._queue.jobs}
        for job, read in tokens.items():
            self._line.leave(job, read)
        return self._queue.remove(tokens)

    # Planning.

    def take_changes(self) -> list[AdmitTexts | ReleaseTexts]:
        """The work items that admit and free the jobs that came and ended since the last call. They
        come before the next slice."""
        releases, self._releases = self._releases, []
        admissions, self._admissions = self._admissions, {}
        items: list[AdmitTexts | ReleaseTexts] = []
        if releases:
            items.append(ReleaseTexts(model=self._model, jobs=tuple(releases)))
        items += [AdmitTexts(model=self._model, order=order) for order in admissions.values()]
        return items

    def plan(self, *, decoding: bool, beside: bool) -> EmbedSlice | None:
        """The next slice; None if there are no texts that can be read now.

        Args:
            decoding: the model has streams.
            beside: other models have streams.
        """
        if not self.pending:
            return None
        self._decoding, self._beside = decoding, beside
        limit, most = self._limit()
        parts = [(text, 0, text.length) for text in self._choose(limit, most)]
        if not parts:
            parts = [self._queue.read_on(self._fit_part(limit))]
        return EmbedSlice(
            model=self._model,
            texts=tuple(TextSpan(text.job, text.place, begin, end) for text, begin, end in parts),
            completes=self._count_off(text.job for text, _, end in parts if end == text.length),
        )

    def _choose(self, limit: int, most: int) -> list[QueuedText]:
        """Take whole texts for the next slice; none if the slice belongs to the long text."""
        slice, before = self._pace.most, self._queue.long
        if before is None and self._memory.measure(slice) > self.budget.free:
            limit = slice  # in several slices a text would take memory that is not there
        found = self._queue.choose(limit, most)
        if before is None and (long := self._queue.long) is not None and long.length <= slice:
            self.budget.reserve(self._memory.measure(long.length))
        return found

    def _limit(self) -> tuple[int, int]:
        """The most tokens of one text, and of a slice with its padding."""
        decoding, beside = self._decoding, self._beside
        limit = self._pace.limit(decoding=decoding, long=False, beside=beside)
        if not (decoding or beside):
            fitting = 0 if self._rate is None else int(_SECONDS * self._rate)
            most = max(limit, min(fitting, _MOST_TOKENS))
            most = self._memory.fit_pass(most, limit, self.budget.free)
            return min(most, _MOST_WHOLE), most
        if self._queue.begun or self._queue.tokens > limit:
            # It takes many slices, and streams must not be slow all that time.
            limit = self._pace.limit(decoding=decoding, long=True, beside=beside)
            limit = limit if decoding else max(_LEAST, limit // _BESIDE)
        return limit, limit

    def _fit_part(self, limit: int) -> int:
        """The tokens of the next part of the long text: so many, as far as there is room. They
        attend to all before them, so a later part needs more."""
        end = min(self._queue.long_done + limit, self._queue.begun[0].length)
        return self._memory.fit_pass(limit, end, self.budget.free)

    def _count_off(self, ended: Iterable[int]) -> tuple[int, ...]:
        """Note that a slice takes a text of each of these jobs to its end. Returns those that have
        no other text left."""
        complete: list[int] = []
        for job in ended:
            texts = self._queue.jobs[job]
            texts.missing -= 1
            if not texts.missing:
                complete.append(job)
        return tuple(complete)

    # Outcomes.

    def settle(self, work: AdmitTexts | EmbedSlice | ReleaseTexts, outcome: Outcome) -> list[Event]:
        """Learn from the outcome of a work. Returns the events of the jobs that it ended or brought
        on: a fault ends all jobs of the work."""
        if outcome.fault is not None:
            reason = outcome.fault.reason
            return [Failed(job, reason) for job in self._drop(_list_jobs(work))]
        if isinstance(work, EmbedSlice):
            assert isinstance(outcome.done, TextsRead)
            events = self._complete(work.completes, outcome.done)
            if outcome.done.tokens:  # or the jobs were not admitted
                self._learn(outcome.done.tokens, outcome.seconds)
                # Of all others: each slice brings each job's turn nearer.
                events += [Progress(job) for job in self._queue.jobs]
            return events
        return []

    def _learn(self, tokens: int, seconds: float) -> None:
        self._pace.saw_slice(tokens, seconds, decoding=self._decoding)
        if not (self._decoding or self._beside):
            self._rate = tokens / max(seconds, 1e-6)

    def _complete(self, jobs: Iterable[int], done: TextsRead) -> list[Event]:
        # The runner has forgotten them. A job that ended meanwhile is not in the queue.
        left = [job for job in jobs if job in self._queue.jobs]
        events: list[Event] = [Embedded(job, done.vectors[job]) for job in left]
        self._remove(left)
        return events


def _list_jobs(work: AdmitTexts | EmbedSlice | ReleaseTexts) -> Sequence[int]:
    match work:
        case AdmitTexts():
            return (work.order.id,)
        case EmbedSlice():
            return [text.job for text in work.texts]
        case ReleaseTexts():
            return work.jobs
