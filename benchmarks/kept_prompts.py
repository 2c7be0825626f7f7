"""Count which kept prompts stay: `python -m benchmarks.kept_prompts`.

Gives a mix of requests to the prompt index, without a model: coding agents, sub-agents, chats,
questions with one system prompt, floods of prompts that come once, retries (see
`tests/support/traffic.py`). Prints the share of all tokens of prompts that need not be read, for
several policies and several bounds.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from statistics import fmean

import msgspec

from benchmarks.report import format_table
from mlxsrv.engine.events import KVCost
from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.scheduling.prompt_index import PromptIndex, Tokens
from mlxsrv.engine.scheduling.prompt_worth import Eviction, PromptWorth
from tests.support.traffic import Request, make_traffic, tokens

_SECONDS = 3600.0
_BOUNDS = (32_000, 64_000, 96_000, 128_000, 256_000)


class Kind(msgspec.Struct, frozen=True):
    """A kind of model. A byte here is what a token takes in all its attention layers."""

    name: str
    cuts: bool
    cost: KVCost


KINDS = (
    Kind("full attention", cuts=True, cost=KVCost(1)),
    Kind("hybrid, recurrent", cuts=False, cost=KVCost(1, fixed=2000)),
)


# Policies.


class Lru:
    """The least recently used goes."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def add(self, number: int, tokens: int, bytes: int, parent: int | None) -> None:
        self._order[number] = None

    def use(self, number: int, tokens: int) -> None:
        self._order.move_to_end(number)

    def remove(self, number: int, heir: int | None) -> tuple[int, ...]:
        del self._order[number]
        return ()

    def choose(self) -> int:
        return next(iter(self._order))


class S3Fifo:
    """New prompts wait in a small queue. What is used there moves to the main one, where a use is
    another round. After Yang et al., 2023, but without a memory of what has gone: a prompt that
    comes back has grown, so it is another. One that goes on from another has its uses."""

    def __init__(self) -> None:
        self._small: OrderedDict[int, int] = OrderedDict()  # bytes
        self._main: OrderedDict[int, int] = OrderedDict()
        self._uses: Counter[int] = Counter()

    def add(self, number: int, tokens: int, bytes: int, parent: int | None) -> None:
        queue = self._small
        if parent is not None:
            self._uses[number] = self._uses[parent]
            self._uses[parent] = 0
            if parent in self._main or self._uses[number]:
                queue = self._main
        queue[number] = bytes

    def use(self, number: int, tokens: int) -> None:
        self._uses[number] = min(self._uses[number] + 1, 3)

    def remove(self, number: int, heir: int | None) -> tuple[int, ...]:
        self._small.pop(number, None)
        self._main.pop(number, None)
        self._uses.pop(number, None)
        return ()

    def choose(self) -> int:
        small, main = sum(self._small.values()), sum(self._main.values())
        while self._small and (small * 10 > small + main or not self._main):
            number, bytes = self._small.popitem(last=False)
            if not self._uses[number]:
                self._small[number] = bytes
                return number
            self._main[number] = bytes
            small, main = small - bytes, main + bytes
        while True:
            number, bytes = self._main.popitem(last=False)
            self._main[number] = bytes
            if not self._uses[number]:
                return number
            self._uses[number] -= 1


class TinyLfu:
    """A window of the newest, and a main part that only those enter that were used more often than
    the least recently used there; uses are halved once in a while. After Einziger et al., 2017,
    but uses are counted of kept prompts only. One that goes on from another has its uses."""

    def __init__(self) -> None:
        self._window: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._uses: Counter[int] = Counter()
        self._samples = 0

    def add(self, number: int, tokens: int, bytes: int, parent: int | None) -> None:
        self._uses[number] += 1
        if parent is not None:
            self._uses[number] += self._uses[parent]
            self._uses[parent] = 0
        (self._main if parent in self._main else self._window)[number] = bytes
        self._age()

    def use(self, number: int, tokens: int) -> None:
        self._uses[number] = min(self._uses[number] + 1, 15)
        for queue in (self._window, self._main):
            if number in queue:
                queue.move_to_end(number)
        self._age()

    def _age(self) -> None:
        self._samples += 1
        if self._samples >= 10 * (len(self._window) + len(self._main)):
            self._samples = 0
            for number in self._uses:
                self._uses[number] //= 2

    def remove(self, number: int, heir: int | None) -> tuple[int, ...]:
        self._window.pop(number, None)
        self._main.pop(number, None)
        self._uses.pop(number, None)
        return ()

    def choose(self) -> int:
        window, main = sum(self._window.values()), sum(self._main.values())
        while self._window and (window * 10 > window + main):
            number, bytes = next(iter(self._window.items()))
            if self._main:
                victim = next(iter(self._main))
                if self._uses[number] <= self._uses[victim]:
                    return number
                del self._window[number]
                self._main[number] = bytes
                return victim
            del self._window[number]
            self._main[number] = bytes
            window, main = window - bytes, main + bytes
        return next(iter(self._main or self._window))


