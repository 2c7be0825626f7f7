"""The bytes that a pass over texts needs, estimated from the sizes of a model's layers.

MLX computes layer after layer, and frees what no later array needs. So a pass needs
what one layer needs: arrays as wide as the outputs of its linear layers, and the scores of its
attention, which counts every pair of a text's tokens. A GPU may compute attention without holding
its scores; they are counted all the same.

Used on the device thread only.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

# There are at most so many at a time, as the tests measure: more where layers are recurrent, where
# the peak is up to a tenth higher on a busy machine, because MLX frees arrays a little later.
_ARRAYS = 4
_ARRAYS_OF_RECURRENT = 12
_SCORES = 2
_EXPERTS = 8  # that read one token, where a layer has more

_LAYER = re.compile(r"(.*?\.\d+)\..*weight")
_HEADS = ("heads", "n_heads", "num_heads", "num_attention_heads", "n_head")


def find_pass_costs(model: Any, type: mx.Dtype, *, recurrent: bool) -> tuple[int, int]:
    """Estimate the bytes that a pass of `model` needs.

    Args:
        model: an MLX module with layers.
        type: of its hidden states.
        recurrent: it has layers that are.

    Returns:
        Bytes for each token, and for each pair of tokens of a text.
    """
    arrays = _ARRAYS_OF_RECURRENT if recurrent else _ARRAYS
    return arrays * type.size * _find_width(model), _SCORES * type.size * _count_heads(model)


def _find_width(model: Any) -> int:
    """The numbers for each token that the linear layers of one of the model's layers put out: of
    the widest."""
    widths: Counter[str] = Counter()
    for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        if array.ndim < 2 or (layer := _LAYER.fullmatch(name)) is None:
            continue
        # Experts' weights are one array of three dimensions.
        copies = min(array.shape[0], _EXPERTS) if array.ndim == 3 else 1
        widths[layer[1]] += copies * array.shape[-2]
    return max(widths.values(), default=0)


def _count_heads(model: Any) -> int:
    """The heads of the model's attention; 0 if it has none."""
    found = [getattr(module, name, None) for module in model.modules() for name in _HEADS]
    return max((heads for heads in found if isinstance(heads, int)), default=0)
