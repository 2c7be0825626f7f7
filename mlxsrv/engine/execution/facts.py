"""Facts of a model that the scheduler needs.

Used on the device thread only.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.kv_costs import find_costs
from mlxsrv.engine.cache.shared_layers import share_layers
from mlxsrv.engine.events import KVCost
from mlxsrv.engine.faults import describe_error
from mlxsrv.engine.outcomes import StoreFacts, TextFacts
from mlxsrv.engine.patches.attention import patch_attention

_log = logging.getLogger("mlxsrv.engine")

_LEAST_PASS = 4 * 1024 * 1024  # bytes; a pass of the smallest model costs as much in calls


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
        caches: makes the KV caches of its rows.
        prompt_cache_bytes: the most bytes of cached prompts.
        shares: groups of rows share passes of the model.
        drafts: there is a draft model, and it can be used.
        draft_costs: of a text that it reads.
        lookup: tokens may be proposed to all rows.
        padding: bytes of padding for which groups are not kept apart; see `most_padding`, unless
            given.
        store: cached prompts are written to disk; None: they are not.
    """
    # Not evaluated: only its shape is looked at. Two tokens, for one would be a decode step.
    logits = model(mx.array([[0, 0]]), cache=caches.make().layers)
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
