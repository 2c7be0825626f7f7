"""The kept prompts that are used again and again stay, whatever comes once meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.kept_prompts import KINDS, Kind, Simulation, simulate
from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.scheduling.prompt_index import PromptIndex, as_tokens
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


def play(requests: list[Request], kind: Kind, most_bytes: int) -> Simulation:
    """Give an index these requests, each when the one before has its answer."""
    index = PromptIndex(most_bytes, cuts=kind.cuts)
    simulation = Simulation(kind, index)
    simulation.play([each._replace(at=100.0 * i) for i, each in enumerate(requests)])
    return simulation


# Worth by itself.


class Kept:
    """An index, and what is evicted from it. Prompts are named by numbers; one goes on from another
    where that is its `parent`."""

    def __init__(self) -> None:
        self._index = PromptIndex(1 << 30, cuts=False)
        self._texts: dict[int, list[int]] = {}
        self._entries: dict[int, int] = {}

    def add(self, name: int, tokens: int, bytes: int, parent: int | None = None) -> None:
        begin = [] if parent is None else self._texts[parent]
        text = [*begin, *range(10_000 * name, 10_000 * name + tokens - len(begin))]
        keep = self._index.promise(as_tokens(text))
        self._index.confirm([keep], [KeptPrompt(keep.entry, bytes, cuts=False)])
        self._texts[name], self._entries[keep.entry] = text, name

    def use(self, name: int, tokens: int) -> None:
        [number] = [number for number, known in self._entries.items() if known == name]
        self._index.use(number, tokens)

    def evict(self) -> int:
        """Evict one. Returns its name."""
        self._index.give_way(1)
        [number] = self._index.take_dropped()
        return self._entries[number]


def test_of_equals_the_one_that_was_kept_or_used_longest_ago_goes() -> None:
    for used, goes in ((), 1), ((3, 1, 2), 3):
        kept = Kept()
        for name in (1, 2, 3):
            kept.add(name, 100, 100)
        for name in used:
            kept.use(name, 50)
        assert kept.evict() == goes


@pytest.mark.parametrize(
    ("tokens", "bytes", "goes"), [(100, 100, 1), (99, 100, 2), (100, 101, 2), (200, 100, 1)]
)
def test_the_one_that_saves_least_by_the_byte_goes(tokens: int, bytes: int, goes: int) -> None:
    kept = Kept()
    kept.add(1, 100, 100)
    kept.add(2, tokens, bytes)
    assert kept.evict() == goes


def test_a_use_counts_with_what_it_saved() -> None:
    kept = Kept()
    for name, saved in ((1, 10), (2, 1000), (3, 100)):
        kept.add(name, 1000, 1000)
        kept.use(name, saved)
    assert [kept.evict() for _ in range(3)] == [1, 3, 2]


def test_what_goes_on_from_a_prompt_has_its_uses_and_the_next_branches_off() -> None:
    turned, branched = Kept(), Kept()
    for kept in (turned, branched):
        kept.add(1, 100, 100)
        kept.use(1, 100)
        kept.add(2, 150, 150, parent=1)  # the next turn
        kept.add(3, 100, 100)
    assert turned.evict() == 1
    branched.use(1, 100)
    branched.use(1, 100)
    branched.add(4, 150, 150, parent=1)  # a branch: 1 is worth what more go on from it
    assert [branched.evict() for _ in range(2)] == [3, 4]


def test_what_was_used_often_goes_in_the_end() -> None:
    kept = Kept()
    kept.add(0, 100, 100)
    for _ in range(1000):
        kept.use(0, 100)
    for name in range(1, 101):
        kept.add(name, 100, 100)
    for name in range(101, 2000):
        kept.add(name, 100, 100)
        if kept.evict() == 0:
            break
    assert 500 < name < 1500, "it outlasts some generations of the others, and not all"


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
    found = play(requests, kind, bound).found
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
    assert 40 * bytes_of(kind, 2000) > bound, "or the flood is none"
    found = play(requests, kind, bound).found
    assert found.asked["agent"] - found.found["agent"] <= HEAD + 200 + 12 * 200


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
    found = play(requests, attention, 20_000).found
    assert found.found["question"] == 19 * 1500


def test_a_state_that_was_gone_on_from_goes_before_the_newest() -> None:
    """Caches that cannot be cut back are of no use to anyone within a chat."""
    [_, recurrent] = KINDS
    chat = Talk(1, head=1000)
    requests = [chat.ask(0.0) for _ in range(20)]
    bound = 3 * bytes_of(recurrent, chat.size)
    simulation = play(requests, recurrent, bound)
    found = simulation.found
    assert found.asked["agent"] - found.found["agent"] <= 1000 + 20 * 200


@pytest.mark.parametrize(
    ("kind", "shares"),
    [(KINDS[0], (0.39, 0.77, 0.87)), (KINDS[1], (0.28, 0.63, 0.81))],
    ids=lambda each: each.name if isinstance(each, Kind) else "",
)
def test_on_a_mix_of_traffic_most_is_found(kind: Kind, shares: tuple[float, ...]) -> None:
    """More than with any other policy that was tried: see the page of benchmarks."""
    mix = make_traffic(900, seed=5)
    for bound, least in zip((32_000, 64_000, 96_000), shares, strict=True):
        found = simulate(mix, kind, bound).share
        assert found >= least, (bound, found)


def test_the_mix_is_the_same_each_time() -> None:
    assert make_traffic(300, seed=3) == make_traffic(300, seed=3)
    kinds = {request.kind for request in make_traffic(900)}
    assert kinds == {"agent", "sub-agent", "chat", "question", "one-off"}
