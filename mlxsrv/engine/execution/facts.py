"""Facts of a model that the scheduler needs.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.kv_costs import list_layers, sum_costs
from mlxsrv.engine.events import KVCost
from mlxsrv.engine.execution.read import read_together
from mlxsrv.engine.outcomes import StoreFacts, TextFacts

_LEAST_PASS = 4 * 1024 * 1024  # bytes; a pass of the smallest model costs as much in calls
_ROUNDING = 0.1  # of the logits' standard deviation; bfloat16 stays well below


def find_facts(
    model: Any,
    caches: KVCacheFactory,
    *,
    prompt_cache_bytes: int,
    drafts: bool = False,
    draft_costs: tuple[KVCost, ...] = (),
    lookup: bool = False,
    padding: int | None = None,
    store: StoreFacts | None = None,
) -> TextFacts:
    """Find the facts of `model` that the scheduler needs.

    Args:
        model: a model of mlx-lm's.
        caches: makes the KV caches of its rows. Whether padded prompts are read rightly is noted
            there, if it was not known.
        prompt_cache_bytes: the most bytes of kept prompts.
        drafts: there is a draft model, and it can be used.
        draft_costs: of a text that it reads.
        lookup: tokens may be proposed to all rows.
        padding: bytes of padding that cost as much as another pass; as many as the weights have,
            unless given.
        store: kept prompts are written to disk; None: they are not.
    """
    if caches.pads is None:
        caches.pads = caches.batched and masks_padding(model)
    cache = caches.make().layers
    # Not evaluated: only shapes are looked at. Two tokens, for one would be a decode step.
    logits = model(mx.array([[0, 0]]), cache=cache)
    return TextFacts(
        batched=caches.batched,
        cuts=caches.cuts,
        pads=caches.pads,
        drafts=drafts,
        draft_costs=draft_costs,
        lookup=lookup,
        padding=most_padding(model) if padding is None else padding,
        vocabulary=int(logits.shape[-1]),
        prompt_cache_bytes=prompt_cache_bytes,
        store=store,
        kv_costs=sum_costs(cache),
    )


def most_padding(model: Any) -> int:
    """Bytes of padding that cost as much as another pass of the model."""
    return max(_LEAST_PASS, sum(array.nbytes for array in weights(model)))


def weights(model: Any) -> list[mx.array]:
    """All arrays that were read from the model's files."""
    return [
        array for _, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    ]


def masks_padding(model: Any) -> bool:
    """Whether the model reads a padded prompt as it would the prompt alone."""
    probe = try_padding(model)
    while True:
        try:
            next(probe)
        except StopIteration as stop:
            return bool(stop.value)


def try_padding(model: Any) -> Generator[None, None, bool]:
    """Find out what `masks_padding` returns, yielding between passes of the model.

    Attention layers leave padding out. A recurrent layer has to mask it, and not all of mlx-lm's
    do. So models that have one are tried: with a layer that reads padding as text, the logits are
    off by as much as they vary, else by rounding.
    """
    caches = KVCacheFactory(model)  # a model with a recurrent layer has its own kind only
    layers = list_layers(caches.make().layers)
    if not any(isinstance(layer, ArraysCache) for layer in layers):
        return True
    short, long = (1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11)
    alone = read_together(model, caches, [caches.make()], [short])
    yield
    beside = read_together(model, caches, [caches.make(), caches.make()], [short, long])
    yield
    expected = model(mx.array([[0]]), cache=alone.lend(0).layers)[0, -1]
    logits = model(mx.array([[0]]), cache=beside.lend(0).layers)[0, -1]
    difference = mx.abs(expected - logits).mean()
    return bool((difference < _ROUNDING * mx.std(expected)).item())
