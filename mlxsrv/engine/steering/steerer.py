"""What one model has to steer and to watch its rows with: an SAE, and control vectors.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsrv.engine.events import Attached
from mlxsrv.engine.orders import Attach, Watch
from mlxsrv.engine.steering.hooks import Site, check_sites
from mlxsrv.engine.steering.plan import Clamp, Plan, Steer, Watched
from mlxsrv.engine.steering.sae import SAE, load_sae
from mlxsrv.engine.steering.vectors import load_vector
from mlxsrv.formats.control_vectors import read_vector
from mlxsrv.formats.sae_files import read_sae
from mlxsrv.generation import Steering

Vectors = Mapping[str, Mapping[int, mx.array]]
"""Control vectors: their directions `(width,)` by layer, by name."""


class _Attachment(NamedTuple):
    number: int
    site: Site
    sae: SAE


class Steerer:
    """Makes of what jobs ask the plans of passes.

    Args:
        model: a model of mlx-lm's.
        vectors: those that fit the model.
    """

    def __init__(self, model: Any, vectors: Vectors | None = None) -> None:
        self._model = model
        self._vectors = vectors or {}
        self._attachment: _Attachment | None = None
        self._watched: Watched | None = None
        self._frozen: dict[Steering, Steer] = {}

    @property
    def watches(self) -> bool:
        return self._watched is not None

    def attach(self, command: Attach) -> Generator[None, None, Attached]:
        """Read an SAE, yielding between slices. Raises ValueError with the reason it cannot be."""
        file = read_sae(Path(command.path))
        site = Site.of(command.layer, command.before)
        check_sites(self._model, [site], file.d_in)
        yield
        sae = yield from load_sae(file)
        # Once through all of it: what cannot be computed is told now, and not by a request.
        hidden = mx.zeros((1, 1, file.d_in))
        mx.eval(sae.decode(sae.encode(hidden), hidden))
        self._attachment = _Attachment(command.number, site, sae)
        self._frozen.clear()
        return Attached(command.number, sae.nbytes)

    def detach(self) -> None:
        self._attachment = self._watched = None
        self._frozen.clear()

    def watch(self, command: Watch) -> None:
        """Look at these features from now on; at none of an SAE that is not there."""
        self._watched = None
        if self._attachment is not None and (command.features or command.top):
            _, site, sae = self._attachment
            probe = sae.probe(mx.array(command.features, dtype=mx.int32))
            self._watched = Watched(site, sae, command.features, command.top, probe)

    def freeze(self, asked: Steering | None) -> Steer | None:
        """What a row has added, whatever is attached later. Jobs that ask the same share it.

        Raises ValueError: its SAE or control vector is not there.
        """
        if asked is None:
            return None
        if asked not in self._frozen:
            if len(self._frozen) >= _MOST_FROZEN:
                self._frozen.clear()
            self._frozen[asked] = self._make(asked)
        return self._frozen[asked]

    def plan(self, steers: Sequence[Steer | None]) -> Plan | None:
        """What happens in passes of these rows; None if nothing does."""
        if self._watched is None and not any(steers):
            return None
        return Plan(self._model, steers, self._watched)

    def _make(self, asked: Steering) -> Steer:
        directions = self._sum_vectors(asked.vectors)
        if not asked.values:
            return Steer(directions)
        attachment = self._attachment
        if attachment is None or attachment.number != asked.attachment:
            raise ValueError("its SAE has been detached")
        features, values = zip(*asked.values, strict=True)
        _, site, sae = attachment
        if asked.mode == "clamp":
            return Steer(directions, Clamp(site, sae, features, values))
        direction = mx.array(values) @ sae.directions(features)
        if site in directions:
            direction = direction + directions[site]
        mx.eval(direction)
        return Steer({**directions, site: direction})

    def _sum_vectors(self, asked: Sequence[tuple[str, float]]) -> dict[Site, mx.array]:
        directions: dict[Site, mx.array] = {}
        for name, scale in asked:
            if name not in self._vectors:
                raise ValueError(f"it has no control vector {name!r}")
            for layer, direction in self._vectors[name].items():
                site, scaled = Site(layer), scale * direction
                known = directions.get(site)
                directions[site] = scaled if known is None else known + scaled
        mx.eval(list(directions.values()))
        return directions


_MOST_FROZEN = 256  # what is asked again is made again


def fit_vectors(
    model: Any, wanted: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[int, mx.array]], tuple[str, ...]]:
    """Of the control vectors (name, file) those that fit the model, and why others do not."""
    vectors: dict[str, dict[int, mx.array]] = {}
    notes: list[str] = []
    for name, path in wanted:
        try:
            file = read_vector(Path(path))
            check_sites(model, [Site(layer) for layer in file.layers], file.width)
            vectors[name] = load_vector(file)
        except (OSError, ValueError) as error:
            notes.append(f"control_vector {name}: {error}; it is not used with this model")
    return vectors, tuple(notes)
