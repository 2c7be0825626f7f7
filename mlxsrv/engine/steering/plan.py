"""What is added to the hidden states of rows that share a pass, and what is watched there.

Each row has its own: a Steer, frozen when its job came. A Plan is those of all rows of a pass as
arrays with one entry a row, zeros where a row has nothing, so that one addition serves them all.
Additions are computed in float32 and cast to what the layer computes in.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlxsrv.engine.events import Activations
from mlxsrv.engine.row import Place
from mlxsrv.engine.steering.hooks import Change, Site, find_layers, hooked
from mlxsrv.engine.steering.sae import SAE


class Clamp(NamedTuple):
    """Features of an SAE and the activations that they are to have."""

    site: Site
    sae: SAE
    features: tuple[int, ...]
    targets: tuple[float, ...]


class Steer(NamedTuple):
    """What one row has added: `directions` `(width,)` at their sites, and what is clamped."""

    directions: Mapping[Site, mx.array]
    clamp: Clamp | None = None


class Watched(NamedTuple):
    """What is looked at, in every row: these features, and the `top` highest of all."""

    site: Site
    sae: SAE
    features: tuple[int, ...]
    top: int
    probe: Change
    """From hidden states to the features' activations."""


class Sight:
    """What was watched in one pass, not read yet."""

    def __init__(self, watched: Watched, hidden: mx.array) -> None:
        sae = watched.sae
        self._features = watched.features
        self.arrays: list[mx.array] = []
        if watched.features:
            self.arrays.append(watched.probe(hidden))
        if watched.top:
            self.arrays += _find_highest(sae, hidden, watched.top)

    def read(self, places: Sequence[Place]) -> list[Activations]:
        """What the features made of the tokens at these places, row by row. Waits for the pass."""
        chosen, top, values = self._columns()
        events: list[Activations] = []
        for row, place in enumerate(places):
            for i in range(place.tokens):
                told = dict(zip(self._features, chosen[row][i], strict=True)) if chosen else {}
                if top:
                    found = zip(top[row][i], values[row][i], strict=True)
                    told |= {feature: value for feature, value in found if value > 0}
                pairs = tuple(sorted(told.items()))
                events += [Activations(job, place.position + i, pairs) for job in place.jobs]
        return events

    def _columns(self) -> tuple[Any, Any, Any]:
        lists = [cast(list[Any], array.tolist()) for array in self.arrays]
        chosen = lists.pop(0) if self._features else None
        top, values = lists or (None, None)
        return chosen, top, values


