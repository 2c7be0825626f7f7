"""The queue of texts to embed: which of them share the next slice.

A slice holds texts of similar length, of any job, so that little of it is padding. Each slice
starts from the longest text of the next job in turn, so a job of many texts does not hold up a job
of few.

Large texts wait apart until there is memory for one, and jobs take turns with them as well: see
`embed_memory`. Then it is the long text, as soon as there is no other.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mlxsrv.engine.orders import Embed

_MOST_PADDED = 1.25  # tokens of a slice, padding included, for each real one


class QueuedText(NamedTuple):
    """One text that waits. Sorted by length first."""

    length: int
    job: int
    """The id of its job."""
    place: int
    """The text's place in its job."""


class QueuedTexts:
    """The texts of one job.

    Args:
        order: the job.
        number: of the job, among all that came.
        most: tokens; texts of more are large.

    Attributes:
        waiting: those that no slice has taken, the shortest first; perhaps some that one has.
        large: those that are large, the longest first.
        missing: how many no slice has taken to their ends.
        tokens: of all of them.
    """

    def __init__(self, order: Embed, number: int, most: int) -> None:
        texts = sorted(QueuedText(len(text), order.id, i) for i, text in enumerate(order.texts))
        large = bisect_left(texts, (most + 1,))
        self.number = number
        self.waiting = texts[:large]
        self.large = texts[large:][::-1]
        self.missing = len(order.texts)
        self.tokens = sum(text.length for text in texts)


class TextQueue:
    """The texts of all jobs of one model.

    Args:
        slices: a text that does not fit a slice is read in several slices. One such text at a time:
            it is `long`.
        most: tokens; texts of more are large.
    """

    def __init__(self, *, slices: bool, most: int) -> None:
        self.jobs: dict[int, QueuedTexts] = {}
        """By id, in the order of arrival."""
        self.tokens = 0
        """Tokens of all texts that wait, but for large ones."""
        self.begun: list[QueuedText] = []
        """The long text, and perhaps a large one that is the long one next."""
        self.long_done = 0
        """Tokens of the long text that were taken."""
        self._most = most
        self._slices = slices
        self._turns: deque[int] = deque()  # ids of the jobs, in turn
        self._large: deque[int] = deque()  # ids of the jobs that have large texts, in turn
        self._waiting: list[QueuedText] = []  # of all jobs, the shortest first
        self._long_is_next = False

    def __len__(self) -> int:
        """Texts that wait or are being read in several slices."""
        large = sum(len(job.large) for job in self.jobs.values())
        return len(self._waiting) + large + len(self.begun)

    @property
    def long(self) -> QueuedText | None:
        """The text that is being read in several slices."""
        return self.begun[0] if self.begun else None

    @property
    def ready(self) -> bool:
        """Whether there are texts that a slice can take now."""
        return bool(self._waiting or self.begun)

    @property
    def large(self) -> QueuedText | None:
        """The large text that is to be begun next; None if there is none, or one has begun."""
        if not self._large or any(text.length > self._most for text in self.begun):
            return None
        return self.jobs[self._large[0]].large[0]

    def begin_large(self) -> None:
        """Have the large text read that is to be begun next."""
        assert self.large is not None, "nobody asks where there is none"
        job = self._large.popleft()
        self._set_begun([*self.begun, self.jobs[job].large.pop(0)])
        if self.jobs[job].large:
            self._large.append(job)

    def add(self, order: Embed, number: int = 0) -> None:
        job = QueuedTexts(order, number, self._most)
        self.jobs[order.id] = job
        self._turns.append(order.id)
        if job.large:
            self._large.append(order.id)
        self._waiting = sorted(self._waiting + job.waiting)
        self.tokens += sum(text.length for text in job.waiting)

    def remove(self, job_ids: Iterable[int]) -> list[int]:
        """Forget these jobs, and their texts. Returns the ids of those that were there."""
        gone = {job for job in job_ids if job in self.jobs}
        if not gone:
            return []
        for job in gone:
            del self.jobs[job]
        self._turns = deque(job for job in self._turns if job not in gone)
        self._large = deque(job for job in self._large if job not in gone)
        self._waiting = [text for text in self._waiting if text.job not in gone]
        self._set_begun([text for text in self.begun if text.job not in gone])
        self.tokens = sum(text.length for text in self._waiting)
        return sorted(gone)

    def choose(self, limit: int, most: int) -> list[QueuedText]:
        """Take the texts of the next slice; none if it belongs to the long text, or there are none.

        They are neighbours in length, the longest being of the job whose turn it is. A long text
        takes turns with the others.

        Args:
            limit: the most tokens of one text; a longer one is read in several slices, where that
                may be.
            most: the most tokens of a slice, padding included; one text may have more.
        """
        if self.begun and self._long_is_next:
            self._long_is_next = False
            return []
        self._long_is_next = True
        first = self._find_first(limit)
        if first is None:
            return []
        end = bisect_right(self._waiting, first)
        if self._slices and first.length > limit:
            self._take(end - 1, end)
            self._set_begun([first])
            self._long_is_next = False
            return []
        start, real = end - 1, first.length
        while start > 0:
            real += self._waiting[start - 1].length
            padded = (end - start + 1) * first.length
            if padded > most or padded > _MOST_PADDED * real:
                break
            start -= 1
        return self._take(start, end)

    def read_on(self, limit: int) -> tuple[QueuedText, int, int]:
        """Take the next tokens of the long text, at most `limit`, or all where a text is not read
        in several slices: the text, the first token's place in it, and the last one's, exclusive.
        Once it has ended there is no long text."""
        text, begin = self.begun[0], self.long_done
        end = self.long_done = min(begin + limit, text.length) if self._slices else text.length
        if end == text.length:
            self._set_begun(self.begun[1:])
        return text, begin, end

    def _set_begun(self, begun: list[QueuedText]) -> None:
        """Have these be the texts that have begun. If the first is another, it is the long one from
        now on, and its turn."""
        if begun[:1] != self.begun[:1]:
            self.long_done, self._long_is_next = 0, True
        self.begun = begun

    def _take(self, start: int, end: int) -> list[QueuedText]:
        texts = self._waiting[start:end]
        del self._waiting[start:end]
        self.tokens -= sum(text.length for text in texts)
        return texts

    def _find_first(self, limit: int) -> QueuedText | None:
        """The longest text of the job whose turn it is; the job goes to the end of the turns."""
        for job in list(self._turns):
            found = next(self._candidates(job, limit), None)
            if not self.jobs[job].waiting:
                self._turns.remove(job)
            elif found is not None:
                self._turns.remove(job)
                self._turns.append(job)
                return found
        return None

    def _candidates(self, job: int, limit: int) -> Iterator[QueuedText]:
        """A job's waiting texts, the longest first. While a long text is being read, no other
        that is as long."""
        waiting = self.jobs[job].waiting
        # Other jobs' slices may have taken some.
        while waiting and not self._waits(waiting[-1]):
            waiting.pop()
        allowed: Sequence[QueuedText] = waiting
        if self.begun and self._slices:
            allowed = waiting[: bisect_left(waiting, (limit + 1,))]
        return (text for text in reversed(allowed) if self._waits(text))

    def _waits(self, text: QueuedText) -> bool:
        place = bisect_left(self._waiting, text)
        return place < len(self._waiting) and self._waiting[place] == text
