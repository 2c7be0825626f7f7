"""Drives a text runner by plans made by hand, and has what makes it fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

import mlx.core as mx

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.execution.text_runner import TextRunner
from mlxsrv.engine.orders import Job
from mlxsrv.engine.outcomes import Decoded, Fault, KeptPrompt
from mlxsrv.engine.plans import Decode, FreedRow, Keep, RowGroup, Span
from mlxsrv.engine.steering.steerer import Steerer
from mlxsrv.generation.parameters import Constraint, Mask, Sampling
from tests.support.text_engine import assert_greedy, make_caches
from tests.support.tiny import FAMILIES

GREEDY = Sampling(temperature=0)
SMALL = [name for name in FAMILIES if name != "qwen3-46m"]
BATCHED = [name for name in SMALL if FAMILIES[name].batchable]
COUNT = 12
"""Tokens that a row draws, unless a test says otherwise."""
ROOM = 128
"""Columns for what a row draws."""


def prompt(seed: int, size: int = 40) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(5, 300), k=size))


class Driver:
    """A runner, and what its rows have drawn."""

    def __init__(self, model: Any, caches: KVCacheFactory | None = None, **more: Any) -> None:
        self.model = model
        self.runner = TextRunner(
            model,
            caches=caches or make_caches(model),
            steerer=Steerer(model),
            prompt_cache_bytes=0,
            **more,
        )
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.drawn: dict[int, list[int]] = {}

    def admit(
        self, row: int, tokens: tuple[int, ...], constraint: Constraint | None = None, **more: Any
    ) -> None:
        more.setdefault("sampling", GREEDY)
        self.prompts[row], self.drawn[row] = tokens, []
        job = Job(row, "m", tokens, more.pop("max_tokens", 99), frozenset(), **more)
        assert not self.runner.admit([job], lambda _: constraint).failures

    def span(self, *rows: int, cuts: Sequence[int] = (), **more: Any) -> list[Span]:
        """Spans that read the text of `rows` to its end, cut at these places."""
        text = (*self.prompts[rows[0]], *self.drawn[rows[0]])
        places = [more.pop("begin", 0), *cuts, len(text) - 1]
        source, keep = more.pop("source", None), more.pop("keep", None)
        joins = more.pop("joins", rows)
        return [
            Span(
                rows=rows,
                begin=begin,
                end=end,
                opens=number == 0,
                source=source if number == 0 else None,
                keep=keep if end == places[-1] else None,
                joins=joins if end == places[-1] else None,
                **more,
            )
            for number, (begin, end) in enumerate(pairwise(places))
        ]

    def read(self, *rows: int, **more: Any) -> list[KeptPrompt]:
        """Read the text of `rows`, each span alone."""
        spans = self.span(*rows, **more)
        return [kept for span in spans for kept in self.runner.read([span]).kept]

    def join(self, row: int) -> None:
        """Have a row join the others that has drawn its last tokens alone."""
        read = len(self.prompts[row]) + len(self.drawn[row]) - 1
        self.runner.read([Span(rows=(row,), begin=read, end=read, joins=(row,))])

    def read_together(self, *texts: Sequence[int]) -> None:
        self.runner.read([span for rows in texts for span in self.span(*rows)])

    def step(self, *groups: tuple[int, ...], **more: Any) -> tuple[Decoded, Fault | None]:
        """One step; of the same rows as before if no groups are given."""
        longest = max([len(self.prompts[row]) for rows in groups for row in rows], default=0)
        shaped = tuple(RowGroup(rows, len(rows), longest + ROOM) for rows in groups)
        done, fault = self.runner.decode(Decode(model=0, groups=shaped or None, **more))
        for row, token in done.tokens:
            self.drawn[row].append(token)
        return done, fault

    def run(self, *groups: tuple[int, ...], rows: Collection[int], count: int = COUNT) -> None:
        """Steps until each of these rows has drawn `count` tokens."""
        self.must(*groups)
        while any(len(self.drawn[row]) < count for row in rows):
            self.must()

    def must(self, *groups: tuple[int, ...], **more: Any) -> Decoded:
        done, fault = self.step(*groups, **more)
        assert fault is None
        return done

    def release(self, *rows: int, keep: Keep | None = None) -> tuple[KeptPrompt, ...]:
        return self.runner.release([FreedRow(row, keep) for row in rows]).prompts

    def check(self, *rows: int) -> None:
        """The rows' texts are those of the model."""
        for row in rows:
            drawn = self.drawn[row]
            assert drawn
            assert_greedy(self.model, self.prompts[row], drawn, len(drawn))

    @property
    def is_empty(self) -> bool:
        runner = self.runner
        return not (runner._rows or runner._texts or runner._ready or runner._decoder.rows)


class Failing:
    """A model that fails at its next pass, or at a later one, over as many tokens of a row as
    `when` says."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.when: Callable[[mx.array], bool] = lambda _: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any = None) -> Any:
        if self.when(tokens):
            raise RuntimeError("out of memory, says the test")
        return self._model(tokens, cache=cache)


class Parity:
    """A constraint: odd tokens and even ones by turns. Raises `error` at the n-th call of a
    method."""

    failure: str | None = None

    def __init__(
        self, at: tuple[str, int] = ("", 0), error: BaseException | None = None, asleep: int = 0
    ) -> None:
        self._at = at
        self._error = error
        self._calls = {"fill": 0, "accept": 0, "dormant": 0}
        self._asleep = asleep
        self.seen: list[int] = []

    @property
    def dormant(self) -> bool:
        self._call("dormant")
        return len(self.seen) < self._asleep

    def fill(self, mask: Mask) -> None:
        self._call("fill")
        odd = (len(self.seen) - self._asleep) % 2 == 0
        mask[:] = 0x55555555 * 2 - 2**32 if odd else 0x55555555

    def accept(self, token: int) -> None:
        self._call("accept")
        self.seen.append(token)

    def _call(self, method: str) -> None:
        self._calls[method] += 1
        if self._error is not None and self._at == (method, self._calls[method]):
            raise self._error
