"""A cache that never loses what is still used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakValueDictionary

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LatestAndUsed(Generic[K, V]):
    """Keeps the values that were asked for last, and knows all that somebody else holds.

    Any thread may call it. Two that ask for the same new value at once may both make it.

    Args:
        size: how many of the latest values are kept.
        make: makes a value.
    """

    def __init__(self, size: int, make: Callable[[K], V]) -> None:
        self._make = make
        self._used: WeakValueDictionary[K, V] = WeakValueDictionary()
        self._latest = functools.lru_cache(maxsize=size)(self._find)

    def __call__(self, key: K) -> V:
        """Return the value of `key`, made if need be. Raises what `make` raises."""
        return self._latest(key)

    def _find(self, key: K) -> V:
        value = self._used.get(key)
        if value is None:
            value = self._used[key] = self._make(key)
        return value
