"""The prompt index: which texts were read before, so that they are not read again.

An entry stands for a KV cache that the runner keeps, under the tokens that it has seen. A lookup
finds the entry that shares the longest prefix with a prompt. The caches of attention layers can be
cut back to any length, so any shared prefix is of use. Those of recurrent layers and full sliding
windows cannot: such an entry is of use only if the prompt begins with all of it. So entries are
made where later prompts are likely to go on: at the end of a prompt and of an answer.

Steering changes what a KV cache holds, so an entry is of use only to prompts that are steered
alike.

Prefixes of less than `LEAST` tokens are not worth a copy. Tokens are kept as arrays, and a common
prefix is found by one comparison of two: 0.15 ms for prompts of a hundred thousand tokens. mlx-lm's
trie of nested dicts takes 12 ms to find such a prompt and 61 ms to store it, and takes 22 MB.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.generation.parameters import Steering

Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]
"""Token ids."""

_Begins = tuple[bytes, Steering | None]

LEAST = 64
_MOST_ENTRIES = 128  # bounds a lookup where a model is so small that bytes would not


class _Entry:
    """A kept prompt, or one that is promised: the runner has yet to say that it keeps it."""

    __slots__ = ("begins", "bytes", "cuts", "number", "tokens")

    def __init__(
        self, number: int, tokens: Tokens, steering: Steering | None, *, cuts: bool
    ) -> None:
        self.number = number
        self.tokens = tokens
        self.begins = _begins(tokens, steering)
        self.bytes = 0
        self.cuts = cuts

    def covers(self, other: _Entry) -> bool:
        """Whether this entry can be cut back to what `other` holds, which is then superfluous."""
        size = other.tokens.size
        if size > self.tokens.size or not (self.cuts or size == self.tokens.size):
            return False
        # The last token first: it tells most pairs apart.
        same = self.tokens[size - 1] == other.tokens[-1]
        return bool(same) and common_prefix(self.tokens, other.tokens) == size


class PromptIndex:
    """Kept prompts by their tokens.

    Args:
        most_bytes: beyond these the least recently used entries are dropped; 0 keeps none.
        cuts: KV caches of the model can be cut back to any length.

    Attributes:
        bytes: of all kept prompts.
        changes: grows when entries come or go: a lookup is good until then.
    """

    def __init__(self, most_bytes: int, *, cuts: bool = True) -> None:
        self.bytes = 0
        self.changes = 0
        self._dropped: list[int] = []
        self._most_bytes = most_bytes
        self._cuts = cuts
        self._promised: dict[int, _Entry] = {}
        self._entries: list[_Entry] = []  # the least recently used first
        self._number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, tokens: Tokens, steering: Steering | None = None) -> tuple[int | None, int]:
        """The entry that saves most of reading `tokens`, and how many of them it saves.

        One that is promised counts: its row leaves before the same plan reads a prompt. So who asks
        again at once, after a hang-up, goes on from there.
        """
        if tokens.size < LEAST or not (self._entries or self._promised):
            return None, 0
        best, most = None, 0
        begins = _begins(tokens, steering)
        promised = [entry for entry in self._promised.values() if entry.begins == begins]
        for entry in (*self._alike(begins), *promised):
            # One that shares more has the same token behind what the best one shares.
            size = min(entry.tokens.size, tokens.size)
            if size <= most or entry.tokens[most] != tokens[most]:
                continue
            shared = common_prefix(entry.tokens, tokens)
            if shared > most and (entry.cuts or shared == entry.tokens.size):
                best, most = entry.number, shared
        return best, most

    def use(self, number: int) -> None:
        """Note that the entry was of use just now."""
        for entry in self._entries:
            if entry.number == number:
                self._entries.remove(entry)
                self._entries.append(entry)
                return

    def wants(self, tokens: int) -> bool:
        """Whether a KV cache of so many tokens is kept, if it is not too large."""
        return tokens >= LEAST and self._most_bytes > 0

    def promise(self, tokens: Tokens, steering: Steering | None = None) -> int:
        """The number of a new entry, which the runner is to keep."""
        self._number += 1
        entry = _Entry(self._number, tokens, steering, cuts=self._cuts)
        self._promised[self._number] = entry
        self.changes += 1
        return self._number

    def confirm(self, promised: Sequence[int], kept: Sequence[KeptPrompt]) -> None:
        """Take in the entries that the runner has kept, of those that were promised."""
        for number in promised:
            entry = self._promised.pop(number)
            self.changes += 1
            for prompt in kept:
                if prompt.entry == number:
                    entry.bytes, entry.cuts = prompt.bytes, prompt.cuts
                    self._put(entry)

    def forget(self, tokens: Tokens, steering: Steering | None = None) -> None:
        """Drop the entries that a row with these tokens may have left, or begun from."""
        if tokens.size < LEAST or not self._entries:
            return
        for entry in self._alike(_begins(tokens, steering)):
            if common_prefix(entry.tokens, tokens) == entry.tokens.size:
                self._drop(entry)

    def drop(self, number: int) -> None:
        """Drop one entry, if it is there."""
        for entry in self._entries:
            if entry.number == number:
                self._drop(entry)
                return

    def give_way(self, bytes: int) -> int:
        """Drop entries, the least worth first, until so many bytes are free or none is left.

        What is promised stays: its bytes are not known yet.

        Returns:
            The bytes that are free now, more than asked for where the last entry was large. The
            runner has them until the next plan forgets the entries.
        """
        before = self.bytes
        while self._entries and before - self.bytes < bytes:
            self._drop(self._entries[0])
        return before - self.bytes

    def clear(self) -> None:
        for entry in list(self._entries):
            self._drop(entry)

    @property
    def dropped(self) -> bool:
        """Whether entries were dropped that the runner is yet to forget."""
        return bool(self._dropped)

    def take_dropped(self) -> tuple[int, ...]:
        """Entries that were dropped since the last call."""
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _put(self, entry: _Entry) -> None:
        if entry.bytes > self._most_bytes:
            self._dropped.append(entry.number)
            return
        for old in [old for old in self._alike(entry.begins) if entry.covers(old)]:
            self._drop(old)
        self._entries.append(entry)
        self.bytes += entry.bytes
        self.changes += 1
        while self.bytes > self._most_bytes or len(self._entries) > _MOST_ENTRIES:
            self._drop(self._entries[0])

    def _alike(self, begins: _Begins) -> list[_Entry]:
        return [entry for entry in self._entries if entry.begins == begins]

    def _drop(self, entry: _Entry) -> None:
        self._entries.remove(entry)
        self.bytes -= entry.bytes
        self.changes += 1
        self._dropped.append(entry.number)


def _begins(tokens: Tokens, steering: Steering | None) -> _Begins:
    return tokens[:LEAST].tobytes(), steering


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The length of the longest common prefix."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token ids as an array; an array is returned as it is."""
    return np.asarray(tokens, dtype=np.uint32)
