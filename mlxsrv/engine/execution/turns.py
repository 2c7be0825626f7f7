"""Whose turn it is: prompts that wait, and prompts that are half read.

A slice goes to the prompt that has the least left to read; but after a slice that did not go to the
prompt that came first, this one has the next. So:

- A short prompt waits for a slice or two, however many long ones came before it.
- A long one is not starved by short ones without end: the oldest has every second slice, so each
  comes to be the oldest, and is read after a bounded time.
- Of long ones alone the first is read to its end, then the next: to give each a slice by turns
  would make all of them as late as the last.

Rows are for who comes first: prompts for which there is none yet do not overtake. Several prompts
are half read at once where a shorter one overtakes. Each of them has a row and needs the memory
that the row will; where that is short, they begin anew, one at a time.

Used on the device thread only. Decides, and reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.execution.reading import Reading, Waiting
from mlxsrv.engine.steering.steerer import Steerer

_MOST_BEGUN = 16


class Turns:
    """The prompts of one model that are to be read.

    Args:
        cached: prompts that have been read before.
        steerer: tells whether somebody watches.
    """

    def __init__(self, cached: PromptCache, steerer: Steerer) -> None:
        self.waiting: list[Waiting] = []
        self.begun: list[Reading] = []
        self._cached = cached
        self._steerer = steerer
        self._numbers = count()
        self._oldest_is_next = False
        self._most_begun = _MOST_BEGUN

    @property
    def rows(self) -> int:
        """Rows of the prompts that are half read."""
        return sum(len(reading.jobs) for reading in self.begun)

    def add(self, waiting: Waiting) -> None:
        waiting.number = next(self._numbers)
        self.waiting.append(waiting)

    def put_back(self, again: Iterable[Waiting]) -> None:
        """These are to be read anew, where they were in the queue."""
        self.waiting = sorted([*self.waiting, *again], key=lambda waiting: waiting.number)

    def begin(self, reading: Reading) -> None:
        """This prompt takes more than a slice."""
        self.begun.append(reading)

    def end(self, reading: Reading) -> None:
        """It is read. There is room for one more again, where there was too little memory."""
        self.begun.remove(reading)
        self._most_begun = min(self._most_begun + 1, _MOST_BEGUN)

    def drop(self, job_ids: set[int]) -> list[Reading]:
        """Forget these jobs; the half-read prompts that nobody wants any more."""
        self.waiting = [each for each in self.waiting if each.job.id not in job_ids]
        dropped = [reading for reading in self.begun if reading.drop(job_ids)]
        self.begun = [reading for reading in self.begun if reading not in dropped]
        return dropped

    def shrink(self) -> None:
        """Memory is short: half-read prompts are read anew, one at a time."""
        begun, self.begun = self.begun, []
        self.put_back(each for reading in begun for each in reading.restart())
        self._most_begun = 1

    def clear(self) -> None:
        self.waiting, self.begun = [], []

    def choose(self, rows: int, limit: int) -> Waiting | Reading | None:
        """Who is read next: one that is half read, or of those that wait the first for whom there
        are `rows`; and room, if one does not fit a slice of `limit` tokens."""
        for reading in self.begun:
            if not reading.left:
                return reading  # it is to join, which costs no reading
        full = len(self.begun) >= self._most_begun
        first = self._first(rows)
        among: list[Waiting | Reading] = [*self.begun]
        among += [each for each in first if not full or self.fits(each, limit)]
        if not among:
            return None
        oldest = min(among, key=lambda each: each.number)
        chosen = oldest if self._oldest_is_next else min(among, key=self._order)
        self._oldest_is_next = chosen is not oldest
        return chosen

    def measure(self, waiting: Waiting) -> int:
        """How many tokens of a prompt that waits are to be read: not what is cached of it."""
        found = 0 if self.reads_anew(waiting) else waiting.shared(self._cached)
        return waiting.body.size - found

    def reads_anew(self, waiting: Waiting) -> bool:
        """Whether something is to be told of each of the prompt's tokens: scores, activations."""
        wanted = waiting.job.scores is not None or self._steerer.watches
        return wanted and not waiting.row.told

    def fits(self, waiting: Waiting, limit: int) -> bool:
        """Whether it is read whole in a slice of `limit` tokens. One that is scored is not: each
        of its tokens leaves a row of logits."""
        return waiting.job.scores is None and self.measure(waiting) <= limit

    def shortest(self, rows: int, limit: int) -> list[Waiting]:
        """Those that fit a slice and may share it, the shortest first, where there are `rows`."""
        first = self._first(rows)
        fitting = [each for each in first if not each.alone and self.fits(each, limit)]
        return sorted(fitting, key=self._order)

    def _first(self, rows: int) -> list[Waiting]:
        return self.waiting[: max(rows, 0)]

    def _order(self, each: Waiting | Reading) -> tuple[int, int]:
        left = each.left if isinstance(each, Reading) else self.measure(each)
        return left, each.number