def _find_highest(sae: SAE, hidden: mx.array, count: int) -> list[mx.array]:
    """The features with the highest activations, and these: both `(rows, tokens, count)`."""
    rows, tokens, _ = hidden.shape
    at_once = max(1, _MOST_ACTIVATIONS // (rows * sae.file.d_sae))
    first = max(0, sae.file.d_sae - count)
    tops, values = [], []
    for begin in range(0, tokens, at_once):
        every = sae.encode(hidden[:, begin : begin + at_once])
        top = mx.argpartition(every, kth=min(first, every.shape[-1] - 1), axis=-1)[..., first:]
        tops.append(top)
        values.append(mx.take_along_axis(every, top, axis=-1))
    return [mx.concatenate(tops, axis=1), mx.concatenate(values, axis=1)]


_MOST_ACTIVATIONS = 4 * 1024 * 1024  # numbers; more of a long prompt's are looked at in parts


class Plan:
    """What happens at each site in passes of certain rows.

    Args:
        model: a model of mlx-lm's.
        steers: of each row, in the order of the pass.
        watched: what is to be looked at, before anything is added.
    """

    def __init__(
        self, model: Any, steers: Sequence[Steer | None], watched: Watched | None = None
    ) -> None:
        self._model = model
        self._layers = find_layers(model)
        self._watched = watched
        self.sight: Sight | None = None
        present = [steer for steer in steers if steer is not None]
        sites = {site for steer in present for site in steer.directions}
        sites |= {steer.clamp.site for steer in present if steer.clamp is not None}
        self._changes: dict[Site, Change] = {site: _Addition(site, steers) for site in sites}
        if watched is not None:
            self._changes[watched.site] = self._look_at(self._changes.get(watched.site, _unchanged))

    def run(self, tokens: mx.array, cache: Any) -> Any:
        """What the model makes of the tokens `(rows, n)`: its logits, not evaluated."""
        with hooked(self._layers, self._changes):
            return self._model(tokens, cache=cache)

    def _look_at(self, change: Change) -> Change:
        def look(hidden: mx.array) -> mx.array:
            assert self._watched is not None
            self.sight = Sight(self._watched, hidden)
            return change(hidden)

        return look


def run(model: Any, plan: Plan | None, tokens: mx.array, cache: Any) -> Any:
    """What the model makes of the tokens, with the plan of their rows, if there is one."""
    return model(tokens, cache=cache) if plan is None else plan.run(tokens, cache)


def _unchanged(hidden: mx.array) -> mx.array:
    return hidden


class _Addition:
    """What is added at one site."""

    def __init__(self, site: Site, steers: Sequence[Steer | None]) -> None:
        directions = [None if steer is None else steer.directions.get(site) for steer in steers]
        self._direction = _stack(directions)  # (rows or 1, 1, width), cast when it is known to what
        self._clamps = _group_clamps(site, steers)

    def __call__(self, hidden: mx.array) -> mx.array:
        delta = self._direction
        for clamp in self._clamps:
            own = clamp(hidden)
            delta = own if delta is None else delta + own
        assert delta is not None
        if not self._clamps and delta.dtype != hidden.dtype:
            delta = self._direction = delta.astype(hidden.dtype)
        return hidden + delta.astype(hidden.dtype)


def _stack(directions: Sequence[mx.array | None]) -> mx.array | None:
    """One entry a row, or one for all where they have the same."""
    given = [each for each in directions if each is not None]
    if not given:
        return None
    if len(given) == len(directions) and all(each is given[0] for each in given):
        return given[0][None, None]
    zeros = mx.zeros_like(given[0])
    return mx.stack([zeros if each is None else each for each in directions])[:, None]


class _Clamps:
    """The clamps of one SAE in a pass: `Σ (target - activation) · effect` of each row's, which is
    what the targets decode to in place of the activations."""

    def __init__(self, sae: SAE, clamps: Sequence[Clamp | None]) -> None:
        features = sorted({feature for clamp in clamps if clamp for feature in clamp.features})
        column = {feature: i for i, feature in enumerate(features)}
        targets = [[0.0] * len(features) for _ in clamps]
        mask = [[0.0] * len(features) for _ in clamps]
        for row, clamp in enumerate(clamps):
            if clamp is None:
                continue
            for feature, target in zip(clamp.features, clamp.targets, strict=True):
                targets[row][column[feature]] = target
                mask[row][column[feature]] = 1.0
        self._probe = sae.probe(mx.array(features))
        self._effects = sae.effects(features)  # (features, width)
        self._targets = mx.array(targets)[:, None]  # (rows, 1, features)
        self._mask = mx.array(mask)[:, None]

    def __call__(self, hidden: mx.array) -> mx.array:
        missing = self._targets - self._probe(hidden)
        delta: mx.array = (missing * self._mask) @ self._effects
        return delta


def _group_clamps(site: Site, steers: Sequence[Steer | None]) -> list[_Clamps]:
    """Rows that came before an SAE was changed for another still have the old one."""
    clamps = [
        steer.clamp if steer and steer.clamp and steer.clamp.site == site else None
        for steer in steers
    ]
    saes = {id(clamp.sae): clamp.sae for clamp in clamps if clamp is not None}
    return [
        _Clamps(sae, [clamp if clamp and clamp.sae is sae else None for clamp in clamps])
        for sae in saes.values()
    ]
