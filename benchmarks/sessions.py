"""A session of a coding agent, always the same for one seed: what it asks, turn by turn.

The agent has 20 tools, and its prompt grows by the result of a call with each turn: by some hundred
tokens, and by some thousand where it has read a file. Now and then it has two sub-agents do
something, which have instructions of their own. Some prompts take so long to read that the client
hangs up and asks again; some requests are sent twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec

Message: TypeAlias = dict[str, Any]

TURNS = 40
_TOOLS = 20
_INSTRUCTIONS = 700  # words, of about three tokens each with the tests' tokenizer
_SUB_INSTRUCTIONS = 350
_RESULT = 100
_FILE = 700
_WORDS = (
    *("one", "token", "after", "another", "while", "the", "reader", "waits", "for", "more"),
    *("def", "return", "value", "name", "items", "async", "class", "table", "print", "self"),
)


class Turn(msgspec.Struct, frozen=True):
    """One request of an agent's, and what leads to it.

    Attributes:
        said: messages behind the answer to the last request.
        call: the call that the last answer is taken to have made; None before the first answer.
        hangs_up: the client leaves after so many seconds, and asks again.
        again: the request is sent once more when it has its answer.
        helpers: sub-agents that work before it.
    """

    said: tuple[Message, ...]
    call: Message | None = None
    hangs_up: float | None = None
    again: bool = False
    helpers: tuple[Script, ...] = ()


class Script(msgspec.Struct, frozen=True):
    """All turns of one agent."""

    tools: tuple[dict[str, Any], ...]
    turns: tuple[Turn, ...]


def write_session(seed: int = 0, turns: int = TURNS, *, hangs_up: float = 1.0) -> Script:
    """The script of a session.

    Args:
        seed: of all texts.
        turns: of the agent itself.
        hangs_up: seconds for which a client waits that hangs up.
    """
    writer = _Writer(seed)
    tools = tuple(writer.write_tool(number) for number in range(_TOOLS))
    system = {"role": "system", "content": writer.write(_INSTRUCTIONS)}
    task = {"role": "user", "content": writer.write(60)}
    script = [Turn((system, task), hangs_up=hangs_up)]
    for number in range(1, turns):
        reads = number % 8 == 5
        call, result = writer.write_call(number, tools, _FILE if reads else _RESULT)
        helpers: Sequence[Script] = ()
        if number % 12 == 10:
            helpers = [writer.write_helper(tools[:6]) for _ in range(2)]
        script.append(
            Turn(
                (result,),
                call,
                hangs_up=hangs_up / 2 if reads else None,
                again=number % 10 == 7,
                helpers=tuple(helpers),
            )
        )
    return Script(tools, tuple(script))


class _Writer:
    """Writes texts by chance."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._calls = 0

    def write(self, words: int) -> str:
        """A text that begins like no other."""
        chosen = self._chance.choices(_WORDS, k=words)
        return f"{self._chance.getrandbits(32):08x} {' '.join(chosen)}"

    def write_tool(self, number: int) -> dict[str, Any]:
        fields = {
            f"argument_{each}": {"type": "string", "description": self.write(4)}
            for each in range(self._chance.randint(1, 4))
        }
        return {
            "type": "function",
            "function": {
                "name": f"tool_{number}",
                "description": self.write(15),
                "parameters": {"type": "object", "properties": fields},
            },
        }

    def write_call(
        self, number: int, tools: Sequence[dict[str, Any]], words: int
    ) -> tuple[Message, Message]:
        """A call of one of the tools, and its result."""
        self._calls += 1
        name = tools[number % len(tools)]["function"]["name"]
        identity = f"call_{self._calls}"
        function = {"name": name, "arguments": '{"argument_0": "value"}'}
        call = {"id": identity, "type": "function", "function": function}
        size = round(words * self._chance.uniform(0.5, 1.5))
        result = {"role": "tool", "tool_call_id": identity, "content": self.write(size)}
        return call, result

    def write_helper(self, tools: tuple[dict[str, Any], ...]) -> Script:
        """A sub-agent. All of them have the same instructions."""
        system = {"role": "system", "content": _Writer(17).write(_SUB_INSTRUCTIONS)}
        turns = [Turn((system, {"role": "user", "content": self.write(50)}))]
        for number in range(1, 4):
            call, result = self.write_call(number, tools, _RESULT)
            turns.append(Turn((result,), call))
        return Script(tools, tuple(turns))
