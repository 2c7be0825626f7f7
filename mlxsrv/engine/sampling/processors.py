"""Logits processors of a batch, and the log-probabilities of its tokens.

A new one is made when rows change, and only if a row asks for it: a batch without such rows
pays nothing. Like the sampler they handle all rows in the same few operations.

Used on the device thread only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import isfinite
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from mlxsrv.engine.events import Likelihood
from mlxsrv.engine.faults import describe_error, survivable
from mlxsrv.engine.live_row import LiveRow
from mlxsrv.engine.sampling.blocks import Blocks
from mlxsrv.generation.parameters import Constraint, Sampling

_SLOTS = 64  # slots that are added at once, for tokens that are new to a row
_LEAST_REPETITION = 1e-3  # logits divided by less may overflow


class Penalties:
    """Logit biases, and penalties for tokens that a row already has.

    The bias comes first. The repetition penalty covers prompt and answer (Keskar et al. 2019: a
    positive logit is divided, a negative one multiplied). Frequency and presence penalties cover
    the answer, as OpenAI defines them: `logit - count * frequency - (count > 0) * presence`.

    Tokens are counted on the device when they are fed. So a token that a step has drawn counts in
    the next step, although the host has not seen it yet. The tables have a slot for each token
    whose logit a row changes, not for the whole vocabulary.
    """

    @staticmethod
    def wanted(sampling: Sampling) -> bool:
        """Tell whether the settings need any."""
        return bool(
            sampling.logit_bias
            or sampling.repetition_penalty != 1
            or sampling.frequency_penalty
            or sampling.presence_penalty
        )

    def __init__(self, rows: Sequence[LiveRow], vocabulary: int) -> None:
        settings = [row.job.sampling for row in rows]
        self._each = mx.arange(len(rows))
        # A fresh row is fed the last token of its prompt, which is not part of the answer.
        self._own = mx.array([0.0 if row.fresh else 1.0 for row in rows])
        self._repetition = _column(
            [max(each.repetition_penalty, _LEAST_REPETITION) for each in settings]
        )
        self._frequency = _column([each.frequency_penalty for each in settings])
        self._presence = _column([each.presence_penalty for each in settings])
        self._repeats = any(each.repetition_penalty != 1 for each in settings)
        self._counting = any(map(_counts, settings))
        self._fill([_touched(row, vocabulary) for row in rows])

    def _fill(self, touched: Sequence[dict[int, _Touch]]) -> None:
        """Make the tables `(rows, slots)`. A free slot has the token of the first slot."""
        most = max(map(len, touched))
        ids = [[*each, *[next(iter(each))] * (most - len(each))] for each in touched]
        touches = [[*each.values(), *[_Touch()] * (most - len(each))] for each in touched]
        self._ids = mx.array(ids, dtype=mx.uint32)
        self._bias, self._prompts, self._counts = (
            mx.array([[touch[i] for touch in row] for row in touches], dtype=mx.float32)
            for i in range(3)
        )
        self._used = mx.array([len(each) for each in touched])
        self._room = 0  # slots that are still free in every row

    def __call__(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Return the processed logits `(rows, vocabulary)` of a step.

        Args:
            logits: `(rows, vocabulary)`.
            inputs: `(rows,)`, the tokens that the step was fed.
        """
        if self._counting:
            self._count(inputs)
        logits = logits.astype(mx.float32)
        values = mx.take_along_axis(logits, self._ids, axis=-1) + self._bias
        had = self._counts > 0
        if self._repeats:
            factor = mx.where(values > 0, 1 / self._repetition, self._repetition)
            values = mx.where(had | (self._prompts > 0), values * factor, values)
        values = values - self._frequency * self._counts - self._presence * had
        used = mx.arange(self._ids.shape[-1]) < self._used[:, None]
        values = mx.where(used, values, values[:, :1])  # all slots of a token have the same value
        return mx.put_along_axis(logits, self._ids, values, axis=-1)

    def _count(self, inputs: mx.array) -> None:
        """Count the tokens that the rows are fed. A new token takes a free slot."""
        if not self._room:
            self._widen()
        self._room -= 1
        here = self._ids == inputs[:, None]
        found = here.any(axis=-1)
        slots = mx.where(found, mx.argmax(here, axis=-1), self._used)
        self._used = self._used + mx.logical_not(found)
        self._ids = mx.put_along_axis(
            self._ids, slots[:, None], inputs[:, None].astype(mx.uint32), axis=-1
        )
        self._counts = self._counts.at[self._each, slots].add(self._own)
        self._own = mx.ones_like(self._own)

    def _widen(self) -> None:
        free = mx.broadcast_to(self._ids[:, :1], (len(self._each), _SLOTS))
        self._ids = mx.concatenate([self._ids, free], axis=-1)
        self._bias, self._prompts, self._counts = (
            mx.pad(table, [(0, 0), (0, _SLOTS)])
            for table in (self._bias, self._prompts, self._counts)
        )
        self._room = _SLOTS


class _Touch(NamedTuple):
    """The inputs of a token's penalties."""

    bias: float = 0.0
    prompt: float = 0.0  # 1 if the token is in the prompt
    drawn: float = 0.0  # how often it is in the answer


def _counts(sampling: Sampling) -> bool:
    """Tell whether a row's earlier tokens matter."""
    return bool(
        sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    )


def _touched(row: LiveRow, vocabulary: int) -> dict[int, _Touch]:
    """Return the tokens whose logits the row changes; at least one."""
    sampling = row.job.sampling
    bias = dict(sampling.logit_bias)
    prompt = set(row.job.prompt) if sampling.repetition_penalty != 1 else set()
    counts = Counter(row.drawn if _counts(sampling) else ())
    tokens = {token for token in bias.keys() | prompt | counts.keys() if token < vocabulary}
    return {
        token: _Touch(bias.get(token, 0.0), float(token in prompt), float(counts[token]))
        for token in sorted(tokens) or [0]
    }


