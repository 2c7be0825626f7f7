"""Files of control vectors."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx

from tests.support.ggufs import Tensors


def write_safetensors(path: Path, tensors: Tensors) -> Path:
    """As MLX writes them; arrays of uint16 are the bytes of bfloat16."""
    arrays = {name: mx.array(array) for name, array in tensors}
    for name, array in arrays.items():
        arrays[name] = array.view(mx.bfloat16) if array.dtype == mx.uint16 else array
    mx.save_safetensors(str(path.with_suffix(".safetensors")), arrays)
    return path.with_suffix(".safetensors")
