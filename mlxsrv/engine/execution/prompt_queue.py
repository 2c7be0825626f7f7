"""The prompts of one model that are to be read, and which of them is read next.

A slice goes to the prompt that has the fewest tokens left. After a slice that did not go to the
oldest prompt, the oldest has the next one. So:

- A short prompt waits for a slice or two, however many long ones came before it.
- Short prompts without end do not starve a long one: the oldest has every second slice, each prompt
  becomes the oldest at some time, and so each is read after a bounded time.
- Among long prompts alone, the first is read to its end, then the next. Slices by turns would make
  all of them as late as the last.

Rows are given in order of arrival. A prompt without a row cannot overtake. Several
prompts are half read at once where a shorter one overtakes. Each of them has a row, and needs the
memory that the row will need. Where memory is short, they are read anew, one at a time.

Decides, and reads nothing. Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from mlxsrv.engine.cache.prompt_cache import PromptCache
from mlxsrv.engine.execution.prefill_stages import PartialPrompt, QueuedPrompt
from mlxsrv.engine.row import RowState
from mlxsrv.engine.steering.steerer import Steerer

_MOST_BEGUN = 16


class PromptQueue:
    """Prompts that wait, in the order in which they came, and prompts that are half read.

    Args:
        cached: prompts that were read before.
        steerer: tells whether activations are watched.
    """

    def __init__(self, cached: PromptCache, steerer: Steerer) -> None:
        self.waiting: list[QueuedPrompt] = []
        self.begun: list[PartialPrompt] = []
        self._cached = cached
        self._steerer = steerer
        self._numbers = count()
        self._oldest_is_next = False
        self._most_begun = _MOST_BEGUN

    @property
    def rows(self) -> int:
        """Rows of the prompts that are half read."""
        return sum(len(prompt.queued) for prompt in self.begun)

    def add(self, prompt: QueuedPrompt) -> None:
        prompt.number = next(self._numbers)
        self.waiting.append(prompt)

    def put_back(self, prompts: Iterable[QueuedPrompt]) -> None:
        """Have these prompts, which were being read, wait again in their old places."""
        again = list(prompts)
        for prompt in again:
            prompt.row.enter(RowState.WAITING)
        self.waiting = sorted([*self.waiting, *again], key=lambda prompt: prompt.number)

    def begin(self, prompt: PartialPrompt) -> None:
        """Note that the prompt takes more than a slice."""
        self.begun.append(prompt)

    def end(self, prompt: PartialPrompt) -> None:
        """Note that a prompt which took several slices is read."""
        self.begun.remove(prompt)
        # Where memory was short, one more may be half read again.
        self._most_begun = min(self._most_begun + 1, _MOST_BEGUN)

    def drop(self, job_ids: set[int]) -> list[PartialPrompt]:
        """Forget these jobs. Returns the half-read prompts that no other job shares."""
        for prompt in self.waiting:
            if prompt.job.id in job_ids:
                prompt.row.enter(RowState.ENDED)
        self.waiting = [prompt for prompt in self.waiting if not prompt.row.ended]
        dropped = [prompt for prompt in self.begun if prompt.drop(job_ids)]
        self.begun = [prompt for prompt in self.begun if prompt not in dropped]
        return dropped

    def shrink(self) -> None:
        """Have half-read prompts read anew, one at a time, since memory is short."""
        begun, self.begun = self.begun, []
        self.put_back(each for prompt in begun for each in prompt.restart())
        self._most_begun = 1

    def clear(self) -> None:
        self.waiting, self.begun = [], []

    def choose(self, rows: int, limit: int) -> QueuedPrompt | PartialPrompt | None:
        """The prompt to read next; None if there is none.

        Args:
            rows: rows that are free for prompts that are not begun.
            limit: tokens of a slice. Only so many prompts that take more are begun at once.
        """
        for prompt in self.begun:
            if not prompt.left:
                return prompt  # its row is to join, which takes no reading
        full = len(self.begun) >= self._most_begun
        first = self.waiting[: max(rows, 0)]
        among: list[QueuedPrompt | PartialPrompt] = [*self.begun]
        among += [prompt for prompt in first if not full or self.fits(prompt, limit)]
        if not among:
            return None
        oldest = min(among, key=lambda prompt: prompt.number)
        chosen = oldest if self._oldest_is_next else min(among, key=self._order)
        self._oldest_is_next = chosen is not oldest
        return chosen

    def measure(self, prompt: QueuedPrompt) -> int:
        """How many tokens of a waiting prompt are to be read: those that are not cached."""
        cached = 0 if self.reads_anew(prompt) else prompt.count_cached(self._cached)
        return prompt.body.size - cached

    def reads_anew(self, prompt: QueuedPrompt) -> bool:
        """Whether the prompt cache is of no use, since something is told of each of the prompt's
        tokens: scores, or activations."""
        told = prompt.job.scores is not None or self._steerer.watches
        return told and prompt.row.state is not RowState.RECOVERING

    def fits(self, prompt: QueuedPrompt, limit: int) -> bool:
        """Whether the prompt is read whole in a slice of `limit` tokens. One that is scored is
        not: each of its tokens leaves a row of logits."""
        return prompt.job.scores is None and self.measure(prompt) <= limit

    def shortest(self, rows: int, limit: int) -> list[QueuedPrompt]:
        """Prompts that fit a slice of `limit` tokens and may share it, the shortest first, among
        those for which there are `rows`."""
        first = self.waiting[: max(rows, 0)]
        fitting = [prompt for prompt in first if not prompt.alone and self.fits(prompt, limit)]
        return sorted(fitting, key=self._order)

    def _order(self, prompt: QueuedPrompt | PartialPrompt) -> tuple[int, int]:
        left = prompt.left if isinstance(prompt, PartialPrompt) else self.measure(prompt)
        return left, prompt.number
