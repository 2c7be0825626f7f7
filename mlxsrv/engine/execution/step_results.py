"""Decode steps: how they are launched, their results, and the calls of their rows' constraints.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsrv.engine.events import Activations, Likelihood
from mlxsrv.engine.faults import describe_error, survivable
from mlxsrv.engine.live_row import LiveRow, Place
from mlxsrv.engine.outcomes import Decoded, RowFailure
from mlxsrv.engine.sampling.processors import Masks, Proof, StepLogprobs
from mlxsrv.engine.steering.plan import PassActivations


def launch(*arrays: Any) -> None:
    """Have the device compute these arrays, or nested lists of arrays, without waiting for it."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]  # mlx's stubs give it no types


class Launched(NamedTuple):
    """Results of launched steps, besides their tokens; all are read when the tokens are read."""

    proofs: tuple[Proof, ...] = ()
    drawn: tuple[StepLogprobs, ...] = ()
    activations: tuple[tuple[PassActivations, list[Place]], ...] = ()

    def broken(self) -> set[LiveRow]:
        """Rows whose token means nothing, for the model computed NaN."""
        found: set[LiveRow] = set()
        for proof in self.proofs:
            if not proof.holds():
                found |= proof.broken()
        return found

    def likelihoods(self) -> dict[LiveRow, Likelihood]:
        found: dict[LiveRow, Likelihood] = {}
        for drawn in self.drawn:
            found |= drawn.to_host()
        return found


class StepResults:
    """The results of a decode step so far. They count even if the step fails later.

    The attributes are those of `Decoded`.
    """

    __slots__ = (
        "accepted",
        "activations",
        "bound",
        "broken",
        "failures",
        "following",
        "likelihoods",
        "tokens",
        "waited",
    )

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        self.likelihoods: dict[int, Likelihood] = {}
        self.broken: list[int] = []
        self.failures: dict[int, RowFailure] = {}
        self.bound: list[int] = []
        self.following: dict[int, int] = {}
        self.accepted: dict[int, int] = {}
        self.activations: list[Activations] = []
        self.waited = 0.0

    def fail(self, row: LiveRow, reason: str, clear: str | None = None) -> None:
        """Note that the row cannot go on. The first cause counts."""
        self.failures.setdefault(row.id, RowFailure(row.id, reason, clear))

    def to_decoded(self) -> Decoded:
        return Decoded(
            tuple(self.tokens),
            self.likelihoods,
            tuple(self.broken),
            tuple(self.failures.values()),
            tuple(self.bound),
            self.following,
            self.accepted,
            tuple(self.activations),
            self.waited,
        )


def deliver_tokens(row: LiveRow, tokens: Sequence[int], results: StepResults) -> int:
    """Deliver the tokens of a speculative step to a row, up to the one after which the row's
    constraint binds the next token, or fails. Returns how many these are."""
    for taken, token in enumerate(tokens, start=1):
        row.drawn.append(token)
        results.tokens.append((row.id, token))
        accept(row, results)
        if row.id in results.failures or binds(row, results):
            return taken
    return len(tokens)


# What concerns the constraint of one row. An error of it, or a panic, is that row's failure only.


def accept(row: LiveRow, results: StepResults) -> None:
    """Feed the row's constraint the tokens that it has not seen."""
    if row.constraint is None or row.accepted_tokens == len(row.drawn):
        return
    try:
        for token in row.drawn[row.accepted_tokens :]:
            row.constraint.accept(token)
            row.accepted_tokens += 1
    except BaseException as error:
        if not survivable(error):
            raise
        results.fail(row, describe_error(error))


def binds(row: LiveRow, results: StepResults) -> bool:
    """Whether the row's constraint binds its next token."""
    if row.constraint is None or row.id in results.failures or row.id in results.broken:
        return False
    try:
        return not row.constraint.dormant
    except BaseException as error:
        if not survivable(error):
            raise
        results.fail(row, describe_error(error))
        return False


def report_constraints(rows: Sequence[LiveRow], masks: Masks, results: StepResults) -> None:
    """Report which constraints bind the token that was just drawn, and which cannot go on."""
    results.bound += [rows[i].id for i in masks.bound]
    for i, reason in masks.faults.items():
        results.fail(rows[i], reason)
    for row in rows:
        if row.constraint is not None and (failure := _find_failure(row)) is not None:
            results.fail(row, *failure)


def _find_failure(row: LiveRow) -> tuple[str, str | None] | None:
    """Return why the row's constraint cannot go on: for the log, and for a client. None if it
    can."""
    assert row.constraint is not None
    try:
        failure = row.constraint.failure
    except BaseException as error:
        if not survivable(error):
            raise
        return describe_error(error), None
    return None if failure is None else (failure, f"the grammar cannot go on: {failure}")
