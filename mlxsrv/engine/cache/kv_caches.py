"""Makes KV caches of rows, as the model has them, bounded or quantized; and merges them.

Every KV cache of a model comes from its one factory, so rows and kept prompts have the same kind.
A wish that the model cannot fulfil is noted, and left out.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    BatchKVCache,
    CacheList,
    KVCache,
    QuantizedKVCache,
    make_prompt_cache,
)

from mlxsrv.engine.cache.attention_sinks import SinkCache
from mlxsrv.engine.cache.row_cache import Layers, RowCache

_GROUPS = (64, 32)  # elements with one scale; mlx-lm takes 64


class KVCacheFactory:
    """Makes the KV cache of one row.

    Args:
        model: a model of mlx-lm's.
        max_size: tokens that each layer keeps; all, unless given. Only for models that do not make
            their own kind of cache.
        group: elements of keys and values that share a scale when quantized.
        bits: bits of a quantized element; not quantized, unless given.
        notes: wishes that could not be fulfilled, and why.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_size: int | None = None,
        group: int | None = None,
        bits: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._model = model
        self._max_size = max_size
        self._group = group
        self._bits = bits
        self.notes = notes
        self.pads: bool | None = None  # whether padded prompts are read rightly; None: not tried
        empty = self._make_layers()
        self.batched = _mergeable(empty)
        self.cuts = all(type(layer) in (KVCache, QuantizedKVCache) for layer in empty)

    @property
    def quantized(self) -> bool:
        return self._bits is not None

    @property
    def bounded(self) -> bool:
        return self._max_size is not None

    @property
    def settings(self) -> str:
        """What all its KV caches have in common, beside the kinds of their layers."""
        return f"max_size={self._max_size} group={self._group} bits={self._bits}"

    def make(self) -> RowCache:
        return RowCache(self._make_layers())

    def _make_layers(self) -> Layers:
        layers: Layers = make_prompt_cache(self._model)
        if self._max_size is not None:
            return [SinkCache(self._max_size) for _ in layers]
        if self._bits is None:
            return layers
        return [
            layer.to_quantized(group_size=self._group, bits=self._bits)
            if type(layer) is KVCache
            else layer
            for layer in layers
        ]


def choose_kv_caches(
    model: Any, max_kv_size: int | None, kv_bits: int | None
) -> Generator[None, None, KVCacheFactory]:
    """The factory of what was asked for, as far as the model can have it.

    Yields between passes of the model, which find out whether it can.
    """
    notes: list[str] = []
    plain: Layers = make_prompt_cache(model)
    if max_kv_size is not None and not all(type(layer) is KVCache for layer in plain):
        names = ", ".join(sorted({type(layer).__name__ for layer in plain}))
        notes.append(f"max_kv_size: this model makes its own caches ({names}); it is not bounded")
        max_kv_size = None
    if max_kv_size is not None and kv_bits is not None:
        notes.append("kv_bits: a cache that max_kv_size bounds cannot be quantized; it is not")
        kv_bits = None
    if kv_bits is None:
        return KVCacheFactory(model, max_size=max_kv_size, notes=tuple(notes))
    group = _group(model, plain)
    yield
    if group is None:
        notes.append("kv_bits: this model has no cache that can be quantized; it is not")
        return KVCacheFactory(model, notes=tuple(notes))
    quantized = KVCacheFactory(
        model,
        group=group,
        bits=kv_bits,
        notes=(*notes, "kv_bits: rows with a quantized cache run one at a time"),
    )
    try:
        cache = quantized.make().layers
        for tokens in ([[1, 2, 3]], [[4]]):
            mx.eval(model(mx.array(tokens), cache=cache))
            yield
    except Exception as error:  # not all kinds of attention can, nor all head sizes
        reason = " ".join(str(error).split())
        notes.append(f"kv_bits: this model cannot have a quantized cache ({reason}); it has not")
        return KVCacheFactory(model, notes=tuple(notes))
    return quantized


def _group(model: Any, cache: Layers) -> int | None:
    """The largest group that divides the head sizes of all layers that can be quantized."""
    model(mx.array([[0]]), cache=cache)  # not evaluated: only shapes are looked at
    layers = [layer for layer in cache if type(layer) is KVCache and not layer.empty()]
    sizes = [array.shape[-1] for layer in layers for array in (layer.keys, layer.values)]
    if not sizes:
        return None
    return next((group for group in _GROUPS if all(size % group == 0 for size in sizes)), None)


def _mergeable(cache: Layers) -> bool:
    return all(
        _mergeable(list(layer.caches)) if isinstance(layer, CacheList) else hasattr(layer, "merge")
        for layer in cache
    )


def merge(caches: Sequence[RowCache]) -> Layers:
    """The KV caches of single rows as one of a batch."""
    rows = [cache.layers for cache in caches]
    return [_merge(list(layers)) for layers in zip(*rows, strict=True)]


def _merge(layers: list[Any]) -> Any:
    kind = PaddedKVCache if type(layers[0]) is KVCache else layers[0]
    return kind.merge(layers)


