"""The line of one model: its jobs that wait, and whose turn it is to get a slot.

Rules:

- Jobs of a lower priority number go first, whoever sent them. Within a number clients take turns,
  and the jobs of one client go in the order in which their requests came, however long it took to
  make tokens of their prompts.
- Turns go by deficit round robin (Shreedhar and Varghese, SIGCOMM 1995). The clients stand in a
  ring. A visit to a client pays QUANTUM tokens of its debt; if none is left, its oldest job is
  served. So a client whose jobs take four quanta is served in each fourth round.
- Nobody knows before what an answer costs. So a job is charged with what its client's jobs took
  lately, and when it ends, the difference is settled. Without the charge in advance one client
  would get all slots until its first answer has ended.
- A debt is at most MOST_DEBT, so a client is passed over for at most MOST_DEBT / QUANTUM rounds
  after its last answer has ended. It is never below zero, so nobody saves up turns. When nobody
  waits, all debts are forgotten: there are slots for everybody.

So a client without debt that sends one request waits at most for one request of each other client,
however many those have in the queue.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable
from itertools import count
from typing import Generic, TypeVar

from mlxsrv.engine.orders import Turn

T = TypeVar("T", bound=Hashable)

QUANTUM = 512
"""Tokens that a client may have in each round. Cheaper requests count as one turn."""
MOST_DEBT = 16 * QUANTUM
"""Tokens. With more, a client that had a very long answer would wait long for its next one."""
_MEMORY = 4
"""Jobs over which the cost of a client's jobs is averaged."""


class FairQueue(Generic[T]):
    """The jobs of one model that wait, and those that are served."""

    def __init__(self) -> None:
        self._rings: dict[int, _Ring[T]] = {}  # by priority
        self._waiting: dict[T, tuple[Turn, int]] = {}  # with the number of each
        self._served: dict[T, Turn] = {}
        self._numbers = count()

    def __len__(self) -> int:
        """The number of jobs that wait."""
        return len(self._waiting)

    def enqueue(self, job: T, turn: Turn) -> None:
        """Wait, behind the client's others of the same priority that came before."""
        number = next(self._numbers)
        self._waiting[job] = turn, number
        self._rings.setdefault(turn.priority, _Ring()).enqueue(job, turn, number)

    def leave(self, job: T) -> None:
        """Wait no longer."""
        turn, number = self._waiting.pop(job)
        self._rings[turn.priority].leave(turn, number)
        self._forget(turn)

    @property
    def next(self) -> T | None:
        """The job whose turn it is, until another comes that goes first; None: nobody waits."""
        priority = self._first_priority()
        return None if priority is None else self._rings[priority].find_next()

    def serve_next(self) -> T:
        """Take out the one whose turn it is. Raises LookupError if nobody waits."""
        priority = self._first_priority()
        if priority is None:
            raise LookupError("nobody waits")
        job = self._rings[priority].serve_next()
        self._served[job], _ = self._waiting.pop(job)
        return job

    def _first_priority(self) -> int | None:
        waiting = (number for number, ring in self._rings.items() if ring.waiting)
        return min(waiting, default=None)

    def finish(self, job: T, tokens: int) -> None:
        """Settle what one that was served has cost.

        Args:
            tokens: read and generated for it.
        """
        turn = self._served.pop(job)
        self._rings[turn.priority].finish(job, turn.client, tokens)
        self._forget(turn)

    def _forget(self, turn: Turn) -> None:
        if self._rings[turn.priority].is_empty:
            del self._rings[turn.priority]


class _Account(Generic[T]):
    """One client: who waits, who is served, and what it owes.

    Attributes:
        waiting: those who wait, in the order of their arrival: two numbers, and the job.
        charged: those who are served, with the tokens that they were charged in advance.
        debt: tokens.
        usual: tokens that its jobs took lately.
    """

    __slots__ = ("charged", "debt", "usual", "waiting")

    def __init__(self) -> None:
        self.waiting: list[tuple[int, int, T]] = []
        self.charged: dict[T, int] = {}
        self.debt = 0
        self.usual = QUANTUM

    def charge(self, tokens: int) -> None:
        """Add to the debt, or take from it if `tokens` is negative; within its bounds."""
        self.debt = min(max(self.debt + tokens, 0), MOST_DEBT)


class _Ring(Generic[T]):
    """The clients of one priority; the one that is visited now, or next, is first.

    A client without jobs stays in the ring while it has slots or debts.
    """

    def __init__(self) -> None:
        self.waiting = 0  # jobs
        self._accounts: OrderedDict[str, _Account[T]] = OrderedDict()
        self._visiting = False  # the first client has paid in this visit

    @property
    def is_empty(self) -> bool:
        return not self._accounts

    def enqueue(self, job: T, turn: Turn, number: int) -> None:
        account = self._accounts.get(turn.client)
        if account is None:
            account = self._accounts[turn.client] = _Account()
        # The numbers differ, so jobs are never compared.
        insort(account.waiting, (turn.arrival, number, job))
        self.waiting += 1

    def leave(self, turn: Turn, number: int) -> None:
        waiting = self._accounts[turn.client].waiting
        del waiting[bisect_left(waiting, (turn.arrival, number))]
        self._note_one_less()

    def find_next(self) -> T:
        """The one whose turn it is. Somebody must wait."""
        _, _, job = self._visit().waiting[0]
        return job

    def serve_next(self) -> T:
        """Take out the one whose turn it is. Somebody must wait."""
        account = self._visit()
        _, _, job = account.waiting.pop(0)
        account.charged[job] = account.usual
        account.charge(account.usual)
        self._go_on()
        self._note_one_less()
        return job

    def _visit(self) -> _Account[T]:
        """Go to the client whose turn it is, unless it is being visited.

        Each visit pays a quantum of what was charged before, or removes a client, or is to one that
        only has slots. So a long search is rare, however large the ring is.
        """
        while True:
            client, account = next(iter(self._accounts.items()))
            if not self._visiting:
                self._visiting = True
                account.debt = max(account.debt - QUANTUM, 0)
            if account.waiting and not account.debt:
                return account
            self._go_on()
            if not (account.waiting or account.debt or account.charged):
                del self._accounts[client]

    def _go_on(self) -> None:
        """End the visit to the first client."""
        self._accounts.move_to_end(next(iter(self._accounts)))
        self._visiting = False

    def finish(self, job: T, client: str, tokens: int) -> None:
        account = self._accounts[client]
        account.charge(tokens - account.charged.pop(job))
        account.usual += (tokens - account.usual) // _MEMORY
        self._forget_debts()

    def _note_one_less(self) -> None:
        self.waiting -= 1
        self._forget_debts()

    def _forget_debts(self) -> None:
        """Forget all debts, and the clients who have no slot, if nobody waits."""
        if self.waiting:
            return
        self._visiting = False
        for client, account in list(self._accounts.items()):
            account.debt = 0
            if not account.charged:
                del self._accounts[client]
