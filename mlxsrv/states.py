"""States, and which of them may follow which."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import TypeVar

S = TypeVar("S", bound=Enum)


def follow(who: object, before: S, after: S, following: Mapping[S, Collection[S]]) -> S:
    """Return `after`, the next state.

    Args:
        who: has the states; its text is for the error.
        before: the present state.
        after: the next one.
        following: the states that may follow each.

    Raises:
        RuntimeError: `after` may not follow `before`.
    """
    if after not in following[before]:
        now, then = before.name.lower(), after.name.lower()
        raise RuntimeError(f"{who} is {now}, so it cannot be {then} next")
    return after