POLICIES: dict[str, Callable[[], Eviction]] = {
    "LRU": Lru,
    "S3-FIFO": S3Fifo,
    "W-TinyLFU": TinyLfu,
    "greedy-dual": PromptWorth,
}


# The simulation.


class Found(msgspec.Struct):
    """The tokens that were asked for and those that were found, by who asked."""

    asked: Counter[str]
    found: Counter[str]

    @property
    def share(self) -> float:
        return self.found.total() / self.asked.total()

    def share_of(self, kind: str) -> float:
        return self.found[kind] / self.asked[kind]


class Simulation:
    """One index, and the requests that it is given."""

    def __init__(self, kind: Kind, index: PromptIndex) -> None:
        self.found = Found(Counter(), Counter())
        self._kind = kind
        self._index = index
        self._ends: list[tuple[float, int, Tokens, int]] = []

    def play(self, requests: Sequence[Request]) -> Found:
        for number, request in enumerate(requests):
            while self._ends and self._ends[0][0] <= request.at:
                _, _, whole, asked = heapq.heappop(self._ends)
                self._keep(whole, asked=asked)
            self._ask(number, request)
        return self.found

    def _ask(self, number: int, request: Request) -> None:
        prompt = tokens(request.prompt)
        source, found = self._index.find(prompt[:-1])
        if source is not None:
            self._index.use(source, found)
        self.found.asked[request.kind] += prompt.size - 1
        self.found.found[request.kind] += found
        read = prompt.size - 1
        if request.read < 1.0:
            read = found + round(request.read * (prompt.size - 1 - found))
        if found < request.system < read and not self._kind.cuts:
            self._keep(prompt[: request.system], lasting=True)
        self._keep(prompt[:read])
        if request.read == 1.0:
            whole = tokens((*request.prompt, request.answer))
            end = request.at + 0.5 + request.answer.size / 40
            heapq.heappush(self._ends, (end, number, whole, prompt.size))

    def _keep(self, text: Tokens, *, asked: int | None = None, lasting: bool = False) -> None:
        if not self._index.wants(text.size):
            return
        number = self._index.promise(text, asked=asked, lasting=lasting)
        cost = self._kind.cost
        bytes = cost.fixed + cost.per_token * text.size
        self._index.confirm([number], [KeptPrompt(number, bytes, self._kind.cuts)])
        self._index.take_dropped()


def simulate(
    requests: Sequence[Request], kind: Kind, most_bytes: int, policy: Callable[[], Eviction]
) -> Found:
    """Return what an index with this policy finds of the requests' prompts."""
    index = PromptIndex(most_bytes, cuts=kind.cuts, worth=policy())
    return Simulation(kind, index).play(requests)


def compare(kind: Kind, options: argparse.Namespace) -> list[list[str]]:
    """A table: the share that each policy finds, for each bound; the mean of the seeds."""
    mixes = [make_traffic(options.seconds, seed) for seed in range(options.seeds)]
    table = [["tokens", *options.policies]]
    for bound in options.bounds:
        row = [f"{bound:,}"]
        for name in options.policies:
            shares = [simulate(mix, kind, bound, POLICIES[name]).share for mix in mixes]
            row.append(f"{fmean(shares):.3f}")
        table.append(row)
    return table


def main() -> None:
    """Print a table for each kind of model."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kept_prompts", description="Compare which kept prompts stay."
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--seeds", type=int, default=3, help="mixes; the mean is printed")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--bounds", type=int, nargs="+", default=_BOUNDS, help="tokens")
    options = parser.parse_args()
    for kind in KINDS:
        print(f"{kind.name}\n{format_table(compare(kind, options))}\n", flush=True)


if __name__ == "__main__":
    main()
