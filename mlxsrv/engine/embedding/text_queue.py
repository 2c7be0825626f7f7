"""The queue of texts to embed: which of them share the next slice. Without MLX.

A slice holds texts of similar length, of any job, so that little of it is padding. Each slice
starts from the longest text of the next job in turn, so a job of many texts does not hold up a job
of few.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mlxsrv.engine.events import Embedded
from mlxsrv.engine.orders import Embed
from mlxsrv.generation.outputs import Vectors

_MOST_PADDED = 1.25  # tokens of a slice, padding included, for each real one


class QueuedText(NamedTuple):
    """One text that waits. Sorted by length, then by arrival."""

    length: int
    job: int
    """The job's number in the order of arrival."""
    place: int
    """The text's place in its job."""


class EmbeddingJob:
    """One order, and the vectors that are done."""

    def __init__(self, number: int, order: Embed) -> None:
        self.id = order.id
        self.texts = order.texts
        self.firsts = order.firsts
        self.waiting = sorted(QueuedText(len(text), number, i) for i, text in enumerate(self.texts))
        self.missing = len(self.texts)
        self._vectors: Vectors | None = None

    def put(self, index: int, vector: Any) -> None:
        """Keep the vector `(width,)` of one text."""
        if self._vectors is None:
            self._vectors = np.empty((len(self.texts), len(vector)), np.float32)
        self._vectors[index] = vector
        self.missing -= 1

    @property
    def embedded(self) -> Embedded:
        assert self._vectors is not None
        return Embedded(self.id, self._vectors)


class TextQueue:
    """The texts of all jobs of one model.

    Args:
        slices: a text that does not fit a slice is read in several slices. One such text at a time:
            it is `long`.
    """

    def __init__(self, *, slices: bool) -> None:
        self.jobs: dict[int, EmbeddingJob] = {}
        """By number, in the order of arrival."""
        self.tokens = 0
        """Tokens of all texts that wait."""
        self.long: QueuedText | None = None
        self._slices = slices
        self._arrived = 0
        self._turns: deque[int] = deque()  # numbers of the jobs, in turn
        self._waiting: list[QueuedText] = []  # of all jobs, the shortest first
        self._long_is_next = False

    def __len__(self) -> int:
        """Texts that wait or are being read."""
        return len(self._waiting) + (self.long is not None)

    def add(self, order: Embed) -> None:
        job = EmbeddingJob(self._arrived, order)
        self.jobs[self._arrived] = job
        self._turns.append(self._arrived)
        self._arrived += 1
        self._waiting = sorted(self._waiting + job.waiting)
        self.tokens += sum(text.length for text in job.waiting)

    def tokens_of(self, text: QueuedText) -> tuple[int, ...]:
        return self.jobs[text.job].texts[text.place]

    def find(self, job_ids: Iterable[int]) -> set[int]:
        """The numbers of the jobs with these ids."""
        wanted = set(job_ids)
        return {number for number, job in self.jobs.items() if job.id in wanted}

    def remove(self, numbers: Iterable[int]) -> None:
        """Forget the jobs of these numbers, and their texts."""
        gone = set(numbers)
        if not gone:
            return
        for number in gone:
            del self.jobs[number]
        self._turns = deque(number for number in self._turns if number not in gone)
        self._waiting = [text for text in self._waiting if text.job not in gone]
        if self.long is not None and self.long.job in gone:
            self.long = None
        self.tokens = sum(text.length for text in self._waiting)

    def choose(self, limit: int, most: int) -> list[QueuedText]:
        """Take the texts of the next slice; none if the slice belongs to the long text.

        They are neighbours in length, the longest being of the job whose turn it is. A long text
        takes turns with the others.

        Args:
            limit: the most tokens of one text; a longer one is read in several slices, where that
                may be.
            most: the most tokens of a slice, padding included; one text may have more.
        """
        if self.long is not None and self._long_is_next:
            self._long_is_next = False
            return []
        self._long_is_next = True
        first = self._find_first(limit)
        if first is None:
            return []
        end = bisect_right(self._waiting, first)
        if self._slices and first.length > limit:
            self._take(end - 1, end)
            self.long = first
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

    def _take(self, start: int, end: int) -> list[QueuedText]:
        texts = self._waiting[start:end]
        del self._waiting[start:end]
        self.tokens -= sum(text.length for text in texts)
        return texts

    def _find_first(self, limit: int) -> QueuedText | None:
        """The longest text of the job whose turn it is; the job goes to the end of the turns."""
        for number in list(self._turns):
            found = next(self._candidates(number, limit), None)
            if not self.jobs[number].waiting:
                self._turns.remove(number)
            elif found is not None:
                self._turns.remove(number)
                self._turns.append(number)
                return found
        return None

    def _candidates(self, number: int, limit: int) -> Iterator[QueuedText]:
        """A job's waiting texts, the longest first. While a long text is being read, no other
        that is as long."""
        waiting = self.jobs[number].waiting
        # Other jobs' slices may have taken some.
        while waiting and not self._waits(waiting[-1]):
            waiting.pop()
        allowed: Sequence[QueuedText] = waiting
        if self.long is not None and self._slices:
            allowed = waiting[: bisect_left(waiting, (limit + 1,))]
        return (text for text in reversed(allowed) if self._waits(text))

    def _waits(self, text: QueuedText) -> bool:
        place = bisect_left(self._waiting, text)
        return place < len(self._waiting) and self._waiting[place] == text
