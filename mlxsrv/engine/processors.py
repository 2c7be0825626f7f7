"""What changes a batch's logits before tokens are drawn, and what is read off them.

Each is made anew when rows join or leave, and only if one of the rows asks for it: a batch in
which nobody does pays nothing. Like the sampler they take all rows in the same few operations.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlxsrv.engine.faults import describe, survivable
from mlxsrv.engine.lanes import Row
from mlxsrv.events import Constraint, Likelihood, Sampling

_LEAST_REPETITION = 1e-3  # what is divided by less may overflow


class Penalties:
    """Logit biases, and penalties for tokens that a row has had already.

    Bias first, then repetition over the prompt and the answer (Keskar et al. 2019: a positive
    logit is divided, a negative one multiplied), then frequency and presence over the answer as
    OpenAI has them: `logit - count * frequency - (count > 0) * presence`.

    Tokens are counted as they are fed, so what a step has drawn counts in the next, although the
    host has not seen it yet.
    """

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        return bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )

    def __init__(self, rows: Sequence[Row], vocabulary: int) -> None:
        settings = [row.job.sampling for row in rows]
        self._each = mx.arange(len(rows))
        # A fresh row is fed the last token of its prompt, which is no token of its own.
        self._own = mx.array([0.0 if row.fresh else 1.0 for row in rows])
        self._bias = _table([dict(each.logit_bias) for each in settings], vocabulary)
        self._repetition = _column(
            [max(each.repetition_penalty, _LEAST_REPETITION) for each in settings]
        )
        self._frequency = _column([each.frequency_penalty for each in settings])
        self._presence = _column([each.presence_penalty for each in settings])
        self._repeats = any(each.repetition_penalty != 1 for each in settings)
        self._counts = _table([_count(row.drawn) for row in rows], vocabulary)
        self._prompts = (
            _table([dict.fromkeys(row.job.prompt, 1.0) for row in rows], vocabulary)
            if self._repeats
            else None
        )

    def __call__(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Logits `(rows, vocabulary)` of the tokens that follow `inputs` `(rows,)`."""
        self._counts = self._counts.at[self._each, inputs].add(self._own)
        self._own = mx.ones_like(self._own)
        had = self._counts > 0
        logits = logits.astype(mx.float32) + self._bias
        if self._prompts is not None:
            factor = mx.where(logits > 0, 1 / self._repetition, self._repetition)
            logits = mx.where(had | (self._prompts > 0), logits * factor, logits)
        return logits - self._frequency * self._counts - self._presence * had


class Proof(NamedTuple):
    """Each row's highest logit in a step: see `Sampler.draw`."""

    rows: tuple[Row, ...]
    highest: mx.array  # (rows, 1)

    def holds(self) -> bool:
        """Whether all tokens mean something. Waits for the step."""
        values = cast(list[list[float]], self.highest.tolist())
        return all(isfinite(value) for [value] in values)

    def broken(self) -> set[Row]:
        """Rows whose token means nothing."""
        values = cast(list[list[float]], self.highest.tolist())
        pairs = zip(self.rows, values, strict=True)
        return {row for row, [value] in pairs if not isfinite(value)}


class Drawn(NamedTuple):
    """The likelihoods of a step's tokens, on the device: of those rows that ask for them."""

    rows: tuple[Row, ...]
    logprobs: mx.array  # (asking,)
    ids: mx.array  # (asking, top), the likeliest in no order
    top: mx.array  # (asking, top), their log-probabilities

    def read(self) -> dict[Row, Likelihood]:
        """On the host; waits for the step."""
        ids, top = np.asarray(self.ids), np.asarray(self.top)
        return {
            row: _likelihood(logprob, ids[i], top[i], row.job.logprobs or 0)
            for i, (row, logprob) in enumerate(
                zip(self.rows, cast(list[float], self.logprobs.tolist()), strict=True)
            )
        }


