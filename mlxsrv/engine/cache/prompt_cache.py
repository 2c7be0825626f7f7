"""The prompt cache: KV caches of texts that were read before, so they are not read again.

An entry is the KV cache of one row, as mlx-lm's classes hold it, under the tokens that it has seen.
A lookup finds the entry that shares the longest prefix with a prompt. The caches of attention
layers can be cut back to any length, so any shared prefix is of use. Those of recurrent layers and
full sliding windows cannot: such an entry is of use only if the prompt begins with all of it. So
entries are made where later prompts are likely to go on: at the end of a prompt and of an answer.

Steering changes what a KV cache holds, so an entry is of use only to prompts that are steered
alike.

Prefixes of less than `LEAST` tokens are not worth a copy. Tokens are kept as arrays, and a common
prefix is found by one comparison of two: 0.15 ms for prompts of a hundred thousand tokens. mlx-lm's
trie of nested dicts takes the device thread 12 ms to find such a prompt and 61 ms to store it, and
takes 22 MB.

Used on the device thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import CacheList, ChunkedKVCache, trim_prompt_cache

from mlxsrv.generation.parameters import Steering

Cache = list[Any]
"""The KV cache of a row or of a batch: an object of mlx-lm's for each layer."""
Tokens = np.ndarray[tuple[int], np.dtype[np.uint32]]

_Begins = tuple[bytes, Steering | None]

LEAST = 64
_MOST_ENTRIES = 128  # bounds a lookup where a model is so small that bytes would not


class Entry:
    """The KV cache of one row, and the tokens that it has seen."""

    __slots__ = ("begins", "cache", "nbytes", "tokens", "trimmable")

    def __init__(self, tokens: Tokens, cache: Cache, steering: Steering | None) -> None:
        self.tokens = tokens
        self.begins = _begins(tokens, steering)
        self.cache = cache
        self.trimmable = can_cut(cache)
        self.nbytes: int = sum(layer.nbytes for layer in cache) + tokens.nbytes

    def covers(self, other: Entry) -> bool:
        """Whether this entry can be cut back to what `other` holds, which is then superfluous."""
        shared = common_prefix(self.tokens, other.tokens)
        return shared == other.tokens.size and (self.trimmable or shared == self.tokens.size)


class PromptCache:
    """KV caches by their tokens.

    Args:
        max_bytes: beyond these the least recently used entries are dropped; 0 keeps none.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._entries: list[Entry] = []  # the least recently used first
        self.nbytes = 0
        self.changes = 0  # grows when entries come or go: a lookup is good until then

    def __len__(self) -> int:
        return len(self._entries)

    def shared(self, tokens: Sequence[int] | Tokens, steering: Steering | None = None) -> int:
        """How many of `tokens` a lookup would save reading."""
        return self._find(tokens, steering)[1]

    def take(
        self, tokens: Sequence[int] | Tokens, steering: Steering | None = None
    ) -> tuple[Cache, int] | None:
        """Returns a copy of a KV cache that holds the first n of `tokens`, and n; None if there is
        none."""
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
        """Whether a KV cache of so many tokens is kept, if it is not too large."""
        return tokens >= LEAST and self.max_bytes > 0

    def put(self, tokens: Sequence[int], cache: Cache, steering: Steering | None = None) -> None:
        """Keep `cache`, which has seen `tokens`. The caller must not use it any more."""
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
        """Drop the entries that a row with these tokens may have left, or begun from."""
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
    """Whether the KV cache can be cut back to any earlier length."""
    return all(map(_layer_can_cut, cache))


def _layer_can_cut(layer: Any) -> bool:
    if isinstance(layer, CacheList):
        return can_cut(list(layer.caches))
    # mlx-lm calls a chunked cache trimmable, but tokens that it has dropped do not come back.
    return bool(layer.is_trimmable()) and not isinstance(layer, ChunkedKVCache)


def common_prefix(a: Tokens, b: Tokens) -> int:
    """The length of the longest common prefix."""
    length = min(a.size, b.size)
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def as_tokens(tokens: Sequence[int] | Tokens) -> Tokens:
    """Token ids as an array; an array is returned as it is."""
    return np.asarray(tokens, dtype=np.uint32)
