"""Launching: the device computes while Python goes on."""

from __future__ import annotations

from typing import Any, NamedTuple

import mlx.core as mx

from mlxsrv.engine.events import Likelihood
from mlxsrv.engine.live_row import LiveRow, Place
from mlxsrv.engine.sampling.processors import Proof, StepLogprobs
from mlxsrv.engine.steering.plan import PassActivations


def launch(*arrays: Any) -> None:
    """Have the device compute these arrays, or nested lists of arrays, without waiting for it."""
    mx.async_eval(*arrays)  # type: ignore[no-untyped-call]  # mlx's stubs give it no types


class Launched(NamedTuple):
    """Results of the steps under way beside their tokens, and read together with these."""

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

    def beside(self, other: Launched) -> Launched:
        """The same for the rows of both steps."""
        return Launched(
            self.proofs + other.proofs,
            self.drawn + other.drawn,
            self.activations + other.activations,
        )
