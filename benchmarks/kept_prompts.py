"""Count which kept prompts stay: `python -m benchmarks.kept_prompts`.

Gives a mix of requests to the prompt index, without a model: coding agents, sub-agents, chats,
questions with one system prompt, floods of prompts that come once, retries (see
`tests/support/traffic.py`). Prints the share of all tokens of prompts that need not be read, for
several bounds.
"""

from __future__ import annotations

import argparse
import heapq
from collections import Counter
from collections.abc import Sequence
from statistics import fmean

import msgspec

from benchmarks.report import format_table
from mlxsrv.engine.events import KVCost
from mlxsrv.engine.outcomes import KeptPrompt
from mlxsrv.engine.scheduling.prompt_index import PromptIndex, Tokens
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
        source = self._index.find(prompt[:-1])
        found = source.tokens
        if source.entry is not None:
            self._index.use(source.entry, found)
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
        keep = self._index.promise(text, asked=asked, lasting=lasting)
        cost = self._kind.cost
        bytes = cost.fixed + cost.per_token * text.size
        self._index.confirm([keep], [KeptPrompt(keep.entry, bytes, self._kind.cuts)])
        self._index.take_dropped()


def simulate(requests: Sequence[Request], kind: Kind, most_bytes: int) -> Found:
    """Return what an index finds of the requests' prompts."""
    index = PromptIndex(most_bytes, cuts=kind.cuts)
    return Simulation(kind, index).play(requests)


def measure(options: argparse.Namespace) -> list[list[str]]:
    """A table: the share that is found for each kind of model and each bound; the mean of the
    seeds."""
    mixes = [make_traffic(options.seconds, seed) for seed in range(options.seeds)]
    table = [["tokens", *(kind.name for kind in KINDS)]]
    for bound in options.bounds:
        shares = [fmean(simulate(mix, kind, bound).share for mix in mixes) for kind in KINDS]
        table.append([f"{bound:,}", *(f"{share:.3f}" for share in shares)])
    return table


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kept_prompts", description="Count what kept prompts save."
    )
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--seeds", type=int, default=3, help="mixes; the mean is printed")
    parser.add_argument("--bounds", type=int, nargs="+", default=_BOUNDS, help="tokens")
    options = parser.parse_args()
    print(format_table(measure(options)))


if __name__ == "__main__":
    main()
