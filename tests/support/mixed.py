"""Requests of all kinds in one random order, and their answers."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx
import msgspec

_LONG = "the quick brown fox jumps over the lazy dog, and then it sleeps until the sun comes up. "
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name", "age"],
}
_SECONDS = 120.0
_CLOSE = 1e-3  # log-probabilities that differ by rounding alone

Body = dict[str, Any]


class Mixed(msgspec.Struct, frozen=True):
    """A request.

    Attributes:
        path: of its route.
        body: what it sends.
        most: chunks after which its client goes; None: it stays.
    """

    path: str
    body: Body
    most: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether it has the same answer every time."""
        given = self.body.get("temperature") == 0 or "seed" in self.body
        return given and self.most is None


class Answer(msgspec.Struct, frozen=True):
    """An answer: of each choice its text and finish reason, in their order; of each token its
    log-probability, if asked for."""

    status: int
    texts: tuple[tuple[str, str | None], ...]
    logprobs: tuple[float, ...] = ()

    def equals(self, other: Answer) -> bool:
        """Whether it is the same answer but for rounding."""
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return (
            (self.status, self.texts) == (other.status, other.texts)
            and len(self.logprobs) == len(other.logprobs)
            and all(abs(one - two) < _CLOSE for one, two in pairs)
        )


def make_mixed(count: int, seed: int) -> list[Mixed]:
    """So many requests, always the same for one seed."""
    dice = random.Random(seed)
    return [_make(dice) for _ in range(count)]


def _make(dice: random.Random) -> Mixed:
    body = _draw_sampling(dice) | {"max_tokens": dice.choice([1, 4, 8, 16, 40])}
    kind = dice.choice(["text", "text", "text", "chat", "chat", "json", "several", "cancel"])
    if dice.random() < 0.4:
        body["stream"] = True
    if kind == "cancel":
        body |= {"max_tokens": 200, "stream": True, "prompt": _draw_prompt(dice)}
        return Mixed("/v1/completions", body, most=dice.randint(0, 12))
    if kind == "json":
        body |= {"max_tokens": 60, "guided_json": _SCHEMA}
    if kind == "several":
        body |= {"n": dice.randint(2, 3), "seed": dice.randrange(1000), "temperature": 1.0}
    if kind == "chat":
        body["messages"] = [
            {"role": "system", "content": _LONG * dice.randint(0, 3)},
            {"role": "user", "content": _draw_prompt(dice)},
        ]
        return Mixed("/v1/chat/completions", body)
    if dice.random() < 0.2:
        body["logprobs"] = dice.randint(0, 3)
    if dice.random() < 0.1:
        body["max_tokens"] = -5  # which is refused
    return Mixed("/v1/completions", body | {"prompt": _draw_prompt(dice)})


def _draw_prompt(dice: random.Random) -> str:
    """Short, long, or long and begun like others."""
    kind = dice.random()
    if kind < 0.5:
        return f"{dice.randrange(1000)} {_LONG[: dice.randint(0, 80)]}"
    if kind < 0.7:
        return f"{dice.randrange(1000)} {_LONG * dice.randint(2, 15)}"
    return f"{_LONG * dice.choice([2, 5, 9])}{dice.randrange(4)}"


def _draw_sampling(dice: random.Random) -> Body:
    fields: Body = {}
    if dice.random() < 0.5:
        fields["temperature"] = 0
    else:
        fields["temperature"] = round(dice.uniform(0.3, 1.2), 2)
        if dice.random() < 0.9:
            fields["seed"] = dice.randrange(1000)
        fields |= dice.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
    return fields | dice.choice(
        [
            {},
            {},
            {},
            {"frequency_penalty": 0.9},
            {"presence_penalty": 0.7},
            {"repetition_penalty": 1.3},
            {"dry_multiplier": 2, "dry_allowed_length": 1},
            {"logit_bias": {"100": 3, "101": -100}},
            {"stop": ["e", "fox"]},
        ]
    )


def ask_mixed(url: str, request: Mixed) -> Answer:
    """The answer. That to a client that goes is what it has heard."""
    where = f"{url}{request.path}"
    with httpx.stream("POST", where, json=request.body, timeout=_SECONDS) as answer:
        if answer.status_code != 200 or not request.body.get("stream"):
            return _fold(answer.status_code, [json.loads(answer.read())])
        chunks: list[Body] = []
        for line in answer.iter_lines():
            if request.most is not None and len(chunks) >= request.most:
                break
            if line.startswith("data: {"):
                chunks.append(json.loads(line.removeprefix("data: ")))
        return _fold(answer.status_code, chunks)


def _fold(status: int, parts: list[Body]) -> Answer:
    """Join the parts of an answer. Raises AssertionError if one is an error after the beginning."""
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    logprobs: dict[int, list[float]] = {}
    for part in parts:
        assert status != 200 or "error" not in part, part
        for choice in part.get("choices", ()):
            index = choice["index"]
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            texts[index] = texts.get(index, "") + (said.get("content") or "")
            ends[index] = choice.get("finish_reason") or ends.get(index)
            likely = (choice.get("logprobs") or {}).get("token_logprobs") or ()
            logprobs.setdefault(index, []).extend(likely)
    order = sorted(texts)
    return Answer(
        status,
        tuple((texts[index], ends[index]) for index in order),
        tuple(value for index in order for value in logprobs[index]),
    )
