"""Clients take turns: the rules one by one, then any order of events."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mlxsrv.engine.orders import Turn
from mlxsrv.engine.scheduling.fair_queue import MOST_DEBT, QUANTUM, FairQueue
from tests.support.effort import examples

Account = tuple[str, int]
"""A client with a priority."""

ROUNDS = MOST_DEBT // QUANTUM
"""For so many rounds a client may be passed over."""


def queue_of(*waiting: str, priorities: Sequence[int] = ()) -> FairQueue[str]:
    """A queue of borrowers whose clients are their first letters."""
    queue = FairQueue[str]()
    for borrower, priority in zip(waiting, priorities or [0] * len(waiting), strict=True):
        queue.enqueue(borrower, Turn(borrower[0], priority))
    return queue


def served(queue: FairQueue[str], number: int | None = None, *, tokens: int = 0) -> list[str]:
    """Serve so many, or all, one after the other; each costs `tokens`."""
    order = []
    for _ in range(len(queue) if number is None else number):
        borrower = queue.serve_next()
        order.append(str(borrower))
        queue.finish(borrower, tokens)
    return order


@pytest.mark.parametrize(
    ("waiting", "order"),
    [
        ("a1", "a1"),
        ("a1 a2 a3", "a1 a2 a3"),
        ("a1 a2 b1 b2", "a1 b1 a2 b2"),
        ("a1 a2 a3 a4 b1 c1", "a1 b1 c1 a2 a3 a4"),
        ("a1 b1 a2 c1 c2 b2", "a1 b1 c1 a2 b2 c2"),
    ],
)
def test_clients_take_turns_and_each_keeps_its_order(waiting: str, order: str) -> None:
    assert served(queue_of(*waiting.split())) == order.split()


def test_a_lower_number_goes_first_whoever_sent_it() -> None:
    waiting = ["a1", "a2", "b1", "a3", "c1", "a4"]
    queue = queue_of(*waiting, priorities=[0, 0, 5, -1, -1, 5])
    assert served(queue) == ["a3", "c1", "a1", "a2", "b1", "a4"]


def test_a_request_waits_for_one_of_each_other_client_however_many_they_have() -> None:
    queue = queue_of(*(f"{client}{i}" for client in "abc" for i in range(500)))
    for borrower in [queue.serve_next() for _ in range(8)]:  # on as many rows
        queue.finish(borrower, QUANTUM)
    queue.enqueue("d1", Turn("d"))
    assert served(queue, 4, tokens=QUANTUM).index("d1") <= 3


@pytest.mark.parametrize("rows", [1, 4, 32])
@pytest.mark.parametrize(
    ("costs", "turns"),
    [
        ((QUANTUM, QUANTUM), (1, 1)),
        ((4 * QUANTUM, QUANTUM), (1, 4)),
        ((6 * QUANTUM, 2 * QUANTUM), (1, 3)),
        ((1, QUANTUM), (1, 1)),
        # A debt has a bound, so there are more turns than the tokens alone would give.
        ((100 * QUANTUM, QUANTUM), (1, ROUNDS)),
    ],
)
def test_turns_are_weighted_by_tokens(
    rows: int, costs: tuple[int, int], turns: tuple[int, int]
) -> None:
    """Two clients who always have requests waiting, on so many rows."""
    names, cost = "ab", dict(zip("ab", costs, strict=True))
    queue, running, counted = FairQueue[str](), deque[str](), Counter[str]()
    for i in range(4000):
        for name in names:
            queue.enqueue(f"{name}{i}", Turn(name))
    for i in range(4000):
        borrower = str(queue.serve_next())
        running.append(borrower)
        counted[borrower[0]] += i >= 1000  # when the costs are known
        if len(running) == rows:
            ended = running.popleft()
            queue.finish(ended, cost[ended[0]])
    assert counted["b"] / counted["a"] == pytest.approx(turns[1] / turns[0], rel=0.1)


def test_rows_are_shared_before_the_first_answer_has_ended() -> None:
    """Nobody has cost anything yet, so only the charge in advance can tell."""
    queue = queue_of(*(f"{client}{i}" for client in "ab" for i in range(20)))
    first = [str(queue.serve_next()) for _ in range(16)]
    assert Counter(name[0] for name in first) == {"a": 8, "b": 8}


def test_after_a_very_long_answer_a_client_is_passed_over_for_a_bounded_time() -> None:
    queue = queue_of("a1", "a2", *(f"b{i}" for i in range(100)))
    queue.finish(queue.serve_next(), 10**9)
    assert served(queue, ROUNDS + 1, tokens=1).count("a2") == 1


def test_who_was_away_has_saved_up_nothing() -> None:
    queue = queue_of("a0", *(f"b{i}" for i in range(100)))
    assert served(queue, 50, tokens=QUANTUM)[0] == "a0"
    for i in range(1, 11):
        queue.enqueue(f"a{i}", Turn("a"))
    order = served(queue, 20, tokens=QUANTUM)
    assert sum(name[0] == "a" for name in order) == 10


def test_who_was_away_has_paid_by_the_turns_of_others() -> None:
    queue = queue_of("a1", *(f"b{i}" for i in range(100)))
    queue.finish(queue.serve_next(), 4 * QUANTUM)
    served(queue, 4, tokens=QUANTUM)
    queue.enqueue("a2", Turn("a"))
    assert "a2" in served(queue, 2, tokens=QUANTUM)


def test_debts_are_forgotten_when_nobody_waits() -> None:
    queue = queue_of("a0", "a1", "b0")
    first, *_ = [queue.serve_next() for _ in range(3)]
    queue.finish(first, 10**6)  # and its client still has a row
    for borrower in ("b1", "b2", "a2"):
        queue.enqueue(borrower, Turn(borrower[0]))
    assert served(queue).index("a2") <= 1


def test_requests_that_cost_less_than_they_were_charged_save_up_no_turns() -> None:
    queue = queue_of(*(f"{client}{i}" for client in "ab" for i in range(100)))
    served(queue, 40, tokens=4 * QUANTUM)
    *short, long = [queue.serve_next() for _ in range(21)]
    for borrower in short:
        queue.finish(borrower, 0)
    queue.finish(long, 2 * MOST_DEBT)
    client = str(long)[0]
    assert all(name[0] != client for name in served(queue, ROUNDS - 2, tokens=1))


def test_new_clients_without_end_do_not_starve_one_in_debt() -> None:
    queue = queue_of("a1", "b1", "a2")
    queue.finish(queue.serve_next(), 10**6)
    for i in range(3 * ROUNDS):
        queue.enqueue(f"new{i}", Turn(f"new{i}"))
        borrower = queue.serve_next()
        queue.finish(borrower, 1)
        if borrower == "a2":
            return
    pytest.fail("a2 was starved")


def test_requests_of_a_client_go_in_the_order_in_which_they_came() -> None:
    """Not in that in which their prompts were made tokens."""
    queue = FairQueue[str]()
    for job, arrival in (("a3", 3), ("a1", 1), ("a4", 4), ("a2", 2), ("a2 again", 2)):
        queue.enqueue(job, Turn("a", arrival=arrival))
    assert served(queue) == ["a1", "a2", "a2 again", "a3", "a4"]


def test_to_look_who_is_next_changes_nothing() -> None:
    looked, other = (queue_of("a1", "a2", "b1", "b2", "c1") for _ in range(2))
    for queue in (looked, other):
        queue.finish(queue.serve_next(), 4 * QUANTUM)
    order = []
    while len(looked):
        for _ in range(9):
            assert looked.next is not None
        order.append(looked.serve_next())
        looked.finish(order[-1], QUANTUM)
    assert order == served(other, tokens=QUANTUM)


def test_who_leaves_is_not_served_and_costs_nothing() -> None:
    queue = queue_of("a1", "a2", "a3", "b1")
    queue.leave("a1")
    queue.leave("a3")
    assert (len(queue), len(queue._served)) == (2, 0)
    assert served(queue) == ["a2", "b1"]
    with pytest.raises(LookupError):
        queue.serve_next()


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-1, 1)), max_size=60))
def test_everybody_is_served_once_in_order(waiting: list[tuple[str, int]]) -> None:
    queue = FairQueue[int]()
    for i, (client, priority) in enumerate(waiting):
        queue.enqueue(i, Turn(client, priority))
    order = [int(str(queue.serve_next())) for _ in waiting]
    assert sorted(order) == list(range(len(waiting)))
    priorities = [waiting[i][1] for i in order]
    assert priorities == sorted(priorities)
    for client in {client for client, _ in waiting}:
        own = [i for i in order if waiting[i][0] == client]
        assert own == sorted(own, key=lambda i: (waiting[i][1], i))
    assert len(queue) == 0


class Turns(RuleBasedStateMachine):
    """Clients come, leave, are served and return their rows, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = FairQueue[int]()
        self.waiting: dict[int, Account] = {}
        self.running: dict[int, Account] = {}
        self.ahead: dict[int, Counter[str]] = {}
        """The number of others of its priority that were served while one waits, if its client
        came without a debt and with no other request."""
        self.indebted: set[Account] = set()
        self.number = 0

    @rule(client=st.sampled_from("abcd"), priority=st.sampled_from([0, 0, 0, 1]))
    def come(self, client: str, priority: int) -> None:
        self.number += 1
        account = (client, priority)
        if account not in self.indebted | {*self.waiting.values(), *self.running.values()}:
            self.ahead[self.number] = Counter()
        self.waiting[self.number] = account
        self.queue.enqueue(self.number, Turn(client, priority))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(sorted(self.waiting)))
        self.queue.leave(one)
        self.forget(one)

    @precondition(lambda self: self.waiting)
    @rule()
    def serve(self) -> None:
        told = self.queue.next
        one = self.queue.serve_next()
        assert one == told, "who was said to be next is"
        account = client, priority = self.waiting[one]
        assert priority == min(level for _, level in self.waiting.values())
        assert one == min(other for other, its in self.waiting.items() if its == account)
        assert max(self.ahead.get(one, Counter()).values(), default=0) <= 1
        self.running[one] = account
        self.indebted.add(account)
        self.forget(one)
        for other, ahead in self.ahead.items():
            ahead[client] += self.waiting[other][1] == priority

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 2 * MOST_DEBT))
    def finish(self, data: st.DataObject, tokens: int) -> None:
        one = data.draw(st.sampled_from(sorted(self.running)))
        account = self.running.pop(one)
        self.queue.finish(one, tokens)
        if account[1] in {level for _, level in self.waiting.values()}:
            self.indebted.add(account)

    def forget(self, one: int) -> None:
        _, priority = self.waiting.pop(one)
        self.ahead.pop(one, None)
        if priority not in {level for _, level in self.waiting.values()}:
            self.indebted = {account for account in self.indebted if account[1] != priority}

    @invariant()
    def tells_its_state(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert len(self.queue._served) == len(self.running)
        assert (self.queue.next is None) == (not self.waiting)

    def teardown(self) -> None:
        """When all have left, nothing is kept of them."""
        for one in sorted(self.waiting):
            self.queue.leave(one)
        for one in sorted(self.running):
            self.queue.finish(one, 1)
        assert self.queue._rings == {}


TestTurns = Turns.TestCase
TestTurns.settings = settings(max_examples=examples(50), stateful_step_count=40)