class Likelihoods:
    """Log-probabilities of the tokens drawn, for the rows that ask for them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        asking = [i for i, row in enumerate(rows) if row.job.logprobs is not None]
        self._rows = tuple(rows[i] for i in asking)
        self._indices = None if len(asking) == len(rows) else mx.array(asking)
        self._top = max(row.job.logprobs or 0 for row in self._rows)

    def __call__(self, logits: mx.array, tokens: mx.array) -> Drawn:
        """Of `tokens` `(rows,)`, drawn from what became of `logits` `(rows, vocabulary)`."""
        if self._indices is not None:
            logits, tokens = logits[self._indices], tokens[self._indices]
        return Drawn(self._rows, *likelihoods(logits, tokens, self._top))


def likelihoods(
    logits: mx.array, tokens: mx.array, top: int
) -> tuple[mx.array, mx.array, mx.array]:
    """Log-probabilities `(n,)` of `tokens` `(n,)` under `logits` `(n, vocabulary)`, and the ids and
    log-probabilities `(n, top)` of the likeliest."""
    logits = logits.astype(mx.float32)
    total = mx.logsumexp(logits, axis=-1, keepdims=True)
    logprobs = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - total)[:, 0]
    top = min(top, logits.shape[-1])
    if top == 0:
        none = mx.zeros((logits.shape[0], 0))
        return logprobs, none.astype(mx.uint32), none
    ids = mx.argpartition(-logits, kth=top - 1, axis=-1)[:, :top]
    return logprobs, ids, mx.take_along_axis(logits, ids, axis=-1) - total


def read_likelihoods(parts: tuple[mx.array, mx.array, mx.array], top: int) -> list[Likelihood]:
    """What `likelihoods` found, on the host."""
    logprobs, ids, values = (np.asarray(part) for part in parts)
    return [_likelihood(float(logprobs[i]), ids[i], values[i], top) for i in range(len(logprobs))]


def _likelihood(logprob: float, ids: np.ndarray, values: np.ndarray, top: int) -> Likelihood:
    order = np.argsort(-values, kind="stable")[:top]
    return Likelihood(logprob, tuple((int(ids[i]), float(values[i])) for i in order))


class Masks:
    """What the rows' constraints allow.

    Constraints know what may come only after they have seen what came, so a batch that has any is
    not drawn from before its tokens are read; that happens while the model runs.
    """

    def __init__(self, constraints: Sequence[Constraint | None], vocabulary: int) -> None:
        self._constraints = constraints
        self.faults: dict[int, str] = {}  # rows whose constraint raised in the last call, and what
        self._words = np.full((len(constraints), -(-vocabulary // 32)), -1, dtype=np.int32)
        index = mx.arange(vocabulary, dtype=mx.uint32)
        self._word, self._bit = index // 32, index % 32

    def __call__(self, logits: mx.array) -> mx.array:
        """Logits `(rows, vocabulary)` with what may not come now at minus infinity."""
        self.faults = {}
        for i, (constraint, words) in enumerate(zip(self._constraints, self._words, strict=True)):
            if constraint is not None:
                words[:] = -1
                try:
                    constraint.fill(words)
                except BaseException as error:
                    if not survivable(error):
                        raise
                    self.faults[i] = describe(error)
        masks = mx.array(self._words.view(np.uint32))
        allowed = (mx.take(masks, self._word, axis=1) >> self._bit) & 1
        return mx.where(allowed > 0, logits, -mx.inf)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]


def _count(tokens: Sequence[int]) -> dict[int, float]:
    counts: dict[int, float] = {}
    for token in tokens:
        counts[token] = counts.get(token, 0.0) + 1
    return counts


def _table(rows: Sequence[dict[int, float]], vocabulary: int) -> mx.array:
    """A row of numbers for each dict, by token id."""
    table = np.zeros((len(rows), vocabulary), dtype=np.float32)
    for row, values in zip(table, rows, strict=True):
        row[list(values.keys())] = list(values.values())
    return mx.array(table)
