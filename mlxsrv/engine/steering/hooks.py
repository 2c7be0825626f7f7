"""Hooks: changing the hidden states at a layer's input or output, for one pass.

A hook changes the class of the layer's instance to a subclass that has the same name. It is no
wrapper, because models look at their layers' attributes and classes. The class is changed for the
pass and then back: a model that nobody steers is as mlx-lm made it, and nothing needs to be undone
when an SAE is detached while rows that it steers go on.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

Change = Callable[[mx.array], mx.array]
"""From hidden states `(rows, tokens, width)` to those that replace them."""


class Site(NamedTuple):
    """A place in the residual stream: a layer's output or, if `before`, its input."""

    layer: int
    before: bool = False

    @classmethod
    def of(cls, layer: int, before: bool) -> Site:
        """The site of a layer's output or input. A layer's input is the output of the one below."""
        return cls(layer - 1) if before and layer > 0 else cls(layer, before)


def find_layers(model: Any) -> Sequence[Any]:
    """The decoder layers of one of mlx-lm's models, in order. Raises ValueError."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, (list, tuple)) or not layers:
        raise ValueError("this model does not say what its layers are")
    return layers


@contextmanager
def hooked(layers: Sequence[Any], changes: Mapping[Site, Change]) -> Iterator[None]:
    """Within the block, make these changes in all passes of a model with these layers."""
    kinds: list[tuple[Any, type]] = []
    try:
        for index in {site.layer for site in changes}:
            layer = layers[index]
            kind: type = type(layer)
            kinds.append((layer, kind))
            # Past the layer's own __setattr__, which would count them among the parameters.
            pair = changes.get(Site(index, before=True)), changes.get(Site(index))
            object.__setattr__(layer, "_changes", pair)
            object.__setattr__(layer, "__class__", _hooked_class(kind))
        yield
    finally:
        for layer, kind in kinds:
            object.__setattr__(layer, "__class__", kind)
            object.__delattr__(layer, "_changes")


@cache
def _hooked_class(kind: type) -> type:
    """A subclass of `kind` whose call makes the changes in the instance's `_changes`."""

    def call(layer: Any, hidden: Any, *given: Any, **named: Any) -> Any:
        before, behind = layer._changes
        if before is not None:
            hidden = before(hidden)
        output = kind.__call__(layer, hidden, *given, **named)
        return output if behind is None else _change_first(behind, output)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _change_first(change: Change, output: Any) -> Any:
    """Change a layer's hidden states, which may be the first item of a tuple."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    return change(output)


def check_sites(model: Any, sites: Collection[Site], width: int) -> None:
    """Raises ValueError with the reason, if a site has no hidden states of this width."""
    layers = find_layers(model)
    seen: dict[Site, list[Any]] = {}
    for site in sites:
        if not 0 <= site.layer < len(layers):
            raise ValueError(f"there is no layer {site.layer}; the model has {len(layers)}")
        seen[site] = []

    def look_at(site: Site) -> Change:
        def look(hidden: Any) -> Any:
            seen[site].append(hidden)
            return hidden

        return look

    with hooked(layers, {site: look_at(site) for site in sites}):
        # Not evaluated: MLX is lazy, and shapes are enough.
        model(mx.array([[0, 0]]), cache=make_prompt_cache(model))
    for site, hidden in seen.items():
        if len(hidden) != 1 or not isinstance(hidden[0], mx.array) or hidden[0].ndim != 3:
            raise ValueError(f"layer {site.layer} does not give one array (batch, tokens, hidden)")
        shape = hidden[0].shape
        if shape != (1, 2, width):
            where = "is given" if site.before else "gives"
            raise ValueError(f"layer {site.layer} {where} {shape[-1]} numbers a token, not {width}")
