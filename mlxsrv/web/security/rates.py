"""Rate limits: how many requests each client may send in a minute.

Each client has a bucket. It holds `limit` requests and fills evenly, one every 60 / `limit`
seconds, so a client may send `limit` requests at once, and as many in each minute after that. Only
the time when a bucket will be full is kept. A full bucket is the same as a new one.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

import msgspec

_MINUTE = 60.0  # seconds
_MOST_CLIENTS = 10_000


class Allowance(msgspec.Struct, frozen=True):
    """The rest of a client's limit after a request. Times are in seconds from then on."""

    limit: int
    remaining: int
    reset: float
    """Until the bucket is full."""
    wait: float | None = None
    """Until the next request would be granted; None if this one is granted."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of OpenAI's API; Retry-After is in whole seconds, rounded up."""
        headers = {
            "X-RateLimit-Limit-Requests": str(self.limit),
            "X-RateLimit-Remaining-Requests": str(self.remaining),
            "X-RateLimit-Reset-Requests": _duration(self.reset),
        }
        if self.wait is not None:
            headers["Retry-After"] = str(math.ceil(self.wait))
        return headers


class RateLimit:
    """The buckets of recent clients; the one that was idle longest gives its place to a new one.

    Args:
        limit: requests per minute.
        clock: seconds; tests have their own.
        most: clients that are remembered.
    """

    def __init__(
        self,
        limit: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        most: int = _MOST_CLIENTS,
    ) -> None:
        self._limit = limit
        self._clock = clock
        self._most = most
        self._full_at: OrderedDict[Hashable, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, client: Hashable) -> Allowance:
        """Take one request from the client's bucket. If the bucket is empty, nothing is taken."""
        now = self._clock()
        allowance, full_at = grant(self._limit, now, self._full_at.pop(client, now))
        self._full_at[client] = full_at
        if len(self._full_at) > self._most:
            self._full_at.popitem(last=False)
        return allowance


def grant(limit: int, now: float, full_at: float) -> tuple[Allowance, float]:
    """Take one request from a bucket that will be full at a time, in seconds like `now`. Return
    what that leaves, and when the bucket will be full then."""
    interval = _MINUTE / limit
    full_at = max(full_at, now)
    over = full_at + interval - now - _MINUTE
    # Rounding errors must not cost the last request of a full bucket.
    if over > 1e-6:
        return Allowance(limit, 0, full_at - now, wait=over), full_at
    full_at += interval
    left = max(_MINUTE - (full_at - now), 0)
    return Allowance(limit, int(left / interval + 1e-6), full_at - now), full_at


def _duration(seconds: float) -> str:
    """A duration as Go and OpenAI write it: 20ms, 8.64s, 1m30s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, _MINUTE)
    return f"{f'{minutes:.0f}m' if minutes else ''}{round(rest, 3):g}s"
