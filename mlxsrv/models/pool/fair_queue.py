"""The order in which those who wait for a row get one.

Rules:

- Requests of a lower priority number go first, whoever sent them. Within a number clients take
  turns, and the requests of one client keep their order.
- Turns go by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995). The clients stand in a
  ring. A visit to a client pays QUANTUM tokens of its debt; if none is left, its oldest request is
  served. So a client whose requests take four quanta is served in each fourth round.
- Nobody knows before what an answer costs. So a request is charged with what its client's
  requests took lately, and when its row is returned, the difference is settled. Without the charge
  in advance one client would get all rows until its first answer has ended.
- A debt is at most MOST_DEBT, so a client is passed over for at most MOST_DEBT / QUANTUM rounds
  after its last answer has ended. It is never below zero, so nobody saves up turns. When nobody
  waits, all debts are forgotten: there are rows for everybody.

So a client without debt that sends one request waits at most for one request of each other client,
however many those have in the queue.

`FairQueue` only decides: it knows no event loop, no clock, and no row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

QUANTUM = 512
"""Tokens that a client may have in each round. Cheaper requests count as one turn."""
MOST_DEBT = 16 * QUANTUM
"""Tokens. With more, a client that had a very long answer would wait long for its next one."""
_MEMORY = 4
"""Requests over which the cost of a client's requests is averaged."""


class FairQueue:
    """The borrowers that wait for a row of one model, and those that have one."""

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}  # by priority
        self._waiting: dict[Hashable, tuple[int, str]] = {}  # priority and client
        self._served: dict[Hashable, tuple[int, str]] = {}

    def __len__(self) -> int:
        """The number of requests that wait."""
        return len(self._waiting)

    @property
    def clients(self) -> int:
        """The number of clients that wait."""
        return len({client for _, client in self._waiting.values()})

    def join(self, borrower: Hashable, client: str, priority: int = 0) -> None:
        """Wait, behind the client's others of the same priority.

        Args:
            client: its id.
            priority: a lower number is served earlier.
        """
        self._waiting[borrower] = priority, client
        self._rings.setdefault(priority, _Ring()).join(borrower, client)

    def leave(self, borrower: Hashable) -> None:
        """Wait no longer."""
        priority, client = self._waiting.pop(borrower)
        self._rings[priority].leave(borrower, client)
        self._forget(priority)

    def serve_next(self) -> Hashable:
        """Take out the one whose turn it is. Raises LookupError if nobody waits."""
        priority = min(
            (number for number, ring in self._rings.items() if ring.waiting), default=None
        )
        if priority is None:
            raise LookupError("nobody waits")
        borrower = self._rings[priority].serve_next()
        self._served[borrower] = self._waiting.pop(borrower)
        return borrower

    def finish(self, borrower: Hashable, tokens: int) -> None:
        """Settle what one who was served has cost.

        Args:
            tokens: read and generated for it.
        """
        priority, client = self._served.pop(borrower)
        self._rings[priority].finish(borrower, client, tokens)
        self._forget(priority)

    def _forget(self, priority: int) -> None:
        if self._rings[priority].is_empty:
            del self._rings[priority]


class _Account:
    """One client: who waits, who is served, and what it owes.

    Attributes:
        waiting: those who wait, in the order of their arrival.
        charged: those who are served, with the tokens that they were charged in advance.
        debt: tokens.
        usual: tokens that its requests took lately.
    """

    __slots__ = ("charged", "debt", "usual", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Hashable, None] = OrderedDict()
        self.charged: dict[Hashable, int] = {}
        self.debt = 0
        self.usual = QUANTUM

    def charge(self, tokens: int) -> None:
        """Add to the debt, or take from it if `tokens` is negative; within its bounds."""
        self.debt = min(max(self.debt + tokens, 0), MOST_DEBT)


class _Ring:
    """The clients of one priority; the one to visit next is first.

    A client without requests stays in the ring while it has rows or debts.
    """

    def __init__(self) -> None:
        self.waiting = 0  # requests
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    @property
    def is_empty(self) -> bool:
        return not self._accounts

    def join(self, borrower: Hashable, client: str) -> None:
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = _Account()
        account.waiting[borrower] = None
        self.waiting += 1

    def leave(self, borrower: Hashable, client: str) -> None:
        del self._accounts[client].waiting[borrower]
        self._note_one_less()

    def serve_next(self) -> Hashable:
        """Take out the one whose turn it is. Somebody must wait.

        Each visit pays a quantum of what was charged before, or removes a client, or is to one that
        only has rows. So a long search is rare, however large the ring is.
        """
        while True:
            client, account = next(iter(self._accounts.items()))
            self._accounts.move_to_end(client)
            account.debt = max(account.debt - QUANTUM, 0)
            if account.debt:
                continue
            if account.waiting:
                return self._serve(account)
            if not account.charged:
                del self._accounts[client]

    def _serve(self, account: _Account) -> Hashable:
        borrower, _ = account.waiting.popitem(last=False)
        account.charged[borrower] = account.usual
        account.charge(account.usual)
        self._note_one_less()
        return borrower

    def finish(self, borrower: Hashable, client: str, tokens: int) -> None:
        account = self._accounts[client]
        account.charge(tokens - account.charged.pop(borrower))
        account.usual += (tokens - account.usual) // _MEMORY
        self._forget_debts()

    def _note_one_less(self) -> None:
        self.waiting -= 1
        self._forget_debts()

    def _forget_debts(self) -> None:
        """Forget all debts, and the clients who have no row, if nobody waits."""
        if self.waiting:
            return
        for client, account in list(self._accounts.items()):
            account.debt = 0
            if not account.charged:
                del self._accounts[client]