class Proof(NamedTuple):
    """Each row's highest logit in a step, which shows whether its token means anything: see
    `Sampler.draw`."""

    rows: tuple[LiveRow, ...]
    highest: mx.array  # (rows, 1)

    def holds(self) -> bool:
        """Tell whether all tokens are valid. Waits for the step."""
        values = cast(list[list[float]], self.highest.tolist())
        return all(isfinite(value) for [value] in values)

    def broken(self) -> set[LiveRow]:
        """Return the rows whose token is meaningless."""
        values = cast(list[list[float]], self.highest.tolist())
        pairs = zip(self.rows, values, strict=True)
        return {row for row, [value] in pairs if not isfinite(value)}


class StepLogprobs(NamedTuple):
    """The log-probabilities of a step's tokens on the device, for the rows that ask for them."""

    rows: tuple[LiveRow, ...]
    logprobs: mx.array  # (asking,)
    ids: mx.array  # (asking, top), the likeliest tokens in order
    top: mx.array  # (asking, top), their log-probabilities

    def to_host(self) -> dict[LiveRow, Likelihood]:
        """Return them on the host. Waits for the step."""
        ids, top = np.asarray(self.ids), np.asarray(self.top)
        return {
            row: _likelihood(logprob, ids[i], top[i], row.job.logprobs or 0)
            for i, (row, logprob) in enumerate(
                zip(self.rows, cast(list[float], self.logprobs.tolist()), strict=True)
            )
        }


class LogprobReader:
    """Computes the log-probabilities of drawn tokens, for the rows that ask for them."""

    def __init__(self, rows: Sequence[LiveRow]) -> None:
        asking = [i for i, row in enumerate(rows) if row.job.logprobs is not None]
        self._rows = tuple(rows[i] for i in asking)
        self._indices = None if len(asking) == len(rows) else mx.array(asking)
        self._top = max(row.job.logprobs or 0 for row in self._rows)

    def __call__(self, blocks: Blocks, tokens: mx.array) -> StepLogprobs:
        """Return the log-probabilities of `tokens` `(rows,)` under the logits of `blocks`."""
        if self._indices is not None:
            blocks, tokens = blocks.select_rows(self._indices), tokens[self._indices]
        return StepLogprobs(self._rows, *likelihoods(blocks, tokens, self._top))


def likelihoods(blocks: Blocks, tokens: mx.array, top: int) -> tuple[mx.array, mx.array, mx.array]:
    """Compute log-probabilities.

    Args:
        blocks: logits `(n, vocabulary)`.
        tokens: `(n,)`.
        top: how many of the likeliest tokens to add.

    Returns:
        Log-probabilities `(n,)` of the tokens; ids and log-probabilities `(n, top)` of the
        likeliest tokens, in order.
    """
    total = blocks.log_total()
    logprobs = (mx.take_along_axis(blocks.logits, tokens[:, None], axis=-1) - total)[:, 0]
    if top == 0:
        none = mx.zeros((tokens.shape[0], 0))
        return logprobs, none.astype(mx.uint32), none
    ids, values = blocks.top(top)
    return logprobs, ids, values - total


def read_likelihoods(parts: tuple[mx.array, mx.array, mx.array], top: int) -> list[Likelihood]:
    """Return the results of `likelihoods` on the host."""
    logprobs, ids, values = (np.asarray(part) for part in parts)
    return [_likelihood(float(logprobs[i]), ids[i], values[i], top) for i in range(len(logprobs))]


def _likelihood(logprob: float, ids: np.ndarray, values: np.ndarray, top: int) -> Likelihood:
    order = np.argsort(-values, kind="stable")[:top]
    return Likelihood(logprob, tuple((int(ids[i]), float(values[i])) for i in order))


class Masks:
    """Applies the rows' constraints.

    A constraint knows the allowed tokens only when it has seen the last one. So a batch with
    constraints reads its tokens before it draws the next ones. This happens while the model runs.
    Where all constraints are dormant, nothing is computed.
    """

    def __init__(self, constraints: Sequence[Constraint | None], vocabulary: int) -> None:
        self._constraints = constraints
        self.faults: dict[int, str] = {}  # the error of each row whose constraint raised in a call
        self.bound: list[int] = []  # rows whose constraint was not dormant in the last call
        self._words = np.full((len(constraints), -(-vocabulary // 32)), -1, dtype=np.int32)
        self._vocabulary = vocabulary

    def __call__(self, logits: mx.array) -> mx.array:
        """Return logits `(rows, vocabulary)`, with minus infinity for forbidden tokens."""
        self.faults, self.bound = {}, []
        for i, (constraint, words) in enumerate(zip(self._constraints, self._words, strict=True)):
            if constraint is None:
                continue
            words[:] = -1
            try:
                if constraint.dormant:
                    continue
                self.bound.append(i)
                constraint.fill(words)
            except BaseException as error:
                if not survivable(error):
                    raise
                self.faults[i] = describe_error(error)
        if not self.bound:
            return logits
        bits = np.unpackbits(
            self._words.view(np.uint8), axis=-1, count=self._vocabulary, bitorder="little"
        )
        # Not mx.where: MLX's CPU back end takes four times as long for it.
        most = (mx.array(bits).astype(mx.float32) - 0.5) * mx.inf
        return mx.minimum(logits, most)


def _column(values: Sequence[float]) -> mx.array:
    return mx.array(list(values), dtype=mx.float32)[:, None]
