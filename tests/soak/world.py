"""The world that the members of the crowd share, and what they tell of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tests.soak.town import ENCODER, JUDGE, STEERED, WRITERS
from tests.soak.visit import Body, Heard, Visit

PROMPTS = ("The quick brown fox", "What is the weather in Paris?", "你好，世界", "def add(a, b):")
FULL = "503 overloaded"
PATIENCE = 60.0
_LOYALTY = 0.95


class Failure(msgspec.Struct, frozen=True):
    deed: str
    what: str


class World:
    """The state that the members of the crowd share."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self.address = address
        self.dice = random.Random(seed)
        self.known: dict[str, str] = {}
        """A model's greedy answer to a prompt; by `model/prompt`."""
        self.table: Counter[tuple[str, str]] = Counter()
        """The number of times that each deed had each outcome."""
        self.failures: list[Failure] = []
        self.heard: dict[str, int] = {}
        """Statuses by request id, of all who stayed to hear."""
        self.fashion: tuple[str, ...] = ("plain", "window")
        """The models that most ask for; as many as are loaded at once."""
        self.profiles = 0

    def writer(self) -> str:
        """A model to ask that nobody steers: one that is in fashion, mostly."""
        popular = [name for name in self.fashion if name in WRITERS]
        return self.dice.choice(popular if self.dice.random() < _LOYALTY else WRITERS)

    def cares(self, model: str | None) -> bool:
        """Whether anybody comes for this model now."""
        return model in (None, *self.fashion) or self.dice.random() > _LOYALTY

    def change_fashion(self) -> None:
        one = self.dice.choice(WRITERS)
        others = [name for name in (*WRITERS, STEERED, ENCODER, JUDGE) if name != one]
        self.fashion = (one, self.dice.choice(others))

    def visit(self, *, buffer: int | None = None) -> Visit:
        return Visit(self.address, buffer=buffer)

    def note(self, heard: Heard) -> Heard:
        """Every answer that was heard passes here, to be found in the server's log as well."""
        self.heard[heard.request] = heard.status
        return heard

    async def ask(self, method: str, path: str, body: Body | None = None) -> Heard:
        async with self.visit() as visit:
            return self.note(await visit.ask(method, path, body))

    def chat(self, **fields: Any) -> Body:
        messages = [{"role": "user", "content": self.dice.choice(PROMPTS)}]
        return {"model": self.writer(), "messages": messages, "max_tokens": 24} | fields


Deed = Callable[[World], Awaitable[str]]


def told(heard: Heard, answered: str = "answered") -> str:
    return answered if heard.status < 400 else f"{heard.status} {heard.code}"
