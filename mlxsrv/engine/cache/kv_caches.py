"""The factory of a model's KV caches: as the model makes them, or bounded, or quantized.

Every KV cache of a model comes from its one factory, so rows and cached prompts have the same kind.
An option that the model does not support is left out, with a note.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    KVCache,
    make_prompt_cache,
)

from mlxsrv.engine.cache.attention_sinks import SinkCache
from mlxsrv.engine.cache.quantized import QuantizedCache
from mlxsrv.engine.cache.row_cache import FULL, Layers, RowCache, list_layers
from mlxsrv.engine.cache.row_caches import RowCaches, can_share

_log = logging.getLogger("mlxsrv.engine")

_GROUPS = (64, 32)  # elements with one scale; mlx-lm takes 64


class KVCacheFactory:
    """Makes the KV cache of one row.

    Args:
        model: a model of mlx-lm's.
        max_size: tokens that each layer keeps; all, unless given. Only for models that do not make
            their own kind of cache.
        group: elements of keys and values that share a scale when quantized.
        bits: bits of a quantized element; not quantized, unless given.
        start: tokens of a text that are not quantized.
        whole: of a layer with several KV caches, all are quantized; else the first one only.
        notes: options that are left out, and why.

    Attributes:
        batched: rows can be decoded together.
        pads: texts can be read together with padding.
        group_masks: masks have a dimension more, for queries in groups of heads.

    The three follow from the kinds of layers first, and then from the batch check
    (`execution.batch_check`).
    """

    def __init__(
        self,
        model: Any,
        *,
        max_size: int | None = None,
        group: int = 64,
        bits: int | None = None,
        start: int = 0,
        whole: bool = True,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._model = model
        self._max_size = max_size
        self._group = group
        self._bits = bits
        self._start = start
        self._whole = whole
        self.notes = notes
        empty = self._make_layers()
        self.batched = can_share(empty)
        recurrent = any(isinstance(layer, ArraysCache) for layer in list_layers(empty))
        self.pads = self.batched and not recurrent
        self.group_masks = False
        self.cuts = all(type(layer) in FULL for layer in list_layers(empty))

    @property
    def settings(self) -> str:
        """The settings that all its KV caches have in common, beside the kinds of their layers."""
        return (
            f"max_size={self._max_size} group={self._group} bits={self._bits} start={self._start}"
        )

    def make(self) -> RowCache:
        return RowCache(self._make_layers())

    def make_rows(self, *, reading: bool = False) -> RowCaches:
        """KV caches of rows that are decoded together; or of rows whose texts are read together."""
        return RowCaches(
            self._make_layers(),
            reading=reading,
            alone=not self.batched,
            group_masks=self.group_masks,
        )

    def separate(self, reason: str) -> None:
        """Have rows decode one at a time, each with KV caches of mlx-lm's own."""
        self.batched = self.pads = self.group_masks = False
        self.notes += (f"max_concurrency: rows of this model decode one at a time: {reason}",)

    def _make_layers(self) -> Layers:
        layers: Layers = make_prompt_cache(self._model)
        if self._max_size is not None:
            return [SinkCache(self._max_size) for _ in layers]
        bits = self._bits
        return layers if bits is None else [self._quantize(layer, bits) for layer in layers]

    def _quantize(self, layer: Any, bits: int) -> Any:
        if type(layer) is CacheList:
            first, *others = layer.caches
            others = [self._quantize(each, bits) for each in others] if self._whole else others
            return CacheList(self._quantize(first, bits), *others)
        if type(layer) is KVCache:
            return QuantizedCache(self._start, self._group, bits)
        return layer


def choose_kv_caches(
    model: Any, max_kv_size: int | None, kv_bits: int | None, start: int = 0
) -> Generator[None, None, KVCacheFactory]:
    """Make the factory for these options, as far as the model supports them.

    Yields between passes of the model, which find out whether it can.

    Args:
        model: a model of mlx-lm's, patched so that its attention can read quantized keys.
        max_kv_size: the most tokens of a row; None: all.
        kv_bits: bits of a quantized number; None: none is quantized.
        start: tokens of a text that are not quantized.
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
    reason = ""
    # Models use what indexes a layer's tokens as an array, so all but the first may have to stay.
    for whole in (True, False):
        group, reason = yield from _try_quantized(model, kv_bits, whole)
        if group is not None:
            return KVCacheFactory(
                model, group=group, bits=kv_bits, start=start, whole=whole, notes=tuple(notes)
            )
        if not any(type(layer) is CacheList for layer in plain):
            break
    return KVCacheFactory(model, notes=(*notes, f"kv_bits: {reason}; its cache is not quantized"))


def _try_quantized(
    model: Any, bits: int, whole: bool
) -> Generator[None, None, tuple[int | None, str]]:
    """The elements that share a scale, if the model can use quantized KV caches; else the reason
    why it cannot."""
    layers: Layers = make_prompt_cache(model)
    model(mx.array([[0]]), cache=layers)  # not evaluated: only shapes are looked at
    yield
    firsts = [layer.caches[0] if type(layer) is CacheList else layer for layer in layers]
    used = [
        layer
        for layer in list_layers(layers if whole else firsts)
        if type(layer) is KVCache and not layer.empty()
    ]
    if not used:
        return None, "no layer of this model has mlx-lm's KVCache, which holds all tokens of a text"
    sizes = {array.shape[-1] for layer in used for array in (layer.keys, layer.values)}
    group = _find_group(sizes)
    if group is None:
        heads = ", ".join(map(str, sorted(sizes)))
        return None, f"heads of {heads} numbers cannot be quantized, but multiples of {_GROUPS[-1]}"
    cache = KVCacheFactory(model, group=group, bits=bits, start=1, whole=whole).make().layers
    try:
        for tokens in ([[1, 2, 3]], [[4]]):
            mx.eval(model(mx.array(tokens), cache=cache))
            yield
    except Exception:  # not all kinds of attention can
        _log.debug("the model cannot have a quantized cache", exc_info=True)
        return None, "this model's attention cannot read quantized keys and values"
    return group, ""


def _find_group(sizes: Iterable[int]) -> int | None:
    """The largest group that divides these head sizes."""
    return next((group for group in _GROUPS if all(size % group == 0 for size in sizes)), None)
