"""DRY ("don't repeat yourself"), a penalty for tokens that would go on with a repetition.

If the end of a text, of at least `allowed_length` tokens, stands earlier in it as well, then the
token that followed there is penalised by `multiplier * base ** (length - allowed_length)`: the
longer the repetition, the more. This is llama.cpp's sampler, where each breaker is a token:

- The longest repetition counts for each token.
- A repetition lies behind the last breaker, and within the last `last_n` tokens.
- A breaker is not penalised.

There the host looks through the text for each token. Here a step is launched before the host has
seen the last one, so the text and the lengths of its repetitions are on the device. When a token is
fed, the repetition that ends at any place is longer by one than that which ended before it, if the
token is the same, and else there is none.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import mlx.core as mx
import numpy as np

from mlxsrv.engine.live_row import LiveRow
from mlxsrv.generation.parameters import DryPenalty

_LOG_OF_MOST = 88.7228391  # of the highest power, in llama.cpp
_MOST = 1e30  # logits stay finite: a constraint may leave no other token
_NO_BOUND = 2**31 - 1

_Text = np.ndarray[tuple[int], np.dtype[np.int32]]


class Dry:
    """The penalties of those rows of a batch that ask for them. A new one is made when rows change.

    Texts end in the last column. What stands before a shorter one counts for nothing.

    Args:
        rows: the rows of the step.
        vocabulary: entries of the logits.
    """

    @staticmethod
    def wanted(row: LiveRow) -> bool:
        """Tell whether the row asks for one."""
        return row.job.sampling.dry is not None

    def __init__(self, rows: Sequence[LiveRow], vocabulary: int) -> None:
        asking = [
            (i, dry, _text_before(row, dry, vocabulary))
            for i, row in enumerate(rows)
            if (dry := row.job.sampling.dry) is not None
        ]
        settings = [dry for _, dry, _ in asking]
        self._rows = mx.array([i for i, _, _ in asking])
        self._base = _column([each.base for each in settings], mx.float32)
        self._multiplier = _column([each.multiplier for each in settings], mx.float32)
        self._allowed = _column([each.allowed_length for each in settings])
        self._exponent = _column(list(map(_highest_exponent, settings)))
        self._last_n = [each.last_n if each.last_n > 0 else _NO_BOUND for each in settings]
        self._fill_breakers(settings, vocabulary)
        self._fill_texts([text for _, _, text in asking])

    def _fill_breakers(self, settings: Sequence[DryPenalty], vocabulary: int) -> None:
        """Make the table of breakers `(rows, vocabulary)`; most rows have the same ones."""
        sets = list(dict.fromkeys(each.breakers for each in settings))
        table = np.zeros((len(sets), vocabulary), dtype=np.bool_)
        for part, breakers in zip(table, sets, strict=True):
            part[[token for token in breakers if token < vocabulary]] = True
        self._breakers = mx.array(table)[[sets.index(each.breakers) for each in settings]]

    def _fill_texts(self, texts: Sequence[_Text]) -> None:
        """Set the texts before the next input, and the lengths of the repetitions that end at each
        of their tokens but the last."""
        width = max(2, *map(len, texts))
        padded = np.zeros((len(texts), width), dtype=np.int32)
        lengths = np.zeros_like(padded)
        for i, text in enumerate(texts):
            padded[i, width - len(text) :] = text
            lengths[i, width - len(text) :] = repetitions(text)
        self._texts = mx.array(padded)
        self._lengths = mx.array(lengths[:, :-1])
        self._held = list(map(len, texts))

    def __call__(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """Return the processed logits `(rows, vocabulary)` of a step.

        Args:
            logits: `(rows, vocabulary)`.
            inputs: `(rows,)`, the tokens that the step was fed.
        """
        fed = inputs[self._rows].astype(mx.int32)[:, None]
        self._texts = mx.concatenate([self._texts, fed], axis=-1)
        self._held = [held + 1 for held in self._held]
        here, following = self._texts[:, :-1], self._texts[:, 1:]
        longer = mx.pad(self._lengths, [(0, 0), (1, 0)]) + 1
        self._lengths = mx.where(here == fed, longer, 0)
        logits = logits.astype(mx.float32)
        # Not indexed with two arrays: MLX's CPU back end takes thirty times as long.
        values = mx.take_along_axis(logits[self._rows], following, axis=-1) - self._penalties()
        # A token may follow in several places: the lowest value is that of the highest penalty.
        return logits.at[self._rows[:, None], following].minimum(values)

    def _penalties(self) -> mx.array:
        """Return the penalty of the token behind each place `(rows, places)`."""
        breaks = mx.take_along_axis(self._breakers, self._texts, axis=-1)
        places = self._texts.shape[-1] - 1
        last = mx.where(breaks, mx.arange(places + 1), -1).max(axis=-1, keepdims=True)
        reach = _column([min(each) for each in zip(self._held, self._last_n, strict=True)])
        within = mx.arange(-places, 0) + reach  # tokens up to each place
        lengths = mx.minimum(mx.minimum(self._lengths, places - last), within)
        above = lengths - self._allowed
        counts = (above >= 0) & (within > 0) & mx.logical_not(breaks[:, 1:])
        powers = mx.power(self._base, mx.minimum(above, self._exponent).astype(mx.float32))
        return mx.where(counts, self._multiplier * powers, 0)


def repetitions(text: _Text) -> _Text:
    """Return how many tokens up to each place of a text are those at its end; 0 for the end.

    The Z-algorithm, from the end: a repetition found tells what repetitions lie in it, so no token
    is looked at twice.
    """
    found = np.zeros(len(text), dtype=np.int32)
    if not len(text):
        return found
    backwards = text[::-1]
    tokens: list[int] = backwards.tolist()
    lengths = [0] * len(tokens)
    start = stop = 0  # the repetition that goes furthest
    places = np.flatnonzero(backwards[1:] == backwards[0]) + 1
    for place in places.tolist():
        length = min(lengths[place - start], stop - place) if place < stop else 0
        if place + length >= stop:
            while place + length < len(tokens) and tokens[place + length] == tokens[length]:
                length += 1
            start, stop = place, place + length
        lengths[place] = length
    found[-1 - places] = [lengths[place] for place in places.tolist()]
    return found


def _text_before(row: LiveRow, dry: DryPenalty, vocabulary: int) -> _Text:
    """Return what counts of a row's text before its next input."""
    seen = row.seen[:-1] if row.fresh else row.seen
    text = np.array(seen[-dry.last_n :] if dry.last_n > 0 else seen, dtype=np.int32)
    return np.minimum(text, vocabulary - 1)


def _highest_exponent(dry: DryPenalty) -> int:
    if dry.base <= 1.000001:
        return _NO_BOUND
    return int(min(_LOG_OF_MOST, log(_MOST / dry.multiplier)) / log(dry.base))


def _column(values: Sequence[float], dtype: mx.Dtype = mx.int32) -> mx.array:
    return mx.array(list(values), dtype=dtype)[:, None]
