"""Steering the rows of one pass, and watching them.

Each row has a RowSteering, prepared when its job came. A SteeringPlan stacks those of all rows into
arrays with one entry a row, zeros where a row has none, so one addition serves all rows. Additions
are computed in float32 and cast to the type that the layer computes in.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import mlx.core as mx

from mlxsrv.engine.events import Activations
from mlxsrv.engine.live_row import Place
from mlxsrv.engine.steering.hooks import Change, Site, find_layers, hooked
from mlxsrv.engine.steering.sae import SAE


class Clamp(NamedTuple):
    """Features of an SAE, and the activations that they shall have."""

    site: Site
    sae: SAE
    features: tuple[int, ...]
    targets: tuple[float, ...]


class RowSteering(NamedTuple):
    """Steering of one row: directions `(width,)` to add at sites, and features to clamp."""

    directions: Mapping[Site, mx.array]
    clamp: Clamp | None = None


class WatchList(NamedTuple):
    """Activations to report of every row: of these features, and the `top` highest of all."""

    site: Site
    sae: SAE
    features: tuple[int, ...]
    top: int
    probe: Change
    """From hidden states `(rows, tokens, width)` to activations `(rows, tokens, features)`."""


class PassActivations:
    """The activations of one pass, on the device; `read` brings them to the host.

    Args:
        watched: which activations.
        hidden: `(rows, tokens, width)`, before anything is added.
    """

    def __init__(self, watched: WatchList, hidden: mx.array) -> None:
        self._features = watched.features
        self.arrays: list[mx.array] = []
        if watched.features:
            self.arrays.append(watched.probe(hidden))
        if watched.top:
            self.arrays += _find_highest(watched.sae, hidden, watched.top)

    def to_events(self, places: Sequence[Place]) -> list[Activations]:
        """The activations at these places, row by row. Waits for the pass."""
        chosen, top, values = self._columns()
        events: list[Activations] = []
        for row, place in enumerate(places):
            for i in range(place.tokens):
                found = dict(zip(self._features, chosen[row][i], strict=True)) if chosen else {}
                if top:
                    highest = zip(top[row][i], values[row][i], strict=True)
                    found |= {feature: value for feature, value in highest if value > 0}
                pairs = tuple(sorted(found.items()))
                events += [Activations(job, place.position + i, pairs) for job in place.jobs]
        return events

    def _columns(self) -> tuple[Any, Any, Any]:
        lists = [cast(list[Any], array.tolist()) for array in self.arrays]
        chosen = lists.pop(0) if self._features else None
        top, values = lists or (None, None)
        return chosen, top, values


def _find_highest(sae: SAE, hidden: mx.array, count: int) -> list[mx.array]:
    """The features with the highest activations, and their activations.

    Both are `(rows, tokens, count)`; `hidden` is `(rows, tokens, width)`.
    """
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


_MOST_ACTIVATIONS = 4 * 1024 * 1024  # numbers at once; a long prompt has more


class SteeringPlan:
    """The changes at each site in passes of certain rows.

    Args:
        model: one of mlx-lm's.
        steerings: each row's, in the order of the pass.
        watched: activations to report; they are computed before anything is added.

    Attributes:
        activations: those of the last pass; None where nothing is watched.
    """

    def __init__(
        self, model: Any, steerings: Sequence[RowSteering | None], watched: WatchList | None = None
    ) -> None:
        self._model = model
        self._layers = find_layers(model)
        self._watched = watched
        self.activations: PassActivations | None = None
        given = [each for each in steerings if each is not None]
        sites = {site for each in given for site in each.directions}
        sites |= {each.clamp.site for each in given if each.clamp is not None}
        self._changes: dict[Site, Change] = {site: _Addition(site, steerings) for site in sites}

    def forward(self, tokens: mx.array, cache: Any) -> Any:
        """Run the model. Returns its logits `(rows, n, vocabulary)`, not evaluated.

        Args:
            tokens: `(rows, n)`.
            cache: the KV cache of the rows.
        """
        watched = self._watched
        changes = self._changes if watched is None else self._watching(watched)
        with hooked(self._layers, changes):
            return self._model(tokens, cache=cache)

    def _watching(self, watched: WatchList) -> Mapping[Site, Change]:
        """The changes, with a look at the hidden states before them.

        Made anew for each pass. If the plan kept it, the two would make a reference cycle, and an
        unloaded model would stay in memory until the cyclic collector runs.
        """
        change = self._changes.get(watched.site, _unchanged)

        def look(hidden: mx.array) -> mx.array:
            self.activations = PassActivations(watched, hidden)
            return change(hidden)

        return {**self._changes, watched.site: look}


def forward(model: Any, plan: SteeringPlan | None, tokens: mx.array, cache: Any) -> Any:
    """Run the model, with its rows' plan if they have one: see `SteeringPlan.forward`."""
    return model(tokens, cache=cache) if plan is None else plan.forward(tokens, cache)


def _unchanged(hidden: mx.array) -> mx.array:
    return hidden


class _Addition:
    """The change at one site: directions are added, features are clamped."""

    def __init__(self, site: Site, steerings: Sequence[RowSteering | None]) -> None:
        directions = [None if each is None else each.directions.get(site) for each in steerings]
        self._direction = _stack(directions)  # (rows or 1, 1, width); the first pass casts it
        self._clamps = _group_clamps(site, steerings)

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
    """One entry a row, or one for all rows if they have the same."""
    given = [each for each in directions if each is not None]
    if not given:
        return None
    if len(given) == len(directions) and all(each is given[0] for each in given):
        return given[0][None, None]
    zeros = mx.zeros_like(given[0])
    return mx.stack([zeros if each is None else each for each in directions])[:, None]


class _Clamps:
    """The clamps of one SAE in a pass.

    They add `Σ (target - activation) · effect` over each row's clamped features: the difference
    between what the targets decode to and what the activations decode to.
    """

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


def _group_clamps(site: Site, steerings: Sequence[RowSteering | None]) -> list[_Clamps]:
    """The clamps at a site by SAE: rows that are older than the SAE that is attached now keep the
    one before."""
    clamps = [
        each.clamp if each and each.clamp and each.clamp.site == site else None
        for each in steerings
    ]
    saes = {id(clamp.sae): clamp.sae for clamp in clamps if clamp is not None}
    return [
        _Clamps(sae, [clamp if clamp and clamp.sae is sae else None for clamp in clamps])
        for sae in saes.values()
    ]
