"""Tokens that a row may not draw: all but some, the last of a bad word, an end that comes too soon.

A step is launched before the host has read the tokens of the last one. So a row's place is counted
by the steps, and of a bad word's tokens the host compares those that it has seen, the device the
last, which is the step's input.

What is banned gives way where nothing else is left: to the grammar of an answer that can only end
now, say. Else the row could not go on.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from mlxsrv.engine.row import Row


class Banning:
    """Made anew when rows join or leave, and only if one of them has bans.

    Args:
        rows: the rows of the step.
        drawn: how many tokens each has drawn, its input included.
        vocabulary: entries of the logits.
    """

    @staticmethod
    def wanted(row: Row) -> bool:
        """Whether the token behind the row's input, or one after it, may be banned."""
        bans = row.job.bans
        if bans is None:
            return False
        drawn = len(row.drawn) + (not row.fresh)
        return bool(bans.allowed or bans.words) or drawn < bans.min_tokens

    def __init__(self, rows: Sequence[Row], drawn: Sequence[int], vocabulary: int) -> None:
        self._banned = [
            _Banned(i, row, count, vocabulary)
            for i, (row, count) in enumerate(zip(rows, drawn, strict=True))
            if row.job.bans is not None
        ]
        asking = {each.index: rows[each.index] for each in self._banned}
        self._careful = _Careful(asking, vocabulary) if any(map(_tight, asking.values())) else None
        self._step = 0
        self._states: list[_State] | None = None  # that the tables are of
        self._tables: _Tables | None = None

    def __call__(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Logits `(rows, vocabulary)` of the tokens that follow `inputs` `(rows,)`, with those that
        may not come at minus infinity."""
        states = [each.state(self._step) for each in self._banned]
        self._step += 1
        if states != self._states:
            self._states, self._tables = states, self._tabulate(states)
        if self._careful is not None:
            return self._careful(logits, inputs, self._tables)
        return logits if self._tables is None else self._tables.ban(logits, inputs)

    def _tabulate(self, states: Sequence[_State]) -> _Tables | None:
        bans = [
            (i if self._careful is not None else each.index, *ban)
            for i, (each, state) in enumerate(zip(self._banned, states, strict=True))
            for ban in each.bans(state)
        ]
        return _Tables.of(bans) if bans else None


_ALWAYS = -1  # in place of the input that a ban waits for


class _State(NamedTuple):
    """What a row's bans depend on."""

    too_soon: bool = False  # for an end
    begun: bool = False  # its input is a token of its own
    words: tuple[tuple[int, int], ...] = ()
    """Of bad words whose tokens before the input have come: the input, and the token after it."""


class _Banned:
    """The bans of one row."""

    def __init__(self, index: int, row: Row, drawn: int, vocabulary: int) -> None:
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
        # Longer words, by the last of their tokens that the host has seen when the last may come.
        self._longer: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 2:
                self._longer.setdefault(word[-3], []).append(word)

    def state(self, step: int) -> _State:
        """Before the token of the `step`-th step since the bans were made."""
        drawn = self._drawn + step
        seen = drawn - 1  # on the host for sure; more may be
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
        """The input that a ban waits for, and the token banned."""
        bans = [(_ALWAYS, token) for token in self._single]
        if state.too_soon:
            bans += [(_ALWAYS, token) for token in self._ends]
        if state.begun:
            bans += self._pairs
        return [*bans, *state.words]


class _Tables(NamedTuple):
    """Bans of all rows, as the device takes them: each `(bans,)`."""

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


def _tight(row: Row) -> bool:
    """Whether bans may leave the row nothing: where few tokens may come without them."""
    bans = row.job.bans
    return row.constraint is not None or (bans is not None and bool(bans.allowed))


class _Careful:
    """Bans rows' tokens, but for bans that would leave a row nothing: first gives way what is bad
    or too soon, then the list of what is allowed.

    Args:
        asking: the rows that have bans, by their place; the tables count these rows alone.
    """

    def __init__(self, asking: Mapping[int, Row], vocabulary: int) -> None:
        self._rows = mx.array([*asking])
        lowered = np.zeros((len(asking), vocabulary), dtype=np.float32)
        for part, row in zip(lowered, asking.values(), strict=True):
            if row.job.bans is not None and (allowed := row.job.bans.allowed):
                part[:] = -np.inf
                part[[token for token in allowed if token < vocabulary]] = 0
        self._lowered = mx.array(lowered)  # what is added to the logits
        self._bound = any(row.constraint is not None for row in asking.values())

    def __call__(self, logits: mx.array, inputs: mx.array, tables: _Tables | None) -> mx.array:
        free = logits[self._rows]
        lowered = self._lowered.astype(logits.dtype)
        if self._bound:
            lowered = _unless_none_is_left(free, lowered, mx.zeros((1, 1), dtype=logits.dtype))
        if tables is not None:
            more = tables.ban(lowered, inputs[self._rows])
            lowered = _unless_none_is_left(free, more, lowered)
        return logits.at[self._rows].add(lowered)


def _unless_none_is_left(logits: mx.array, lowered: mx.array, other: mx.array) -> mx.array:
    """`lowered`, but `other` for rows whose every logit that would bring to minus infinity."""
    left = (logits + lowered).max(axis=-1, keepdims=True) > -mx.inf
    return mx.where(left, lowered, other)
