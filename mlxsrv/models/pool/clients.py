"""Clients, and how many requests each of them may have at one model.

A model has places: one for each row, and one for each request that may wait. `Places` decides on
entry, because nothing that was accepted is dropped later. Used on the event loop only.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable

import anyio
import msgspec

from mlxsrv.errors import Overloaded

_LATEST = 16  # returns that the pace is measured by
_LONGEST = 60  # seconds; OpenAI's and Anthropic's SDKs take no longer advice


class Client(msgspec.Struct, frozen=True):
    """The sender of a request, as far as requests show it.

    Attributes:
        id: equal for all requests of one client. It may be made from a secret or a name, so it is
            never shown.
        priority: of this request; a lower number is served earlier.
    """

    id: str
    priority: int = 0


class Places:
    """The places of one model, and the requests that have them.

    Args:
        rows: how many requests need not wait.
        queue: how many requests may wait.
        clock: seconds; tests have their own.
    """

    def __init__(
        self, rows: int, queue: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rows = rows
        self._queue = queue
        self._limiter = anyio.CapacityLimiter(rows + queue)
        self._held: Counter[str] = Counter()
        self._turnover = Turnover(clock)

    @property
    def taken(self) -> int:
        return self._limiter.borrowed_tokens

    @property
    def turn(self) -> int:
        """The seconds until a request that comes now may have a row, at the pace of now."""
        return self._turnover.seconds(max(self.taken - self._rows, 0) + 1)

    def take(self, client: Client, model: str) -> None:
        """Take a place for a request, until it is given back. All requests to a model come through
        here.

        Raises:
            Overloaded: there is none for this client. The message names the model.
        """
        held, taken = self._held[client.id], self.taken
        if not self._limiter.available_tokens:
            raise Overloaded(
                f"{model} has {taken} requests already; try again shortly",
                retry_after=self._turnover.seconds(1),
            )
        if held >= fair_share(self._rows, self._queue, taken - held):
            raise Overloaded(
                f"{model} has {held} requests of this client already; the places that are left in "
                "the queue (--max-queue) are for other clients; try again shortly",
                # One of its own places must come back, which is one of so many.
                retry_after=self._turnover.seconds(taken // held),
            )
        self._limiter.acquire_on_behalf_of_nowait((client.id, held + 1))
        self._held[client.id] = held + 1
        self._turnover.borrow(1)

    def give_back(self, client: Client) -> None:
        self._limiter.release_on_behalf_of((client.id, self._held[client.id]))
        self._turnover.give_back(1)
        self._held[client.id] -= 1
        if not self._held[client.id]:
            del self._held[client.id]


def fair_share(rows: int, queue: int, others: int) -> int:
    """Return how many places one client may hold while other clients hold `others`.

    These are all rows and three quarters of the queue, both without what the others hold; of a
    queue of which one place is left, that place. The quarter is for clients that come later: each
    of them finds a place, and no client can take all. This is a dynamic threshold, as switches
    have it for packets in a shared memory (Choudhury and Hahne, IEEE/ACM Transactions on Networking
    6(2), 1998), with a factor of 3 between what one may hold and what is free.
    """
    free_rows = max(rows - others, 0)
    free_queue = rows + queue - others - free_rows
    return free_rows + max(free_queue * 3 // 4, min(free_queue, 1))


class Turnover:
    """The pace at which what is bounded (places at a model, bytes of bodies) comes back, so that a
    client that is refused hears when to try again.

    Args:
        clock: seconds; tests have their own.

    Attributes:
        held: how much is taken and was not given back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.held = 0
        self._clock = clock
        self._begun = 0.0
        self._returns: deque[tuple[float, int]] = deque(maxlen=_LATEST)  # when, and how much

    def borrow(self, amount: int) -> None:
        if not self.held:  # the pace of before is not that of clients who come now
            self._begun = self._clock()
            self._returns.clear()
        self.held += amount

    def give_back(self, amount: int) -> None:
        self.held -= amount
        if len(self._returns) == _LATEST:
            self._begun = self._returns[0][0]
        self._returns.append((self._clock(), amount))

    def seconds(self, amount: int) -> int:
        """Return in about how many seconds so much has come back, at the pace of the latest
        returns. The time since the last of them counts too; where there was none, it takes as long
        again."""
        passed = self._clock() - self._begun
        returned = sum(back for _, back in self._returns) or amount
        return min(max(math.ceil(passed * amount / returned), 1), _LONGEST)