class PaddedKVCache(BatchKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's KV cache of a left-padded batch, whose rows can be cut by different numbers of
    tokens; and with less work for the masks of decode steps.

    A step's mask `(rows, 1, 1, tokens)` says only where rows are padded. It is made for many steps
    at once and cut to length at each: one operation instead of ten. A row that is alone has no
    padding, since padding that all rows share is cut off, and so needs no mask.

    mlx-lm's rows all end at the same column. After `cut` a row may end some columns before the
    last row: it is *ragged*. What lies behind its end is masked, and overwritten as the row goes
    on. So a cut copies nothing. When the rows change, which copies all of them anyway, they are
    aligned again. The rotary positions follow from `offset`, the tokens of each row, in any case.
    """

    # mlx-lm's, with types.
    keys: mx.array
    values: mx.array
    offset: mx.array  # tokens of each row
    left_padding: mx.array
    _idx: int  # the column at which the longest rows end

    def __init__(self, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self._ahead: mx.array | None = None
        self._padding: mx.array | None = None  # the padding that `_ahead` was made for
        # Columns between each row's end and the last row's, which is at `_idx`; none: no row is
        # ragged.
        self._short: list[int] = []

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> PaddedKVCache:
        merged = super().merge(caches)
        # Of empty caches mlx-lm makes its own kind.
        return merged if type(merged) is cls else cls([0] * len(caches))

    def finalize(self) -> None:
        self._ahead = None  # this changes the padding in place; others replace it
        super().finalize()

    def cut(self, surplus: Sequence[int]) -> None:
        """Forget the last tokens of each row, so many of each `(rows,)`; no more than it has."""
        short = self._short or [0] * len(surplus)
        self._end_rows([a + b for a, b in zip(short, surplus, strict=True)])
        self.offset = self.offset - mx.array(list(surplus))

    def align(self) -> None:
        """Have all rows end at the same column, which copies them."""
        if self._short:
            self._align(range(len(self._short)))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if not self._short:
            fetched: tuple[mx.array, mx.array] = super().update_and_fetch(keys, values)
            return fetched
        tokens = keys.shape[2]
        self._reserve(self._idx + tokens)
        columns = self._columns(tokens)[:, None, :, None]
        self.keys = mx.put_along_axis(self.keys, columns, keys, axis=2)
        self.values = mx.put_along_axis(self.values, columns, values, axis=2)
        self.offset = self.offset + tokens
        self._idx += tokens
        return self.keys_and_values()  # type: ignore[no-any-return]

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array | None:
        if self._short:
            return self._make_ragged_mask(N, **kwargs)
        if N != 1 or any(value is not None for value in kwargs.values()):
            mask: mx.array = super().make_mask(N, return_array, **kwargs)
            return mask
        if self.left_padding.shape[0] == 1 and not return_array:
            return None
        if (
            self._ahead is None
            or self._padding is not self.left_padding
            or self._ahead.shape[-1] <= self._idx
        ):
            columns = mx.arange(self._idx + self.step)
            self._padding = self.left_padding
            self._ahead = mx.expand_dims(self.left_padding, (1, 2, 3)) <= columns
        return self._ahead[..., : self._idx + 1]

    def filter(self, batch_indices: mx.array) -> None:
        if not self._short:
            super().filter(batch_indices)
            return
        kept: Any = batch_indices.tolist()
        self._align(kept)

    def extend(self, other: PaddedKVCache) -> None:
        for each in (self, other):
            each.align()
        super().extend(other)

    def extract(self, idx: int) -> KVCache:
        if not self._short:
            row: KVCache = super().extract(idx)
            return row
        row = self._view(idx)
        row.keys, row.values = mx.contiguous(row.keys), mx.contiguous(row.values)
        return row

    def _view(self, row: int) -> KVCache:
        """One row of ragged rows, not copied."""
        padding: Any = self.left_padding[row].item()
        columns = slice(padding, self._idx - self._short[row])
        view = KVCache()
        view.keys = self.keys[row : row + 1, :, columns]
        view.values = self.values[row : row + 1, :, columns]
        view.offset = view.keys.shape[2]
        return view

    def _end_rows(self, short: list[int]) -> None:
        """Have each row end so many columns before `_idx`, which moves to the end of the last."""
        least = min(short)
        self._idx -= least
        self._short = [each - least for each in short] if any(e > least for e in short) else []

    def _columns(self, tokens: int) -> mx.array:
        """The columns of each row's next tokens, `(rows, tokens)`."""
        return mx.expand_dims(self.left_padding + self.offset, 1) + mx.arange(tokens)

    def _make_ragged_mask(self, tokens: int, window_size: int | None = None) -> mx.array:
        """The mask `(rows, 1, tokens, columns)` of mlx-lm's `create_causal_mask`, for rows that end
        at columns of their own."""
        queries = mx.expand_dims(self._columns(tokens), (1, 3))
        keys = mx.arange(self._idx + tokens)
        mask = (mx.expand_dims(self.left_padding, (1, 2, 3)) <= keys) & (keys <= queries)
        return mask if window_size is None else mask & (queries < keys + window_size)

    def _reserve(self, columns: int) -> None:
        """Make room for so many columns."""
        missing = columns - self.keys.shape[2]
        if missing > 0:
            room = [(0, 0), (0, 0), (0, -(-missing // self.step) * self.step), (0, 0)]
            self.keys, self.values = mx.pad(self.keys, room), mx.pad(self.values, room)

    def _align(self, rows: Iterable[int]) -> None:
        """Keep these rows, and have them end at the same column."""
        aligned = PaddedKVCache.merge([self._view(row) for row in rows])
        self.keys, self.values = aligned.keys, aligned.values
        self.offset, self.left_padding = aligned.offset, aligned.left_padding
        self._idx = aligned._idx
        self._short = []
