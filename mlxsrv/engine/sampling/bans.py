"""Tokens that a row must not draw.

These are tokens outside of a list of allowed ones, the last token of a bad word, and an end token
before the least number of tokens.

A step is launched before the host has read the tokens of the step before. So a row's position is
counted in steps. The host compares those tokens of a bad word that it has seen. The device compares
the last one, which is the step's input.

A ban is lifted if it would leave no token at all, for example when the grammar lets an answer only
end. Otherwise the row could not continue.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxsrv.engine.live_row import LiveRow


class Banning:
    """The bans of a batch. A new one is made when rows change, if a row has bans.

    Args:
        rows: the rows of the step.
        drawn: how many tokens each has drawn, its input included.
        vocabulary: entries of the logits.
    """

    @staticmethod
    def wanted(row: LiveRow) -> bool:
        """Tell whether the token after the row's input, or a later one, may be banned."""
        bans = row.job.bans
        if bans is None:
            return False
        drawn = len(row.drawn) + (not row.fresh)
        return bool(bans.allowed or bans.words) or drawn < bans.min_tokens

    def __init__(self, rows: Sequence[LiveRow], drawn: Sequence[int], vocabulary: int) -> None:
        self._banned = [
            _RowBans(i, row, count, vocabulary)
            for i, (row, count) in enumerate(zip(rows, drawn, strict=True))
            if row.job.bans is not None
        ]
        asking = {each.index: rows[each.index] for each in self._banned}
        self._lenient = (
            _LenientBans(asking, vocabulary) if any(map(_is_tight, asking.values())) else None
        )
        self._step = 0
        self._states: list[_State] | None = None  # of the tables
        self._tables: _Tables | None = None

    def __call__(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Return logits `(rows, vocabulary)`, with minus infinity for banned tokens.

        Args:
            logits: `(rows, vocabulary)`.
            inputs: `(rows,)`, the tokens that the step was fed.
        """
        states = [each.state_before(self._step) for each in self._banned]
        self._step += 1
        if states != self._states:
            self._states, self._tables = states, self._tabulate(states)
        if self._lenient is not None:
            return self._lenient(logits, inputs, self._tables)
        return logits if self._tables is None else self._tables.ban(logits, inputs)

    def _tabulate(self, states: Sequence[_State]) -> _Tables | None:
        bans = [
            (i if self._lenient is not None else each.index, *ban)
            for i, (each, state) in enumerate(zip(self._banned, states, strict=True))
            for ban in each.bans(state)
        ]
        return _Tables.of(bans) if bans else None


_ALWAYS = -1  # instead of an input: the ban does not depend on it


class _State(NamedTuple):
    """The state of a row on which its bans depend."""

    too_soon: bool = False  # it may not end yet
    begun: bool = False  # its input is part of the answer
    words: tuple[tuple[int, int], ...] = ()
    """Bad words whose tokens before the input have been drawn: the last but one token, the last."""


class _RowBans:
    """The bans of one row."""

    def __init__(self, index: int, row: LiveRow, drawn: int, vocabulary: int) -> None:
        bans = row.job.bans
        assert bans is not None
        self.index = index
        self._row = row
        self._drawn = drawn
        self._min_tokens = bans.min_tokens
        self._ends = [end for end in sorted(row.job.end_tokens) if end < vocabulary]
        words = [word for word in bans.words if max(word) < vocabulary]
        self._single = [word[0] for word in words if len(word) == 1]
        self._pairs = [(word[0], word[1]) for word in words if len(word) == 2]
        # Longer words, by their last token but two: the host has seen it when the last one is due.
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 2:
                self._longer.setdefault(word[-3], []).append(word)

    def state_before(self, step: int) -> _State:
        """Return the state before the token of a step, counted from when this was made."""
        drawn = self._drawn + step
        seen = drawn - 1  # the host has at least so many
        found: tuple[tuple[int, int], ...] = ()
        if self._longer and seen > 0:
            tokens = self._row.drawn
            found = tuple(
                (word[-2], word[-1])
                for word in self._longer.get(tokens[seen - 1], ())
                if tuple(tokens[max(seen - len(word) + 2, 0) : seen]) == word[:-2]
            )
        return _State(drawn < self._min_tokens, drawn > 0, found)

    def bans(self, state: _State) -> list[tuple[int, int]]:
        """Return pairs: the input on which a ban depends, and the banned token."""
        bans = [(_ALWAYS, token) for token in self._single]
        if state.too_soon:
            bans += [(_ALWAYS, token) for token in self._ends]
        if state.begun:
            bans += self._pairs
        return [*bans, *state.words]


class _Tables(NamedTuple):
    """The bans of all rows on the device: each array is `(bans,)`."""

    rows: mx.array
    after: mx.array
    tokens: mx.array

    @staticmethod
    def of(bans: Sequence[tuple[int, int, int]]) -> _Tables:
        rows, after, tokens = (mx.array(list(part)) for part in zip(*bans, strict=True))
        return _Tables(rows, after, tokens)

    def ban(self, logits: mx.array, inputs: mx.array) -> mx.array:
        held = (self.after == _ALWAYS) | (self.after == inputs[self.rows].astype(mx.int32))
        lowered = mx.where(held, -mx.inf, 0.0).astype(logits.dtype)
        return logits.at[self.rows, self.tokens].add(lowered)


def _is_tight(row: LiveRow) -> bool:
    """Tell whether bans may leave the row no token, because few are allowed anyway."""
    bans = row.job.bans
    return row.constraint is not None or (bans is not None and bool(bans.allowed))


class _LenientBans:
    """Applies bans, and lifts those that would leave a row no token.

    Bad words and early ends are lifted first, then the list of allowed tokens.

    Args:
        asking: the rows that have bans, by their index in the batch. The tables count only these.
        vocabulary: entries of the logits.
    """

    def __init__(self, asking: Mapping[int, LiveRow], vocabulary: int) -> None:
        self._rows = mx.array([*asking])
        lowered = np.zeros((len(asking), vocabulary), dtype=np.float32)
        for part, row in zip(lowered, asking.values(), strict=True):
            if row.job.bans is not None and (allowed := row.job.bans.allowed):
                part[:] = -np.inf
                part[[token for token in allowed if token < vocabulary]] = 0
        self._lowered = mx.array(lowered)  # added to the logits
        self._bound = any(row.constraint is not None for row in asking.values())

    def __call__(self, logits: mx.array, inputs: mx.array, tables: _Tables | None) -> mx.array:
        free = logits[self._rows]
        lowered = self._lowered.astype(logits.dtype)
        if self._bound:
            lowered = _keep_one(free, lowered, mx.zeros((1, 1), dtype=logits.dtype))
        if tables is not None:
            more = tables.ban(lowered, inputs[self._rows])
            lowered = _keep_one(free, more, lowered)
        return logits.at[self._rows].add(lowered)


def _keep_one(logits: mx.array, lowered: mx.array, other: mx.array) -> mx.array:
    """Return `lowered`; but `other` for rows whose logits it would all lower to minus infinity."""
    left = (logits + lowered).max(axis=-1, keepdims=True) > -mx.inf
    return mx.where(left, lowered, other)
