"""Facts of a model that the scheduler needs.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import ArraysCache

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.kv_costs import find_costs
from mlxsrv.engine.cache.row_cache import list_layers
from mlxsrv.engine.cache.shared_layers import share_layers
from mlxsrv.engine.events import KVCost
from mlxsrv.engine.execution.read import read_together
from mlxsrv.engine.faults import describe_error
from mlxsrv.engine.outcomes import StoreFacts, TextFacts
from mlxsrv.engine.patches.attention import patch_attention

_log = logging.getLogger("mlxsrv.engine")

_LEAST_PASS = 4 * 1024 * 1024  # bytes; a pass of the smallest model costs as much in calls
_ROUNDING = 0.1  # of the logits' standard deviation; bfloat16 stays well below


def find_facts(
    model: Any,
    caches: KVCacheFactory,
    *,
    prompt_cache_bytes: int,
    shares: bool,
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
        shares: groups of rows share passes of the model.
        drafts: there is a draft model, and it can be used.
        draft_costs: of a text that it reads.
        lookup: tokens may be proposed to all rows.
        padding: bytes of padding for which groups are not kept apart; see `most_padding`, unless
            given.
        store: kept prompts are written to disk; None: they are not.
    """
    if caches.pads is None:
        caches.pads = caches.batched and masks_padding(model)
    # Not evaluated: only its shape is looked at.
    logits = model(mx.array([[0]]), cache=caches.make().layers)
    return TextFacts(
        batched=caches.batched,
        shares=shares,
        cuts=caches.cuts,
        pads=caches.pads,
        drafts=drafts,
        draft_costs=draft_costs,
        lookup=lookup,
        padding=most_padding(model) if padding is None else padding,
        vocabulary=int(logits.shape[-1]),
        prompt_cache_bytes=prompt_cache_bytes,
        store=store,
        kv_costs=find_costs(model, lambda: caches.make().layers),
    )


def shares_passes(model: Any, caches: KVCacheFactory) -> bool:
    """Whether groups of rows can share a pass of the model: its modules do nothing with keys,
    values and masks but hand them on to attention.

    A pass of two groups is built, and never evaluated. A model whose groups cannot share it raises
    an error meanwhile.
    """
    if not caches.batched or not patch_attention():
        return False
    for tokens in (1, 2) if caches.cuts else (1,):
        groups = [caches.make_rows(), caches.make_rows()]
        for group in groups:
            group.arrange([caches.make()], 1, tokens)
        try:
            model(mx.zeros((len(groups), tokens), dtype=mx.uint32), cache=share_layers(groups))
        except Exception as error:
            _log.debug("groups of rows cannot share a pass: %s", describe_error(error))
            return False
    return True


def most_padding(model: Any) -> int:
    """Bytes of padding that cost as much as another pass of the model. Where groups share passes
    another one costs less, but calls of attention for each layer: how much that is depends on the
    device, so few groups are made there too."""
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
