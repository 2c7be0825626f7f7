"""Chats that grow turn by turn, given to a real model's engine: how much of each prompt is read."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from mlxsrv.engine.events import PromptRead, Token
from mlxsrv.engine.orders import Job
from mlxsrv.generation.parameters import Sampling
from mlxsrv.prompts.templates.messages import Chat, PlainMessage
from mlxsrv.prompts.tokenizer import Prompt, Tokenizer
from tests.support.text_engine import TextEngine

_TEXT = "the server reads what is new and keeps what it has read for the next turn"


class Turn(msgspec.Struct, frozen=True):
    """One turn of a chat, in tokens.

    Attributes:
        prompt: the prompt.
        new: those behind what it has in common with the texts before.
        read: those that were read.
        drawn: the answer.
    """

    prompt: tuple[int, ...]
    new: int
    read: int
    drawn: tuple[int, ...]


def say(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(_TEXT.split(), k=words))


def play_chat(engine: TextEngine, tokenizer: Tokenizer, turns: int) -> Iterator[Turn]:
    """A chat whose client sends back answers without their thoughts, as most do: its template opens
    a block of thoughts behind each question, and leaves the old ones out."""
    messages: list[PlainMessage] = [{"role": "system", "content": say(0, 100)}]
    texts: list[tuple[int, ...]] = []
    for turn in range(turns):
        messages.append({"role": "user", "content": say(2 * turn + 1, 40)})
        prompt = tokenizer.render(Chat(messages=messages, variables={"enable_thinking": True}))
        found = answer(engine, turn, prompt, texts)
        texts += [found.prompt, (*found.prompt, *found.drawn)]
        messages.append({"role": "assistant", "content": say(2 * turn + 2, 15)})
        yield found


def play_text(engine: TextEngine, tokenizer: Tokenizer, turns: int) -> Iterator[Turn]:
    """A chat whose answers come back token for token."""
    text = tokenizer.encode(say(0, 100)).tokens
    texts: list[tuple[int, ...]] = []
    for turn in range(turns):
        text += tokenizer.encode(say(2 * turn + 1, 40)).tokens
        found = answer(engine, turn, Prompt(text, ""), texts)
        text += found.drawn
        texts += [found.prompt, text]
        yield found


def answer(
    engine: TextEngine, number: int, prompt: Prompt, texts: Sequence[tuple[int, ...]]
) -> Turn:
    """Have a prompt answered; the engine has read or drawn these texts before."""
    job = Job(
        number,
        "m",
        prompt.tokens,
        24,
        frozenset(),
        Sampling(temperature=0),
        checkpoints=prompt.checkpoints,
    )
    engine.submit(job)
    read, drawn = 0, list[int]()
    while not engine.idle:
        for event in engine.round():
            if isinstance(event, PromptRead):
                read = len(prompt.tokens) - event.cached
            elif isinstance(event, Token):
                drawn.append(event.id)
    shared = max((_common(prompt.tokens, text) for text in texts), default=0)
    return Turn(prompt.tokens, len(prompt.tokens) - shared, read, tuple(drawn))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common prefix."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
