"""Making the caches of rows: as the model has them, bounded, or quantized; and of batches.

Every cache of a model that is served comes from its one maker, so that rows, trials and kept
prompts agree on the kind. What was asked for and cannot be had is noted, and left out.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
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
from mlxsrv.engine.cache.prompt_cache import Cache

_GROUPS = (64, 32)  # elements with one scale; mlx-lm takes 64


class Caches:
    """Makes the cache of one row.

    Args:
        model: a model of mlx-lm's.
        max_size: tokens that each layer keeps, where the model leaves the choice to others.
        group: quantize keys and values by so many elements, ...
        bits: ... to so many bits each.
        notes: what could not be had, and why.
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
        empty = self.make()
        self.batched = _mergeable(empty)
        self.cuts = all(type(layer) in (KVCache, QuantizedKVCache) for layer in empty)

    @property
    def quantized(self) -> bool:
        return self._bits is not None

    @property
    def bounded(self) -> bool:
        return self._max_size is not None

    def make(self) -> Cache:
        cache: Cache = make_prompt_cache(self._model)
        if self._max_size is not None:
            return [SinkCache(self._max_size) for _ in cache]
        if self._bits is None:
            return cache
        return [
            layer.to_quantized(group_size=self._group, bits=self._bits)
            if type(layer) is KVCache
            else layer
            for layer in cache
        ]


def choose_caches(
    model: Any, max_kv_size: int | None, kv_bits: int | None
) -> Generator[None, None, Caches]:
    """The maker of what was asked for, as far as the model can have it. Yields between trials."""
    notes: list[str] = []
    plain: Cache = make_prompt_cache(model)
    if max_kv_size is not None and not all(type(layer) is KVCache for layer in plain):
        names = ", ".join(sorted({type(layer).__name__ for layer in plain}))
        notes.append(f"max_kv_size: this model makes its own caches ({names}); it is not bounded")
        max_kv_size = None
    if max_kv_size is not None and kv_bits is not None:
        notes.append("kv_bits: a cache that max_kv_size bounds cannot be quantized; it is not")
        kv_bits = None
    if kv_bits is None:
        return Caches(model, max_size=max_kv_size, notes=tuple(notes))
    group = _group(model, plain)
    yield
    if group is None:
        notes.append("kv_bits: this model has no cache that can be quantized; it is not")
        return Caches(model, notes=tuple(notes))
    quantized = Caches(
        model,
        group=group,
        bits=kv_bits,
        notes=(*notes, "kv_bits: rows with a quantized cache run one at a time"),
    )
    try:
        cache = quantized.make()
        for tokens in ([[1, 2, 3]], [[4]]):
            mx.eval(model(mx.array(tokens), cache=cache))
            yield
    except Exception as error:  # not all attention can, nor all sizes of heads with all bits
        reason = " ".join(str(error).split())
        notes.append(f"kv_bits: this model cannot have a quantized cache ({reason}); it has not")
        return Caches(model, notes=tuple(notes))
    return quantized


def _group(model: Any, cache: Cache) -> int | None:
    """The largest group that divides the heads of all caches that can be quantized."""
    model(mx.array([[0]]), cache=cache)  # never evaluated: only shapes are looked at
    layers = [layer for layer in cache if type(layer) is KVCache and not layer.empty()]
    sizes = [array.shape[-1] for layer in layers for array in (layer.keys, layer.values)]
    if not sizes:
        return None
    return next((group for group in _GROUPS if all(size % group == 0 for size in sizes)), None)


def _mergeable(cache: Cache) -> bool:
    return all(
        _mergeable(list(layer.caches)) if isinstance(layer, CacheList) else hasattr(layer, "merge")
        for layer in cache
    )


def merge(caches: Sequence[Cache]) -> Cache:
    """Caches of single rows as one of a batch, layer by layer."""
    return [_merge(list(layers)) for layers in zip(*caches, strict=True)]


def _merge(layers: list[Any]) -> Any:
    kind = RowsCache if type(layers[0]) is KVCache else layers[0]
    return kind.merge(layers)


class RowsCache(BatchKVCache):  # type: ignore[misc]  # mlx-lm has no types
    """mlx-lm's cache of a batch, with less work for the masks of decode steps.

    A step's mask `(rows, 1, 1, tokens)` tells only where rows are padded on their left. It is made
    for many steps at once and cut to length at each: one operation, not ten. A row that is alone
    is not padded, for what all rows are padded with is cut off, and needs no mask.
    """

    def __init__(self, left_padding: list[int]) -> None:
        super().__init__(left_padding)
        self._ahead: mx.array | None = None
        self._padding: mx.array | None = None  # of which rows it is

    @classmethod
    def merge(cls, caches: Sequence[KVCache]) -> RowsCache:
        merged = super().merge(caches)
        return merged if type(merged) is cls else cls([0] * len(caches))  # of empty ones

    def finalize(self) -> None:
        self._ahead = None  # it changes the padding in place, where other methods replace it
        super().finalize()

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> mx.array | None:
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
