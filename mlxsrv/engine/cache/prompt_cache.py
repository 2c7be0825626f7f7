"""Prompts that have been read before, so that what they share is not read again.

An entry is the cache of one row, as mlx-lm's classes hold it, under the tokens that it has seen.
A lookup finds the entry that shares the longest prefix with a prompt. Attention caches can be cut
back to any length, so whatever is shared counts. Recurrent and full sliding-window caches cannot:
there an entry counts only if the prompt begins with all of it, which is why entries are made where
later prompts are likely to go on, at the end of a prompt and at the end of an answer.

What was added to a row's hidden states is in its cache, so an entry counts only for prompts that
are steered alike.

Beginnings of less than `LEAST` tokens are not worth a copy. Tokens are kept as arrays, and the
length of a common prefix is one comparison of two: 0.15 ms for prompts of a hundred thousand
tokens, where mlx-lm's trie of nested dicts takes 12 ms of the device thread to find such a one,
61 ms to file it, and 22 MB to keep it.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import CacheList, ChunkedKVCache, trim_prompt_cache

from mlxsrv.generation import Steering

Cache = list[Any]  # mlx-lm's, one entry per layer
Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]

_Begins = tuple[bytes, Steering | None]

LEAST = 64
_MOST_ENTRIES = 128  # bounds a lookup where a model is so small that bytes would not


class Entry:
    """One row's cache and what it has seen."""

    __slots__ = ("begins", "cache", "nbytes", "tokens", "trimmable")

    def __init__(self, tokens: Tokens, cache: Cache, steering: Steering | None) -> None:
        self.tokens = tokens
        self.begins = _begins(tokens, steering)
        self.cache = cache
        self.trimmable = can_cut(cache)
        self.nbytes: int = sum(layer.nbytes for layer in cache) + tokens.nbytes

    def covers(self, other: Entry) -> bool:
        """Whether `other` has nothing that this entry cannot be cut back to."""
        shared = common_prefix(self.tokens, other.tokens)
        return shared == other.tokens.size and (self.trimmable or shared == self.tokens.size)


class PromptCache:
    """Rows' caches by their tokens. Beyond `max_bytes` the least recently used go; 0 keeps none."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: list[Entry] = []  # the least recently used first
        self.nbytes = 0
        self.changes = 0  # of what is kept: a look-up is good until the next

    def __len__(self) -> int:
        return len(self._entries)

    def shared(self, tokens: Sequence[int] | Tokens, steering: Steering | None = None) -> int:
        """How many of `tokens` a lookup would save reading."""
        return self._find(tokens, steering)[1]

    def take(
        self, tokens: Sequence[int] | Tokens, steering: Steering | None = None
    ) -> tuple[Cache, int] | None:
        """A copy of a cache that holds the first n of `tokens`, and n; None if nothing helps."""
        entry, shared = self._find(tokens, steering)
        if entry is None:
            return None
        self._entries.remove(entry)
        self._entries.append(entry)
        cache = copy.deepcopy(entry.cache)
        if surplus := entry.tokens.size - shared:
            trim_prompt_cache(cache, surplus)
        return cache, shared

    def wants(self, tokens: int) -> bool:
        """Whether a cache of so many tokens would be kept, if it is not too large."""
        return tokens >= LEAST and self.max_bytes > 0

    def put(self, tokens: Sequence[int], cache: Cache, steering: Steering | None = None) -> None:
        """Keep `cache`, which has seen `tokens`; the caller gives it away."""
        if not self.wants(len(tokens)):
            return
        entry = Entry(as_tokens(tokens), cache, steering)
        if entry.nbytes > self.max_bytes:
            return
        for old in [old for old in self._alike(entry.begins) if entry.covers(old)]:
            self._drop(old)
        self._entries.append(entry)
        self.nbytes += entry.nbytes
        self.changes += 1
        while self.nbytes > self.max_bytes or len(self._entries) > _MOST_ENTRIES:
            self._drop(self._entries[0])

    def forget(self, tokens: Sequence[int], steering: Steering | None = None) -> None:
        """Drop what a row that has seen `tokens` may have left, or have begun from."""
        if len(tokens) < LEAST or not self._entries:
            return
        seen = as_tokens(tokens)
        for entry in self._alike(_begins(seen, steering)):
            if common_prefix(entry.tokens, seen) == entry.tokens.size:
                self._drop(entry)

    def clear(self) -> None:
        self._entries.clear()
        self.nbytes = 0
        self.changes += 1

    def _find(
        self, tokens: Sequence[int] | Tokens, steering: Steering | None
    ) -> tuple[Entry | None, int]:
        if len(tokens) < LEAST or not self._entries:
            return None, 0
        prompt = as_tokens(tokens)
        best, most = None, 0
        for entry in self._alike(_begins(prompt, steering)):
            shared = common_prefix(entry.tokens, prompt)
            if shared > most and (entry.trimmable or shared == entry.tokens.size):
                best, most = entry, shared
        return best, most

    def _alike(self, begins: _Begins) -> list[Entry]:
        return [entry for entry in self._entries if entry.begins == begins]

    def _drop(self, entry: Entry) -> None:
        self._entries.remove(entry)
        self.nbytes -= entry.nbytes
        self.changes += 1


def _begins(tokens: Tokens, steering: Steering | None) -> _Begins:
    return tokens[:LEAST].tobytes(), steering


def can_cut(cache: Cache) -> bool:
    """Whether the cache can be cut back to any earlier length."""
    return all(map(_layer_can_cut, cache))


def _layer_can_cut(layer: Any) -> bool:
    if isinstance(layer, CacheList):
        return can_cut(list(layer.caches))
    # mlx-lm calls a chunked cache trimmable, but what it has dropped in front does not come back.
    return bool(layer.is_trimmable()) and not isinstance(layer, ChunkedKVCache)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """How many tokens `a` and `b` begin with in common."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Ids as an array; one that is an array already, as it is."""
    return np.asarray(tokens, dtype=np.uint32)
