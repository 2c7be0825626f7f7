"""The texts of one model that a slice embeds, and how many tokens of them.

- Beside running streams a slice is as long as they can bear: see Pace. Otherwise it takes at most a
  quarter of a second, for a stream may begin at any moment.
- A decoder reads a text that does not fit a slice in several, into a KV cache of its own. Where
  there is no memory for that, it reads a text whole that a slice of a prompt could have. An encoder
  looks both ways and reads any text whole.
- Many small texts share a pass of as many tokens as there is memory for: see `row_memory`. Which
  texts share one: see `text_queue`.
"""

from __future__ import annotations

from mlxsrv.engine.events import Embedded, Progress
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import EmbedFacts, Outcome, TextsRead
from mlxsrv.engine.plans import EmbedSlice, TextSpan
from mlxsrv.engine.scheduling.memory_budget import MemoryBudget
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.scheduling.row_book import RowBook
from mlxsrv.engine.scheduling.row_memory import RowMemory
from mlxsrv.engine.scheduling.text_queue import QueuedText

_SECONDS = 0.25  # of a slice while nothing streams: how long a new request may have to wait
_MOST_TOKENS = 16 * 1024  # of a slice, padding included; the layers' memory grows with it
_MOST_WHOLE = 4096  # tokens of one text; attention's memory grows with their square
_BESIDE = 4  # many slices in a row may take one part in so many of other models' gaps
_LEAST = 16  # tokens; a slice of fewer would cost a whole pass for next to nothing


class EmbedSchedule:
    """Plans the slices of texts of one model.

    Args:
        model: its number.
        facts: what it can do.
        pace: how long a slice may be beside streams; shared with the prompts of the same model.
        budget: of the client.
        memory: what the texts take of it.
        book: has the rows, and their texts.
    """

    def __init__(
        self,
        model: int,
        facts: EmbedFacts,
        pace: Pace,
        budget: MemoryBudget,
        memory: RowMemory,
        book: RowBook,
    ) -> None:
        self._model = model
        self._facts = facts
        self._pace = pace
        self._budget = budget
        self._memory = memory
        self._book = book
        self._queue = book.texts
        # The streams that there were when the last slice was planned.
        self._decoding = self._beside = False
        self._rate: float | None = None  # tokens a second, padding included

    @property
    def pending(self) -> bool:
        """Whether there are texts that can be read now."""
        return self._queue.ready

    def check(self, job: Job) -> None:
        """Raise ValueError if the model cannot embed the job's texts. Now and not in a slice, where
        an error would fail the other jobs with texts in it."""
        if not all(job.texts):
            raise ValueError("one of the texts has no tokens")
        most, bound = max(map(len, job.texts)), self._facts.longest
        if bound is not None and most > bound:
            raise ValueError(f"a text of {most} tokens is too long: this model reads {bound}")
        if self._facts.labels:
            if len(job.firsts) != len(job.texts):
                raise ValueError("this model judges pairs of texts and makes no vectors")
        elif job.firsts:
            raise ValueError("this model makes vectors and does not judge pairs of texts")

    # Planning.

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
        spans = tuple(TextSpan(text.job, text.place, begin, end) for text, begin, end in parts)
        complete = self._queue.count_off(text for text, _, end in parts if end == text.length)
        return EmbedSlice(model=self._model, texts=spans, completes=complete)

    def _choose(self, limit: int, most: int) -> list[QueuedText]:
        """Take whole texts for the next slice; none if the slice belongs to the long text."""
        slice, before = self._pace.most, self._queue.long
        if before is None and self._memory.measure_embedded(slice) > self._budget.free:
            limit = slice  # in several slices a text would take memory that is not there
        found = self._queue.choose(limit, most)
        if before is None and (long := self._queue.long) is not None and long.length <= slice:
            self._budget.reserve(self._memory.measure_embedded(long.length))
        return found

    def _limit(self) -> tuple[int, int]:
        """The most tokens of one text, and of a slice with its padding."""
        decoding, beside = self._decoding, self._beside
        limit = self._pace.limit(decoding=decoding, long=False, beside=beside)
        if not (decoding or beside):
            fitting = 0 if self._rate is None else int(_SECONDS * self._rate)
            most = self._fit_pass(max(limit, min(fitting, _MOST_TOKENS)), limit)
            return min(most, _MOST_WHOLE), most
        if self._queue.begun or self._queue.tokens > limit:
            # It takes many slices, and streams must not be slow all that time.
            limit = self._pace.limit(decoding=decoding, long=True, beside=beside)
            limit = limit if decoding else max(_LEAST, limit // _BESIDE)
        return limit, limit

    def _fit_part(self, limit: int) -> int:
        """The tokens of the next part of the long text: so many, as far as there is room. They
        attend to all before them, so a later part needs more."""
        return self._fit_pass(
            limit, min(self._queue.long_done + limit, self._queue.begun[0].length)
        )

    def _fit_pass(self, tokens: int, longest: int) -> int:
        """The most tokens of a pass for which there is room: those of a slice of a prompt at least.

        Args:
            tokens: as many as are wanted.
            longest: tokens that its texts have at most.
        """
        each = self._facts.pass_bytes(1, longest)
        return min(tokens, self._pace.most + max(self._budget.free, 0) // each) if each else tokens

    # Outcomes.

    def settle(self, work: EmbedSlice, outcome: Outcome) -> None:
        """Learn from the outcome of a slice, and end the jobs that it has completed; a fault ends
        all jobs of the slice."""
        found = {text.job: self._book.find(text.job) for text in work.texts}
        rows = [row for row in found.values() if row is not None]
        if outcome.fault is not None:
            for row in rows:
                self._book.fail(row, outcome.fault.reason)
            return
        assert isinstance(outcome.done, TextsRead)
        for text in work.texts:
            if (reader := found[text.job]) is not None:
                reader.tokens_read += text.end - text.begin
        for row in rows:
            if row.id in work.completes:
                self._budget.events.append(Embedded(row.id, outcome.done.vectors[row.id]))
                self._book.end(row)
        if outcome.done.tokens:  # or the jobs were not admitted
            self._learn(outcome.done.tokens, outcome.seconds)
            # Of all others: each slice brings each job's turn nearer.
            self._budget.events += [Progress(job) for job in self._queue.jobs]

    def _learn(self, tokens: int, seconds: float) -> None:
        self._pace.saw_slice(tokens, seconds, decoding=self._decoding)
        if not (self._decoding or self._beside):
            self._rate = tokens / max(seconds, 1e-6)
