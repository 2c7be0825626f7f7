"""The worth of cached prompts: which of them is evicted where there is no room for all.

A cached prompt is worth the tokens that it will save reading, by the bytes that it takes. How many
these are is guessed from how many they were: each of its last uses counts with the tokens that it
saved, and half a use of all its tokens is taken for granted. So:

- What is used again and again outlasts a flood of prompts that come once.
- Of many prompts that begin with one system prompt, one is found for it, and stays: it saves
  tokens again and again. The others are worth what is asked of their ends.
- A prompt that goes on from another takes over its uses, for a chat goes on from its last turn. The
  other one, if it is still there, is worth as much as is read on from it after that: nothing within
  a chat that only grows.

A prompt that is not used any more has to be evicted in the end. So worth is added to a floor, which
rises to the worth of each prompt that is evicted. A prompt has the floor of the moment when it was
cached or last used.
This is GreedyDual-Size-Frequency (Cherkasova, 1998), with what prompts alone have: beginnings.
`benchmarks/kept_prompts.py` compares it with others.
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter
from typing import Protocol

_MOST_USES = 4  # of one prompt that count, so that it goes in time when nobody comes back to it
_EXPECTED = 0.5  # uses that are taken for granted
_WORTH = attrgetter("worth")


class _Record:
    """One cached prompt.

    Args:
        number: the prompt's.
        tokens: that it holds.
        bytes: that it takes.
        floor: that its worth is added to.

    Attributes:
        uses: the tokens that each of its last uses saved.
        expected: uses of all its tokens that are taken for granted.
        worth: tokens by the byte, above the floor; as `weigh` has found it.
    """

    __slots__ = ("bytes", "expected", "floor", "number", "tokens", "uses", "worth")

    def __init__(self, number: int, tokens: int, bytes: int, floor: float) -> None:
        self.number = number
        self.tokens = tokens
        self.bytes = max(bytes, 1)
        self.floor = floor
        self.uses: deque[int] = deque(maxlen=_MOST_USES)
        self.expected = _EXPECTED
        self.weigh()

    def save(self, *tokens: int) -> None:
        """Note uses that saved so many tokens each."""
        self.uses.extend(tokens)
        self.weigh()

    def weigh(self) -> None:
        """Compute the worth anew."""
        self.worth = self.floor + (self.expected * self.tokens + sum(self.uses)) / self.bytes


class Eviction(Protocol):
    """Decides which cached prompt is evicted; it knows them by their numbers."""

    def add(self, number: int, tokens: int, bytes: int, parent: int | None) -> None:
        """Take a prompt of so many tokens. It continues the prompt `parent`, if there is one."""

    def use(self, number: int, tokens: int) -> None:
        """Count a use of a prompt that has just saved prefilling so many tokens."""

    def remove(self, number: int, heir: int | None) -> tuple[int, ...]:
        """Forget a prompt; `heir` inherits its uses. Returns the tokens that each of its last uses
        saved."""

    def choose(self) -> int:
        """The number of the prompt to evict."""


class PromptWorth(Eviction):
    """Evicts the prompt of least worth (GreedyDual-Size-Frequency)."""

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        self._floor = 0.0

    def add(self, number: int, tokens: int, bytes: int, parent: int | None = None) -> None:
        """Take a prompt of so many tokens. It goes on from `parent`, which is there."""
        record = self._records[number] = _Record(number, tokens, bytes, self._floor)
        older = None if parent is None else self._records[parent]
        # The first to go on from a prompt is its next turn. Others branch off.
        if older is not None and older.expected:
            record.save(*older.uses)
            older.uses.clear()
            older.expected = 0.0
            older.weigh()

    def use(self, number: int, tokens: int) -> None:
        """Note that a prompt saves reading so many tokens just now."""
        record = self._records[number] = self._records.pop(number)  # the last from now on
        record.floor = self._floor
        record.save(tokens)

    def remove(self, number: int, heir: int | None = None) -> tuple[int, ...]:
        """Forget a prompt. `heir` takes its place, and its uses.

        Returns:
            The tokens that each of its last uses saved.
        """
        uses = tuple(self._records.pop(number).uses)
        if heir is not None:
            self._records[heir].save(*uses)
        return uses

    def choose(self) -> int:
        """Evict the prompt of least worth; of several, the one used longest ago. Returns its
        number."""
        record = min(self._records.values(), key=_WORTH)
        self._floor = max(self._floor, record.worth)
        return record.number
