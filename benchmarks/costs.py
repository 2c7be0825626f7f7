"""The costs of work items: a linear model, from a machine's figures or fitted to what was measured.

A device works off what is launched, in order. A step is launched, and then the tokens of the step
before are awaited; a slice of prompts is awaited itself. So the time of one work item is partly
that of another, and costs are fitted to whole rounds. On CPUs a launch takes as long as the step:
see `CostDevice`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from mlxsrv.engine.outcomes import TextFacts
from mlxsrv.engine.plans import Decode, Read, Release, WorkItem
from tests.support.fake_device import FakeDevice, Pass

Vector = np.ndarray[tuple[int], np.dtype[np.float64]]
Matrix = np.ndarray[tuple[int, int], np.dtype[np.float64]]

_ITERATIONS = 4
_WINDOW = 0.1  # seconds for which a machine is taken to be equally fast


class Costs(msgspec.Struct, frozen=True):
    """Seconds.

    Attributes:
        work: of each work item, on the host.
        step: of a pass that feeds each row one token: to read the weights.
        row: of each row of such a pass.
        held: of each token in the KV caches of its rows, padding included.
        slice: of a pass that reads prompts.
        token: of each token of such a pass, padding included.
        pair: of each pair of one of these tokens and one before it.
        moved: of each token in KV caches that are copied, since rows come or go.
    """

    work: float = 0.0
    step: float = 0.0
    row: float = 0.0
    held: float = 0.0
    slice: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    moved: float = 0.0

    @property
    def values(self) -> Vector:
        return np.array(msgspec.structs.astuple(self))


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """A machine and a model, in the figures of their data sheets.

    Attributes:
        bandwidth: bytes a second that are read from memory.
        flops: floating-point operations a second, of matrix products.
        share: of both that is reached in practice.
        launch: seconds of the host's calls of one pass.
        weights: bytes that a pass reads.
        parameters: that a token is multiplied with; of a mixture of experts those of one token.
        kv_bytes: of one token.
        width: attention's width, heads times size, summed over the layers.
    """

    bandwidth: float
    flops: float
    share: float = 0.7
    launch: float
    weights: float
    parameters: float
    kv_bytes: float
    width: float

    def estimate(self) -> Costs:
        """Costs from the roofline model (Williams et al. 2009): bytes of weights for a step, and
        floating-point operations for a slice."""
        flops, bandwidth = self.flops * self.share, self.bandwidth * self.share
        token = 2 * self.parameters / flops
        return Costs(
            work=20e-6,
            step=self.launch + self.weights / bandwidth,
            row=token,
            held=self.kv_bytes / bandwidth,
            slice=self.launch + self.weights / bandwidth,
            token=token,
            pair=4 * self.width / flops,
            moved=2 * self.kv_bytes / bandwidth,
        )


def describe(work: WorkItem, passes: Sequence[Pass]) -> list[float]:
    """Return how much of each of the Costs a work item takes, in their order."""
    rows = sum(each.rows for each in passes)
    if isinstance(work, Decode):
        held = sum(each.rows * each.held for each in passes)
        moved = held if work.groups is not None else 0
        return [1, len(passes), rows, held, 0, 0, 0, moved]
    if isinstance(work, Read):
        tokens = sum(each.rows * each.tokens for each in passes)
        pairs = sum(each.rows * each.tokens * (each.held + each.tokens / 2) for each in passes)
        return [1, 0, 0, 0, len(passes), tokens, pairs, 0]
    return [1, 0, 0, 0, 0, 0, 0, 0]


def fit(features: Sequence[Sequence[float]], seconds: Sequence[float]) -> Costs:
    """The costs that explain best what rounds have taken; none is negative.

    Least squares of errors relative to what is expected. Relative to what was measured, rounds that
    took too long by chance would count less than those that took too little.
    """
    taken, matrix = np.array(seconds), np.array(features)
    expected = taken
    for _ in range(_ITERATIONS):
        costs = _solve(matrix / expected[:, None], taken / expected)
        expected = np.maximum(matrix @ costs, taken.min())
    return Costs(*costs.tolist())


def scale(costs: Costs, factor: float) -> Costs:
    return Costs(*(factor * each for each in msgspec.structs.astuple(costs)))


class Speed:
    """The speed of a machine in the course of a run: how many times as long as expected its rounds
    took. Other programs slow it down, for a while at a time.

    Args:
        began: seconds from the beginning of the run, of each round.
        seconds: that it took.
        expected: by the costs.
    """

    def __init__(
        self, began: Sequence[float], seconds: Sequence[float], expected: Sequence[float]
    ) -> None:
        places = (np.array(began) / _WINDOW).astype(int)
        taken, wanted = np.bincount(places, seconds), np.bincount(places, expected)
        self.mean = float(taken.sum() / wanted.sum())
        known = wanted > 0
        self._factors = np.full(len(taken), self.mean)
        self._factors[known] = taken[known] / wanted[known]

    def at(self, now: float) -> float:
        place = int(now / _WINDOW)
        return float(self._factors[place]) if place < len(self._factors) else self.mean


def _solve(matrix: Matrix, wanted: Vector) -> Vector:
    """Least squares where no part of the solution is negative: those that would be are left out."""
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)
        if found.min() >= 0:
            break
        del used[int(found.argmin())]
    values = np.zeros(matrix.shape[1])
    values[used] = found
    return values


class CostDevice(FakeDevice):
    """A device on which work items take what they cost, and steps run while the host goes on.

    Args:
        speed: of the machine; what the costs say at all times, unless given.
        blocks: launching a step takes as long as the step, as with MLX's CPU back end, which has
            ten operations under way at most. So a step's tokens are known behind the next step.

    Attributes:
        now: seconds, as the runner's clock.
    """

    def __init__(
        self, costs: Costs, facts: TextFacts, speed: Speed | None = None, *, blocks: bool = False
    ) -> None:
        super().__init__(facts)
        self._blocks = blocks
        self.now = 0.0
        self._speed = speed
        self._costs = costs.values
        self._free = 0.0  # when the device has done what was launched

    def time(self, work: WorkItem, passes: Sequence[Pass]) -> float:
        began = self.now
        taken = describe(work, passes)
        costs = self._costs if self._speed is None else self._costs * self._speed.at(began)
        host, launched = taken[0] * costs[0], float(np.dot(taken[1:], costs[1:]))
        self.now += host
        before = max(self._free, self.now)
        if launched:
            self._free = before + launched
        if isinstance(work, Decode):
            # Or when the step before was complete.
            self.now = self._free if self._blocks else before
        elif isinstance(work, (Read, Release)):
            self.now = max(self._free, self.now)
        return self.now - began
