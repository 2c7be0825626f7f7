"""The kept prompts that are used again and again stay, whatever comes once meanwhile."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from benchmarks.kept_prompts import KINDS, POLICIES, Kind, Lru, Simulation, simulate
from mlxsrv.engine.scheduling.prompt_index import PromptIndex
from mlxsrv.engine.scheduling.prompt_worth import Eviction, PromptWorth
from tests.support.traffic import Piece, Request, Text, make_traffic, size

EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
HEAD = 8000
ANSWER = 100


def bytes_of(kind: Kind, tokens: int) -> int:
    return kind.cost.fixed + kind.cost.per_token * tokens


class Talk:
    """Somebody who asks, and asks again behind the answer."""

    def __init__(self, name: int, head: int = HEAD) -> None:
        self._seeds = iter(range(1000 * name, 1000 * name + 999))
        self._head = Piece(next(self._seeds), head)
        self.said: Text = ()

    def ask(self, at: float, kind: str = "agent") -> Request:
        self.said = (*self.said, Piece(next(self._seeds), 200))
        prompt = (self._head, *self.said)
        answer = Piece(next(self._seeds), ANSWER)
        self.said = (*self.said, answer)
        return Request(at, kind, prompt, self._head.size, answer)

    @property
    def size(self) -> int:
        return self._head.size + size(self.said)


def one_offs(count: int, tokens: int = 2000) -> Iterator[Request]:
    for number in range(count):
        yield Request(0.0, "flood", (Piece(900_000 + number, tokens),), 0, Piece(number, ANSWER))


def play(
    requests: list[Request], kind: Kind, most_bytes: int, policy: Callable[[], Eviction]
) -> Simulation:
    """Give an index these requests, each when the one before has its answer."""
    index = PromptIndex(most_bytes, cuts=kind.cuts, worth=policy())
    simulation = Simulation(kind, index)
    simulation.play([each._replace(at=100.0 * i) for i, each in enumerate(requests)])
    return simulation


# Worth by itself.


def test_of_equals_the_one_that_was_kept_or_used_longest_ago_goes() -> None:
    worth = PromptWorth()
    for number in (1, 2, 3):
        worth.add(number, 100, 100)
    assert worth.choose() == 1
    for number in (3, 1, 2):
        worth.use(number, 50)
    assert worth.choose() == 3


@pytest.mark.parametrize(
    ("tokens", "bytes", "goes"), [(100, 100, 1), (99, 100, 2), (100, 101, 2), (200, 100, 1)]
)
def test_the_one_that_saves_least_by_the_byte_goes(tokens: int, bytes: int, goes: int) -> None:
    worth = PromptWorth()
    worth.add(1, 100, 100)
    worth.add(2, tokens, bytes)
    assert worth.choose() == goes


def test_a_use_counts_with_what_it_saved() -> None:
    worth = PromptWorth()
    for number, saved in ((1, 10), (2, 1000), (3, 100)):
        worth.add(number, 1000, 1000)
        worth.use(number, saved)
    order = []
    for _ in range(3):
        order.append(worth.choose())
        worth.remove(order[-1])
    assert order == [1, 3, 2]


def test_what_goes_on_from_a_prompt_has_its_uses_and_the_next_branches_off() -> None:
    worth = PromptWorth()
    worth.add(1, 100, 100)
    worth.use(1, 100)
    worth.add(2, 150, 150, parent=1)  # the next turn
    worth.add(3, 100, 100)
    assert worth.choose() == 1
    worth.use(1, 100)
    worth.use(1, 100)
    worth.add(4, 150, 150, parent=1)  # a branch: 1 is worth what more go on from it
    for number in (3, 4):
        assert worth.choose() == number
        worth.remove(number)


def test_what_takes_a_prompts_place_has_its_uses() -> None:
    worth = PromptWorth()
    worth.add(1, 100, 100)
    for _ in range(3):
        worth.use(1, 100)
    worth.add(2, 200, 200, parent=1)
    worth.use(1, 100)
    worth.remove(1, heir=2)
    worth.add(3, 100, 100)
    worth.use(3, 100)
    assert worth.choose() == 3


def test_what_was_used_often_goes_in_the_end() -> None:
    worth = PromptWorth()
    worth.add(0, 100, 100)
    for _ in range(1000):
        worth.use(0, 100)
    for number in range(1, 101):
        worth.add(number, 100, 100)
    for number in range(101, 2000):
        worth.add(number, 100, 100)
        gone = worth.choose()
        worth.remove(gone)
        if gone == 0:
            break
    assert 500 < number < 1500, "it outlasts some generations of the others, and not all"


# Traffic.


@EACH_KIND
@pytest.mark.parametrize("turns_by", ["turn", "chance"])
def test_four_agents_who_take_turns_all_hit(kind: Kind, turns_by: str) -> None:
    dice = random.Random(1)
    agents = [Talk(number) for number in range(1, 5)]
    order = [agents[turn % 4] for turn in range(40)]
    if turns_by == "chance":
        order = agents + [dice.choice(agents) for _ in range(36)]
    requests = [agent.ask(0.0) for agent in order]
    # Each has its newest state within the bound, and one more while the next is being made.
    bound = sum(bytes_of(kind, agent.size) for agent in agents) + bytes_of(kind, HEAD)
    found = play(requests, kind, bound, PromptWorth).found
    misses = found.asked["agent"] - found.found["agent"]
    assert misses <= 4 * (HEAD + 200) + 36 * 200, "more than what is new is read"


@EACH_KIND
def test_a_flood_does_not_push_out_what_is_used_again_and_again(kind: Kind) -> None:
    agent = Talk(1)
    requests: list[Request] = [agent.ask(0.0) for _ in range(3)]
    flood = one_offs(400)
    for _ in range(10):
        requests += [next(flood) for _ in range(40)]
        requests.append(agent.ask(0.0))
    bound = 4 * bytes_of(kind, HEAD + 4000)

    def misses(policy: Callable[[], Eviction]) -> int:
        found = play(requests, kind, bound, policy).found
        return found.asked["agent"] - found.found["agent"]

    new = HEAD + 200 + 12 * 200
    assert misses(PromptWorth) <= new
    assert misses(Lru) > new + 9 * HEAD, "or the flood was none"


def test_a_common_system_prompt_outlasts_what_follows_it() -> None:
    [attention, _] = KINDS
    system = Piece(1, 1500)
    questions = [
        Request(0.0, "question", (system, Piece(100 + n, 300)), 1500, Piece(5000 + n, 80))
        for n in range(20)
    ]
    requests: list[Request] = questions[:3]
    flood = one_offs(400)
    for question in questions[3:]:
        requests += [question, *(next(flood) for _ in range(20))]
    found = play(requests, attention, 20_000, PromptWorth).found
    assert found.found["question"] == 19 * 1500


def test_a_state_that_was_gone_on_from_goes_before_the_newest() -> None:
    """Caches that cannot be cut back are of no use to anyone within a chat."""
    [_, recurrent] = KINDS
    chat = Talk(1, head=1000)
    requests = [chat.ask(0.0) for _ in range(20)]
    bound = 3 * bytes_of(recurrent, chat.size)
    simulation = play(requests, recurrent, bound, PromptWorth)
    found = simulation.found
    assert found.asked["agent"] - found.found["agent"] <= 1000 + 20 * 200


@EACH_KIND
def test_on_a_mix_of_traffic_more_is_found_than_with_any_other_policy(kind: Kind) -> None:
    mix = make_traffic(900, seed=5)
    for bound in (32_000, 64_000, 96_000):
        shares = {name: simulate(mix, kind, bound, make).share for name, make in POLICIES.items()}
        best = shares.pop("greedy-dual")
        assert best >= max(shares.values()), (bound, best, shares)


def test_the_mix_is_the_same_each_time() -> None:
    assert make_traffic(300, seed=3) == make_traffic(300, seed=3)
    kinds = {request.kind for request in make_traffic(900)}
    assert kinds == {"agent", "sub-agent", "chat", "question", "one-off"}
