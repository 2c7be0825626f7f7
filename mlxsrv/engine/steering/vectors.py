"""Control vectors on the device."""

from __future__ import annotations

import mlx.core as mx

from mlxsrv.formats.control_vectors import VectorFile, read_directions


def load_vector(file: VectorFile) -> dict[int, mx.array]:
    """What to add to the output of each layer: `(width,)` in float32, evaluated.

    Raises:
        ValueError: the file cannot be read, has changed, or has a number that is not finite.
    """
    arrays = {layer: mx.array(direction) for layer, direction in read_directions(file).items()}
    mx.eval(arrays)
    return arrays
