"""Steering of one model: its control vectors, the SAE that is attached, and the watched features.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from mlxsrv.engine.events import Attached
from mlxsrv.engine.orders import Attach, Watch
from mlxsrv.engine.plans import WatchFeatures
from mlxsrv.engine.steering.hooks import Site, check_sites
from mlxsrv.engine.steering.plan import Clamp, RowSteering, SteeringPlan, WatchList
from mlxsrv.engine.steering.sae import SAE, load_sae
from mlxsrv.formats.control_vectors import VectorFile, read_directions, read_vector
from mlxsrv.formats.sae_files import read_sae
from mlxsrv.generation.parameters import Steering

ControlVectors = Mapping[str, Mapping[int, mx.array]]
"""By name, and then by layer: the direction `(width,)` to add to the layer's output."""

_MOST_PREPARED = 256  # beyond that all are dropped, and made again when asked for


class _Attachment(NamedTuple):
    number: int
    site: Site
    sae: SAE


class Steerer:
    """Makes the steering plans of passes from what jobs ask for.

    Args:
        model: one of mlx-lm's.
        vectors: control vectors that fit the model.
    """

    def __init__(self, model: Any, vectors: ControlVectors | None = None) -> None:
        self._model = model
        self._vectors = vectors or {}
        self._attachment: _Attachment | None = None
        self._watched: WatchList | None = None
        self._prepared: dict[Steering, RowSteering] = {}

    @property
    def watches(self) -> bool:
        return self._watched is not None

    def attach(self, order: Attach) -> Generator[None, None, Attached]:
        """Read an SAE, yielding between slices. Raises ValueError with the reason if it cannot."""
        file = read_sae(Path(order.path))
        site = Site.of(order.layer, order.before)
        check_sites(self._model, [site], file.d_in)
        yield
        sae = yield from load_sae(file)
        # One pass through all of it: if it cannot be computed, the attachment fails, not a request.
        hidden = mx.zeros((1, 1, file.d_in))
        mx.eval(sae.decode(sae.encode(hidden), hidden))
        self._attachment = _Attachment(order.number, site, sae)
        self._prepared.clear()
        return Attached(order.number, sae.nbytes)

    def detach(self) -> None:
        self._attachment = self._watched = None
        self._prepared.clear()

    def watch(self, order: Watch | WatchFeatures) -> None:
        """Report these features' activations from now on; none if no SAE is attached."""
        self._watched = None
        if self._attachment is not None and (order.features or order.top):
            _, site, sae = self._attachment
            probe = sae.probe(mx.array(order.features, dtype=mx.int32))
            self._watched = WatchList(site, sae, order.features, order.top, probe)

    def prepare(self, asked: Steering | None) -> RowSteering | None:
        """The arrays of a row's steering. They stay the same whatever is attached later, and jobs
        that ask for the same share them.

        Raises ValueError if its SAE or control vector is not there.
        """
        if asked is None:
            return None
        if asked not in self._prepared:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            self._prepared[asked] = self._make(asked)
        return self._prepared[asked]

    def make_plan(self, steerings: Sequence[RowSteering | None]) -> SteeringPlan | None:
        """The plan of passes of rows with these steerings; None if there is nothing to do."""
        if self._watched is None and not any(steerings):
            return None
        return SteeringPlan(self._model, steerings, self._watched)

    def _make(self, asked: Steering) -> RowSteering:
        directions = self._sum_vectors(asked.vectors)
        if not asked.values:
            return RowSteering(directions)
        attachment = self._attachment
        if attachment is None or attachment.number != asked.attachment:
            raise ValueError("its SAE has been detached")
        features, values = zip(*asked.values, strict=True)
        _, site, sae = attachment
        if asked.mode == "clamp":
            return RowSteering(directions, Clamp(site, sae, features, values))
        direction = mx.array(values) @ sae.directions(features)
        if site in directions:
            direction = direction + directions[site]
        mx.eval(direction)
        return RowSteering({**directions, site: direction})

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


def fit_vectors(
    model: Any, files: Sequence[tuple[str, str]]
) -> tuple[dict[str, dict[int, mx.array]], tuple[str, ...]]:
    """Load the control vectors that fit a model.

    Args:
        model: one of mlx-lm's.
        files: (name, path) of each control vector.

    Returns:
        The vectors that fit, by name and layer, and a note for each of the others.
    """
    vectors: dict[str, dict[int, mx.array]] = {}
    notes: list[str] = []
    for name, path in files:
        try:
            file = read_vector(Path(path))
            check_sites(model, [Site(layer) for layer in file.layers], file.width)
            vectors[name] = load_vector(file)
        except (OSError, ValueError) as error:
            notes.append(f"control_vector {name}: {error}; it is not used with this model")
    return vectors, tuple(notes)


def load_vector(file: VectorFile) -> dict[int, mx.array]:
    """The direction to add to each layer's output: `(width,)` in float32, evaluated.

    Raises:
        ValueError: the file cannot be read, has changed, or has a number that is not finite.
    """
    arrays = {layer: mx.array(direction) for layer, direction in read_directions(file).items()}
    mx.eval(arrays)
    return arrays
