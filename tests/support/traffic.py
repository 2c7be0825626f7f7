"""A mix of requests as a server of agents and chats has them, for the prompt cache: always the same
for one seed.

Sizes are those of what clients send, four characters to a token: Codex sends some 17,000 characters
of instructions, 2,500 of surroundings and 12,000 of tools before the first word. Whether a prompt
begins like another is all that a prompt cache sees of it, so a text is made of pieces, and two
texts with the same piece have the same tokens there.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np

from mlxsrv.engine.scheduling.prompt_index import Tokens

_HEAD = 8000  # tokens of a coding agent's instructions and tools
_SUB_HEAD = 3000
_SYSTEM = 1500  # of an assistant that many users ask one thing each
_CHAT_SYSTEM = 400
_ONE_OFF_SYSTEM = 100
_VOCABULARY = 50_000


class Piece(NamedTuple):
    """Tokens that follow from a seed."""

    seed: int
    size: int


Text = tuple[Piece, ...]


class Request(NamedTuple):
    """One request.

    Attributes:
        at: seconds from the beginning.
        kind: who asks.
        prompt: of at least one piece.
        system: tokens at the beginning that other prompts share.
        answer: what the model says.
        read: the share of the prompt that is read before its client is gone; 1: it stays.
    """

    at: float
    kind: str
    prompt: Text
    system: int
    answer: Piece
    read: float = 1.0


_Actor = Iterator[Request]
# Their times are pauses: seconds after the answer to the request before.


def tokens(text: Text) -> Tokens:
    """The tokens of a text, `(size,)`."""
    return np.concatenate([_draw(piece) for piece in text])


def size(text: Text) -> int:
    return sum(piece.size for piece in text)


@lru_cache(maxsize=4096)
def _draw(piece: Piece) -> Tokens:
    drawn = np.random.default_rng(piece.seed).integers(5, _VOCABULARY, piece.size)
    return drawn.astype(np.uint32)


def make_traffic(seconds: float, seed: int = 0, *, agents: int = 4) -> list[Request]:
    """The requests of so many seconds, in their order."""
    mix = _Mix(seed)
    return mix.play(seconds, agents)


class _Mix:
    """Actors, who ask and wait."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._seeds = count(1000 + seed * 1_000_000)
        self._order = count()
        self._actors: list[tuple[float, int, _Actor, Request]] = []

    def play(self, seconds: float, agents: int) -> list[Request]:
        for number in range(agents):
            self._enter(self._chance.uniform(0, 30), self._be_agent(program=number % 2))
        self._arrive(seconds, 45, self._be_chat)
        self._arrive(seconds, 12, self._be_question)
        self._arrive(seconds, 40, self._be_one_off)
        for flood in range(int(seconds // 900)):
            begin = 900 * flood + 450
            for _ in range(60):
                self._enter(begin + self._chance.uniform(0, 90), self._be_one_off())
        requests: list[Request] = []
        while self._actors:
            at, _, actor, turn = heapq.heappop(self._actors)
            if at > seconds:
                break
            requests.append(turn._replace(at=at))
            self._enter(at + 0.5 + turn.answer.size / 40 * (turn.read == 1.0), actor)
        return requests

    def _enter(self, now: float, actor: _Actor) -> None:
        turn = next(actor, None)
        if turn is not None:
            heapq.heappush(self._actors, (now + turn.at, next(self._order), actor, turn))

    def _arrive(self, seconds: float, every: float, make: Callable[[], _Actor]) -> None:
        now = self._chance.expovariate(1 / every)
        while now < seconds:
            self._enter(now, make())
            now += self._chance.expovariate(1 / every)

    # What is said.

    def _say(self, median: float, spread: float = 0.8) -> Piece:
        size = median * self._chance.lognormvariate(0, spread)
        return Piece(next(self._seeds), max(8, min(round(size), round(10 * median))))

    # Actors.

    def _be_agent(self, program: int) -> _Actor:
        """Sessions of a coding agent, without end: calls of tools, sub-agents, retries."""
        chance = self._chance
        while True:
            head = Piece(1 + program, _HEAD)
            said: Text = (self._say(200),)
            for _ in range(chance.randint(8, 40)):
                answer = self._say(120)
                pause = chance.lognormvariate(1.5, 1.0)
                turn = Request(pause, "agent", (head, *said), head.size, answer)
                if chance.random() < 0.05:
                    yield turn._replace(read=chance.random())
                    turn = turn._replace(at=1.0)
                yield turn
                if chance.random() < 0.03:
                    yield turn._replace(at=0.5, answer=self._say(120))
                said = (*said, answer, self._say(400, 1.2))
                if chance.random() < 0.06:
                    yield from self._be_sub_agent(program)
            said = ()
            yield self._be_title()._replace(at=chance.uniform(60, 600))

    def _be_sub_agent(self, program: int) -> _Actor:
        head = Piece(11 + program, _SUB_HEAD)
        said: Text = (self._say(300),)
        for _ in range(self._chance.randint(2, 8)):
            answer = self._say(120)
            pause = self._chance.lognormvariate(1.0, 1.0)
            yield Request(pause, "sub-agent", (head, *said), head.size, answer)
            said = (*said, answer, self._say(400, 1.2))

    def _be_title(self) -> Request:
        system = Piece(21, _ONE_OFF_SYSTEM)
        return Request(0.0, "one-off", (system, self._say(300)), system.size, self._say(10))

    def _be_chat(self) -> _Actor:
        system = Piece(22, _CHAT_SYSTEM)
        said: Text = (self._say(60),)
        pause = 0.0
        for _ in range(self._chance.randint(1, 8)):
            answer = self._say(200)
            yield Request(pause, "chat", (system, *said), system.size, answer)
            said = (*said, answer, self._say(60))
            pause = self._chance.lognormvariate(3.0, 1.0)

    def _be_question(self) -> _Actor:
        system = Piece(23, _SYSTEM)
        yield Request(0.0, "question", (system, self._say(250)), system.size, self._say(80))

    def _be_one_off(self) -> _Actor:
        system = Piece(24, _ONE_OFF_SYSTEM)
        text = self._say(2500)
        yield Request(0.0, "one-off", (system, text), system.size, self._say(60))
