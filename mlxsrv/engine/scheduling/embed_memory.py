"""The memory that one model's texts to embed take of the budget.

A pass over as many tokens as a slice of a prompt may have needs no more than a slice of a prompt
may. That is not counted here. What is counted is the memory beyond it:

- **A large text**, of more tokens than that, waits until there is room, in the order in which its
  job and rows came. One of each model is read at a time. A decoder reads it in several slices, into
  a KV cache of its own; an encoder reads it in one large pass. Once it has begun it keeps its
  memory to its end, which is near.
- **A small text** that is read in several slices beside streams has a KV cache as well. Where there
  is no room for that, it is read in one slice.
- **Many small texts** share a pass of as many tokens as there is room for.
"""

from __future__ import annotations

from collections.abc import Callable

from mlxsrv.engine.events import Shortage, kv_bytes
from mlxsrv.engine.outcomes import EmbedFacts
from mlxsrv.engine.scheduling.groups import GROWTH
from mlxsrv.engine.scheduling.text_queue import QueuedText, TextQueue

_POOLING = 7
"""Copies of a text's hidden states, at most, with which its vector is made: some are of 32 bits."""


class EmbedMemory:
    """The memory of one model's texts.

    Args:
        facts: of the model.
        slice: the most tokens of a slice of a prompt; a text of more is large.
        queue: has the texts.
        refuse: ends the job with this id: a text of it does not fit even alone.
    """

    def __init__(
        self,
        facts: EmbedFacts,
        slice: int,
        queue: TextQueue,
        refuse: Callable[[int, Shortage], None],
    ) -> None:
        self._facts = facts
        self._slice = slice
        self._queue = queue
        self._refuse = refuse

    # What the budget asks.

    @property
    def waits(self) -> bool:
        """Whether there is a large text that may be begun, if it is given memory."""
        return self._queue.large is not None

    @property
    def number(self) -> int:
        """The number of that text's job, among all that came."""
        return self._queue.jobs[self._large.job].number

    @property
    def needed(self) -> int:
        """The bytes that it takes."""
        return self.measure(self._large.length)

    def begin_large(self) -> None:
        """Let it be begun."""
        self._queue.begin_large()

    def refuse(self, most: int) -> None:
        """End its job: it does not fit even alone, into so many bytes."""
        text = self._large
        self._refuse(text.job, Shortage(self.needed, most, text.length))

    @property
    def held(self) -> int:
        """Bytes of the texts that have begun, as they are at their ends."""
        return sum([self.measure(text.length) for text in self._queue.begun])

    @property
    def _large(self) -> QueuedText:
        text = self._queue.large
        assert text is not None, "nobody asks where none waits"
        return text

    # What the schedule asks.

    def measure(self, tokens: int) -> int:
        """Bytes of a text of so many tokens that is read in several slices, or is large."""
        if not self._facts.slices:
            return self._facts.pass_bytes(tokens, tokens)
        hidden = self._facts.hidden_bytes * tokens
        cache = kv_bytes(self._facts.kv_costs, tokens + GROWTH, self._slice + GROWTH)
        return hidden + max(cache, _POOLING * hidden)

    def fit_pass(self, tokens: int, longest: int, free: int) -> int:
        """The most tokens of a pass for which there is room: those of a step at least.

        Args:
            tokens: as many as are wanted.
            longest: tokens that its texts have at most.
            free: bytes, beyond those of a step.
        """
        each = self._facts.pass_bytes(1, longest)
        return min(tokens, self._slice + max(free, 0) // each) if each else tokens
