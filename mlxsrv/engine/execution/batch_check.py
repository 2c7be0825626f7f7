"""The batch check of a model at its load: does a row in a batch get what it would get alone?

mlx-lm's models are called with rows of different lengths, and not all of them can be: some make a
mask that fits one row only, some place all rows where the longest is, some read padding as text.
Their answers would be wrong, mostly without an error. So a few tokens of three texts are prefilled
and decoded alone and in a batch, and the logits and the states of all layers are compared.

Kernels round differently for different numbers of rows, and most where weights have few bits. So
copies of each row are decoded together as well: these differ from the row alone by rounding only.
Rows of different lengths go through the kernels of the copies, and may differ from these by some
times as much.

Rows are decoded apart only where a second check with other tokens fails, too: rounding may send a
token to another expert. A check takes twelve passes over 48 tokens in all, so about a second for
the largest models.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from functools import partial
from itertools import count, islice
from math import isfinite
from typing import Any, NamedTuple, TypeAlias, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, RotatingKVCache

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.quantized import LaterTokens
from mlxsrv.engine.cache.row_cache import RowCache, list_layers
from mlxsrv.engine.execution.read import read_together
from mlxsrv.engine.faults import describe_error
from mlxsrv.engine.ranks.rank_group import RankGroup

_log = logging.getLogger("mlxsrv.engine")

_EXACT = 1e-3  # of the values in float32, where right models are off by 2e-6
_ROUNDED = 0.05  # of the values in a type with fewer bits
_MULTIPLE = 4  # of what rounding does
_MOST = 0.4  # of the values, whatever rounding does

_STRIDE = 7919  # from a text's token to the next; a prime, so that none comes again soon

_Arrays: TypeAlias = list[mx.array]
"""The logits and the states of a row, layer by layer."""


class _Text(NamedTuple):
    """A text in three parts: `head` is prefilled alone, `part` alone and in a batch, `last` is
    decoded."""

    head: tuple[int, ...]
    part: tuple[int, ...]
    last: int


def _make_texts(first: int, vocabulary: int) -> list[_Text]:
    """Texts of tokens from the `first` on. The longest is between the others, and padding stands
    behind parts with and without a head.

    The tokens are from all over the vocabulary. Those at its beginning are often reserved, and all
    alike, since no training has changed them: attention would give the same whatever it reads.
    """
    tokens = (token % vocabulary for token in count(first, _STRIDE))
    return [
        _Text(tuple(islice(tokens, head)), tuple(islice(tokens, part)), next(tokens))
        for head, part in ((0, 4), (8, 1), (0, 5))
    ]


class _Alone(NamedTuple):
    """A text, its KV cache before and behind its part, and what the last token gets."""

    text: _Text
    begun: RowCache
    read: RowCache
    decoded: _Arrays


def check_batching(
    model: Any, caches: KVCacheFactory, ranks: RankGroup | None = None
) -> Generator[None, None, None]:
    """Find out whether rows of the model can be decoded in a batch, and prefilled in a padded
    batch. Sets `batched`, `pads` and `group_masks` of `caches`. Yields between passes.

    Args:
        model: a model of mlx-lm's.
        caches: makes the KV caches of its rows.
        ranks: all find the same; None: this process is alone.

    Raises what the model raises for a row alone.
    """
    if not caches.batched:
        layers = list_layers(caches.make().layers)
        kinds = ", ".join(sorted({type(each).__name__ for each in layers}))
        caches.separate(f"some of its KV caches ({kinds}) are of one row only")
        return
    if _has_block_index(model):
        caches.separate("it chooses blocks of columns by the longest row")
        return
    # Not evaluated: only its shape is looked at. Two tokens, for one would be a decode step.
    vocabulary = model(mx.array([[0, 0]]), cache=caches.make().layers).shape[-1]
    for first, caches.group_masks in ((1, False), (51, False), (51, True)):
        rows: list[_Alone] = []
        for text in _make_texts(first, vocabulary):
            rows.append((yield from _run_alone(model, caches, text)))
        limit, off = yield from _check_decoding(model, caches, rows)
        if _all_say(ranks, off <= limit):
            break
        if not caches.group_masks:  # with such masks, most models raise errors
            share = f"are off by {off:.1%}, and rounding explains {limit:.1%}"
            reason = f"beside others they {share if isfinite(off) else 'raise errors'}"
    else:
        caches.separate(reason)
        return
    expected = [_list_states(row.read, len(row.text.part)) for row in rows]
    padded = _attempt(partial(_read_padded, model, caches, rows))
    # Other kernels, and more tokens that may go to other experts; wrong states are off by all.
    caches.pads = _all_say(ranks, _compare(expected, padded)[-1] <= min(4 * limit, 2 * _MOST))
    yield


def _check_decoding(
    model: Any, caches: KVCacheFactory, rows: Sequence[_Alone]
) -> Generator[None, None, tuple[float, float]]:
    """Decode the rows together. Returns the error that rounding explains, and the error measured;
    both are shares of the values."""
    copies: list[_Arrays] = []
    for number, row in enumerate(rows):
        copies += _attempt(partial(_decode, model, caches, [row] * len(rows)))[number:][:1]
        yield
    alone = [row.decoded for row in rows]
    rounding = _take_middle(_compare(alone, copies))
    beside = _attempt(partial(_decode, model, caches, rows))
    yield
    layers = list_layers(rows[0].read.layers)
    exact = not any(isinstance(layer, LaterTokens) for layer in layers)
    exact &= all(array.dtype == mx.float32 for array in alone[0])
    least = _EXACT if exact else _ROUNDED
    off = _take_middle(_compare(copies, beside))
    return min(max(least, _MULTIPLE * rounding), _MOST), max(rounding, off)


def _has_block_index(model: Any) -> bool:
    """Whether layers choose blocks of columns to attend to, as MiniMax M3's do. Those near the end
    are chosen in any case, for all rows by the end of the longest. A short check does not show
    it: it matters in a text of more blocks than are chosen."""
    return any(getattr(module, "index_topk_blocks", None) for module in model.modules())


def _all_say(ranks: RankGroup | None, found: bool) -> bool:
    return found if ranks is None else all(ranks.exchange_number(int(found)))


# Passes.


def _run_alone(model: Any, caches: KVCacheFactory, text: _Text) -> Generator[None, None, _Alone]:
    begun = caches.make()
    if text.head:
        begun = _read(model, begun, text.head)
        yield
    read = _read(model, begun.copy(), text.part)
    yield
    own = read.copy()
    logits = model(mx.array([[text.last]]), cache=own.layers)
    decoded = [logits[0, -1], *_list_states(own, 1)]
    mx.eval(decoded)
    yield
    return _Alone(text, begun, read, decoded)


def _read(model: Any, cache: RowCache, tokens: tuple[int, ...]) -> RowCache:
    """Prefill these tokens. The KV cache returned has no room for more."""
    model(mx.array([tokens]), cache=cache.layers)
    read = RowCache(cache.layers, cache.tokens + len(tokens), views=True)
    read.materialize()
    return read


def _decode(model: Any, caches: KVCacheFactory, rows: Sequence[_Alone]) -> list[_Arrays]:
    together = caches.make_rows()
    columns = max(row.read.tokens for row in rows) + 1
    together.arrange([row.read.copy() for row in rows], len(rows), columns)
    logits = model(mx.array([[row.text.last] for row in rows]), cache=together.layers)
    together.advance(1)
    return [
        [each[-1], *_list_states(together.view_row(number), 1)]
        for number, each in enumerate(logits)
    ]


def _read_padded(model: Any, caches: KVCacheFactory, rows: Sequence[_Alone]) -> list[_Arrays]:
    parts = [row.text.part for row in rows]
    together = read_together(model, caches, [row.begun.copy() for row in rows], parts)
    return [_list_states(together.view_row(number), len(part)) for number, part in enumerate(parts)]


def _attempt(run: Callable[[], list[_Arrays]]) -> list[_Arrays]:
    """The arrays of rows together; none if the model raises an error."""
    try:
        found = run()
        mx.eval(found)
        return found
    except Exception as error:
        _log.debug("rows cannot share a pass: %s", describe_error(error))
        return []


# What is compared.


def _list_states(cache: RowCache, tokens: int) -> _Arrays:
    """The keys and values of the last tokens; of a recurrent layer, its states."""
    found: _Arrays = []
    for layer in list_layers(cache.layers):
        if isinstance(layer, ArraysCache):
            found += [state for state in layer.cache if state is not None]
        elif not layer.empty():
            found += [_take_last(layer, held, tokens) for held in layer.keys_and_values()]
    return [array for array in found if array.size]


def _take_last(layer: Any, held: Any, tokens: int) -> mx.array:
    if isinstance(layer, LaterTokens):
        weights, scales, biases = held
        held = mx.dequantize(weights, scales, biases, layer.group_size, layer.bits)
    elif isinstance(layer, RotatingKVCache):
        held = layer._temporal_order(held)
    # A copy, for a view would hold all columns that there is room for.
    last: mx.array = held[:, :, max(held.shape[2] - tokens, 0) :] * 1
    return last


def _take_middle(off: Sequence[float]) -> float:
    """Return that of the middle row: rounding may send a token of one row to another expert, and
    what is wrong for one length is wrong for two of three."""
    return off[len(off) // 2]


def _compare(expected: Sequence[_Arrays], found: Sequence[_Arrays]) -> list[float]:
    """The most that an array of each row is off, as a share of its values, in ascending order.
    Infinite where there is none, or no number."""
    if not found or [*map(len, expected)] != [*map(len, found)]:
        return [float("inf")]
    off = [
        mx.stack(
            [
                _measure(own.astype(mx.float32), other.astype(mx.float32))
                for own, other in zip(row, beside, strict=True)
            ]
        ).max()
        for row, beside in zip(expected, found, strict=True)
    ]
    numbers = cast(list[float], mx.nan_to_num(mx.stack(off), nan=float("inf")).tolist())
    return sorted(numbers)


def _measure(own: mx.array, other: mx.array) -> mx.array:
    # Of logits, what all have in common means nothing; of states that is little.
    values = mx.maximum(mx.abs(own - own.mean()).mean(), 1e-9)
    return mx.abs(own - other).mean() / values
