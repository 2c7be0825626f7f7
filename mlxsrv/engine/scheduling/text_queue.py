"""The queue of texts to embed: which of them share the next slice.

A slice holds texts of similar length, of any job, so that little of it is padding. Each slice
starts from the longest text of the next job in turn, so a job of many texts does not hold up a job
of few.

A large text, of more tokens than a slice of a prompt may have, waits until there is memory for it:
its row is then one of those that the memory budget looks at. Jobs take turns with these as well,
and of each model one is read at a time. It becomes the `long` text when the one before it has
ended.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from mlxsrv.engine.scheduling.row import Row

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
        row: the job's.
        most: tokens; texts of more are large.

    Attributes:
        row: as above.
        waiting: those that no slice has taken, the shortest first; perhaps some that one has.
        large: those that are large, the longest first.
        missing: how many no slice has taken to their ends.
    """

    def __init__(self, row: Row, most: int) -> None:
        all_texts = enumerate(row.job.texts)
        texts = sorted(QueuedText(len(text), row.id, place) for place, text in all_texts)
        large = bisect_left(texts, (most + 1,))
        self.row = row
        self.waiting = texts[:large]
        self.large = texts[large:][::-1]
        self.missing = len(texts)


class TextQueue:
    """The texts of all jobs of one model.

    Args:
        slices: a text that does not fit a slice is read in several slices. One such text at a time:
            it is `long`.
        most: tokens; texts of more are large.
    """

    def __init__(self, *, slices: bool, most: int) -> None:
        self.jobs: dict[int, QueuedTexts] = {}
        """By the ids of their rows. The job whose turn it is comes first."""
        self.tokens = 0
        """Tokens of all texts that wait, but for large ones."""
        self.begun: list[QueuedText] = []
        """The long text, and perhaps a large one that is the long one next. They hold memory."""
        self.long_done = 0
        """Tokens of the long text that were taken."""
        self._most = most
        self._slices = slices
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
    def holders(self) -> list[Row]:
        """Rows of the texts that have begun."""
        return [self.jobs[text.job].row for text in self.begun]

    @property
    def short(self) -> list[int]:
        """The jobs that wait for memory, and for nothing else."""
        return [] if self.ready else [number for number, job in self.jobs.items() if job.large]

    @property
    def large(self) -> QueuedText | None:
        """The large text that is to be begun next; None if there is none, or one has begun."""
        if any(text.length > self._most for text in self.begun):
            return None
        return next((job.large[0] for job in self.jobs.values() if job.large), None)

    def begin_large(self) -> None:
        """Have the large text read that is to be begun next, if there is one."""
        if (large := self.large) is not None:
            self.jobs[large.job].large.pop(0)
            self._end_turn(large.job)
            self._set_begun([*self.begun, large])

    def put_back(self, row: Row) -> None:
        """Have the begun texts of a row wait again: their memory is needed for others."""
        job = self.jobs[row.id]
        for text in [text for text in self.begun if text.job == row.id]:
            if text.length > self._most:
                job.large.insert(0, text)
            else:
                insort(job.waiting, text)
                insort(self._waiting, text)
                self.tokens += text.length
        self._set_begun([text for text in self.begun if text.job != row.id])

    def add(self, row: Row) -> None:
        job = QueuedTexts(row, self._most)
        self.jobs[row.id] = job
        self._waiting = sorted(self._waiting + job.waiting)
        self.tokens += sum(text.length for text in job.waiting)

    def remove(self, row: Row) -> None:
        """Forget the texts of a row."""
        del self.jobs[row.id]
        self._waiting = [text for text in self._waiting if text.job != row.id]
        self._set_begun([text for text in self.begun if text.job != row.id])
        self.tokens = sum(text.length for text in self._waiting)

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

    def count_off(self, ended: Iterable[QueuedText]) -> tuple[int, ...]:
        """Note that a slice takes these texts to their ends. Returns the jobs that have no other
        text left."""
        complete: list[int] = []
        for text in ended:
            job = self.jobs[text.job]
            job.missing -= 1
            if not job.missing:
                complete.append(text.job)
        return tuple(complete)

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
        for job in self.jobs:
            if (found := next(self._candidates(job, limit), None)) is not None:
                self._end_turn(job)
                return found
        return None

    def _end_turn(self, job: int) -> None:
        self.jobs[job] = self.jobs.pop(job)

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
