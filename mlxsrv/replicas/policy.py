"""Choose the replica for a request: where its beginning is cached, if that one is not busier than
the others by much; else the less loaded of two.

Every proxy computes this alone, from the replicas' names and its own counts, and all come to the
same places.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping

SPARE = 1.25
"""Times the average that a replica's load may be."""

SLACK = 8
"""Requests that a replica may have beyond that. A model answers so many at once for not much more
than the time of one."""


def choose(
    key: str, loads: Mapping[str, int], *, spare: float = SPARE, slack: int = SLACK
) -> list[str]:
    """Return all replicas, the best one first.

    Rendezvous hashing gives each key an order of the replicas. A replica that comes or goes changes
    the first place of those keys only for which it is, or was, the first. The first replica gets
    the request unless it has more than its share; then the less loaded of the next two does. So a
    beginning that everybody sends spreads over the first few replicas of its order, and is cached
    on these.

    Args:
        key: the conversation's, or anything that is new for a request without one.
        loads: requests under way at each replica, by its name.
        spare: times the average that a load may be.
        slack: requests beyond that.
    """
    order = sorted(loads, key=lambda name: _weight(key, name), reverse=True)
    if len(order) < 2 or loads[order[0]] < most_load(loads, spare=spare, slack=slack):
        return order
    first, *others = order
    second = min(others[:2], key=lambda name: loads[name])
    if loads[second] >= loads[first]:
        return order
    others.remove(second)
    return [second, *others, first]


def most_load(loads: Mapping[str, int], *, spare: float = SPARE, slack: int = SLACK) -> int:
    """Return the load from which on a replica gets no more for the sake of its cache.

    It counts the request that is to be placed. The replica with the least load is always below it.
    """
    return math.ceil(spare * (sum(loads.values()) + 1) / len(loads)) + slack


def _weight(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
