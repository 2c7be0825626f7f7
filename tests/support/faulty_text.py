"""Models and constraints that fail by order, and runs of rows of all kinds beside them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from mlxsrv.engine.events import (
    Event,
    Failed,
    PromptRead,
    PromptScored,
    Started,
    Token,
)
from mlxsrv.engine.orders import Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.generation.parameters import Constraint, DryPenalty, Mask, Sampling
from tests.support.text_engine import TextEngine

GREEDY = Sampling(temperature=0)


Fault = Callable[[int, mx.array], None]
"""Raises, or not, at the n-th step for these tokens `(rows, n)`; it is 0 where prompts are read."""


class Faulty:
    """The real model, but for what `fault` does and for logits that `spoil` changes.

    Passes over one token of each row are counted: the steps, unless rows have several sub-batches.
    """

    def __init__(self, model: Any, fault: Fault = lambda *_: None, spoil: Any = None) -> None:
        self._model = model
        self.fault = fault
        self._spoil = spoil
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> Any:
        step = tokens.shape[1] == 1
        self.calls += step
        self.fault(self.calls if step else 0, tokens)
        logits = self._model(tokens, cache=cache)
        return logits if self._spoil is None else self._spoil(tokens, logits)


class Odd:
    """A constraint: odd tokens and even ones by turns. Raises at the n-th call of a method."""

    dormant = False
    failure = None

    def __init__(self, method: str = "", n: int = 0, error: BaseException | None = None) -> None:
        self._at = method, n
        self._error = error
        self._calls: Counter[str] = Counter()
        self._odd = True

    def fill(self, mask: Mask) -> None:
        self._call("fill")
        mask[:] = 0x55555555 * 2 - 2**32 if self._odd else 0x55555555

    def accept(self, token: int) -> None:
        self._call("accept")
        assert token % 2 == self._odd, "each token is accepted once, in order"
        self._odd = not self._odd

    def _call(self, method: str) -> None:
        self._calls[method] += 1
        if self._error is not None and self._at == (method, self._calls[method]):
            raise self._error


class Steady(Pace):
    """Slices of one length, whatever time they take: so that the n-th pass is always the same, and
    none is over the one token that was left of a prompt, which would count as a step."""

    def limit(self, *, decoding: bool, long: bool, beside: bool = False, prompts: int = 1) -> int:
        return 64


def make(model: Any, rows: int = 8, **more: Any) -> TextEngine:
    return TextEngine(model, max_rows=rows, pace=Steady(64, 10.0), **more)


def prompt(seed: int, size: int = 20) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


def job(number: int, tokens: tuple[int, ...], max_tokens: int = 12, **more: Any) -> Job:
    more.setdefault("sampling", GREEDY)
    return Job(number, "m", tokens, max_tokens, frozenset(), **more)


Asked = Sequence[tuple[Job, Constraint | None]]


def mixed() -> Asked:
    """Rows of all kinds, of several lengths, two with one prompt."""
    seeded = Sampling(temperature=1, top_p=0.9, seed=5)
    penal = Sampling(temperature=0.8, seed=2, frequency_penalty=1, repetition_penalty=1.3)
    dry = Sampling(temperature=0.8, seed=3, dry=DryPenalty(20.0, allowed_length=1, breakers=(9,)))
    return [
        (job(0, prompt(0), 14), None),
        (job(1, prompt(1, 5) * 2, 12, sampling=dry), None),
        (job(2, prompt(2, 40), 16, sampling=penal), None),
        (job(3, prompt(3), 12, logprobs=2), None),
        (job(4, prompt(4), 13, sampling=seeded), Odd()),
        (job(5, prompt(0), 10, sampling=seeded), None),
        (job(6, prompt(6, 150), 6, scores=1, logprobs=0), None),
    ]


def run(engine: TextEngine, asked: Asked) -> list[Event]:
    """All events; the last of the jobs come while the first are decoded."""
    events = [event for each in asked[:4] for event in engine.submit(*each)]
    late = list(asked[4:])
    slices = 0
    while late or not engine.idle:
        if late and slices % 3 == 2:
            events += engine.submit(*late.pop(0))
        events += engine.decode()
        events += engine.prefill()
        slices += 1
        assert slices < 2000, "it does not end"
    return events


def texts(events: list[Event]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for event in events:
        if isinstance(event, Token):
            found.setdefault(event.job, []).append(event.id)
    return found


def failures(events: list[Event]) -> dict[int, str]:
    return {event.job: event.reason for event in events if isinstance(event, Failed)}


def alone(model: Any, asked: Asked) -> dict[int, list[int]]:
    return texts(run(make(model), asked))


def stranger(texts: dict[int, list[int]]) -> int:
    """A token that is in no text, and in no prompt."""
    drawn = {token for text in texts.values() for token in text}
    return next(token for token in range(300, 500) if token not in drawn)


def assert_told_once(events: list[Event]) -> None:
    told = Counter(
        (type(event), event.job)
        for event in events
        if isinstance(event, (Started, PromptRead, PromptScored, Failed))
    )
    ends = Counter(event.job for event in events if isinstance(event, Token) and event.finish)
    assert not [key for key, count in told.items() if count > 1]
    assert all(count == 1 for count in ends.values())


def assert_empty(engine: TextEngine) -> None:
    """Nothing is held any more, and the engine works."""
    assert engine.idle
    assert {*engine.statistics().values()} == {0}
    assert not engine.runner._decoder._launched.proofs
    assert not engine.runner._rows
    assert engine.schedule._book.fitting == engine.schedule._max_rows


def at_step(*numbers: int) -> Fault:
    def fault(call: int, tokens: mx.array) -> None:
        if call in numbers:
            raise RuntimeError("refused")

    return fault


def on_token(poison: int, error: type[Exception] = RuntimeError) -> Fault:
    def fault(call: int, tokens: mx.array) -> None:
        if mx.any(tokens == poison).item():
            raise error("this token is refused")

    return fault


# Constraints.


class PanicException(BaseException):
    """As Rust's panics come out of pyo3."""
