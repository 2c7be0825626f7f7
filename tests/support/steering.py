"""An engine whose rows are steered, and what it draws when one row is alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from mlxsrv.engine.events import Event, Failed, Token
from mlxsrv.engine.orders import Attach, Job
from mlxsrv.engine.scheduling.pace import Pace
from mlxsrv.engine.steering.hooks import Site, find_layers, hooked
from mlxsrv.engine.steering.plan import SteeringPlan
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Sampling, Steering
from tests.support.saes import make_arrays
from tests.support.text_engine import TextEngine

FEATURES = 128
TOKENS = 12
STRONG = 40.0


def attach(steerer: Steerer, sae: Path, *, layer: int = 0, before: bool = False) -> Steerer:
    for _ in steerer.attach(Attach("m", 1, str(sae), layer, before)):
        pass
    return steerer


def additive(*values: tuple[int, float]) -> Steering:
    return Steering(attachment=1, values=values)


def clamp(*values: tuple[int, float]) -> Steering:
    return Steering(attachment=1, mode="clamp", values=values)


def direction(steering: Steering) -> mx.array:
    """Return what additive steering adds, by NumPy."""
    rows = make_arrays(d_sae=FEATURES)["W_dec"]
    return mx.array(sum(value * rows[feature] for feature, value in steering.values))


def prompts(n: int, seed: int, low: int = 3, high: int = 60) -> list[tuple[int, ...]]:
    dice = random.Random(seed)
    return [tuple(dice.choices(range(5, 300), k=dice.randint(low, high))) for _ in range(n)]


def make(model: Any, steerer: Steerer, *, cache_bytes: int = 0, **more: Any) -> TextEngine:
    return TextEngine(
        model,
        max_rows=8,
        pace=Pace(more.pop("chunk", 512), 10.0),
        cache_bytes=cache_bytes,
        steerer=steerer,
        **more,
    )


def ask(
    number: int, prompt: tuple[int, ...], steering: Steering | None = None, tokens: int = TOKENS
) -> Job:
    greedy = Sampling(temperature=0)
    return Job(number, "m", prompt, tokens, frozenset(), greedy, steering=steering)


def events(batch: TextEngine, jobs: Iterable[Job], later: Iterable[Job] = ()) -> Iterator[Event]:
    """All events; one more of `later` is submitted at each step."""
    for job in jobs:
        yield from batch.submit(job)
    late = iter(later)
    while True:
        joining = next(late, None)
        if joining is not None:
            yield from batch.submit(joining)
        if batch.idle and joining is None:
            return
        yield from batch.decode() + batch.prefill()


def answers(
    batch: TextEngine, jobs: Iterable[Job], later: Iterable[Job] = ()
) -> dict[int, list[int]]:
    drawn: dict[int, list[int]] = {}
    for event in events(batch, jobs, later):
        assert not isinstance(event, Failed), event
        if isinstance(event, Token):
            drawn.setdefault(event.job, []).append(event.id)
    return drawn


@contextmanager
def patched(layer: Any, change: Callable[[mx.array], mx.array]) -> Iterator[None]:
    """Change what a layer gives: not by its class's name, but in its class."""
    kind = type(layer)
    plain = kind.__call__

    def call(self: Any, *given: Any, **named: Any) -> Any:
        output = plain(self, *given, **named)
        if self is not layer:
            return output
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = plain


def alone(
    model: Any, prompt: tuple[int, ...], steering: Steering | None = None, layer: int = 0
) -> list[int]:
    """mlx-lm's answer, with the layer changed where it is to be steered."""
    steps = generate_step(mx.array(prompt), model, max_tokens=TOKENS)
    if steering is None:
        return [int(token) for token, _ in steps]
    delta = direction(steering)
    with patched(find_layers(model)[layer], lambda hidden: hidden + delta.astype(hidden.dtype)):
        return [int(token) for token, _ in steps]


def hidden_states(model: Any, tokens: tuple[int, ...], site: Site) -> mx.array:
    """Hidden states `(tokens, width)` at the site."""
    seen: list[mx.array] = []

    def look(hidden: mx.array) -> mx.array:
        seen.append(hidden)
        return hidden

    with hooked(find_layers(model), {site: look}):
        mx.eval(model(mx.array([tokens]), cache=make_prompt_cache(model)))
    return seen[0][0]


def only(steerer: Steerer, steering: Steering | None) -> SteeringPlan | None:
    return steerer.make_plan([steerer.prepare(steering)])


@contextmanager
def patched_layers(layers: Any, deltas: dict[int, mx.array]) -> Iterator[None]:
    kind = type(layers[0])
    plain = kind.__call__

    def call(self: Any, *given: Any, **named: Any) -> Any:
        [index] = [i for i, layer in enumerate(layers) if layer is self]
        return plain(self, *given, **named) + deltas[index]

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = plain
