"""Control vectors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxsrv.engine.steering.hooks import Site, check_sites
from mlxsrv.formats.control_vectors import VectorFile, read_directions, read_vector


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
