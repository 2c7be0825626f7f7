"""Shared by all encoders: their interface, attention, sizes from the config, and weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

import mlx.core as mx
from mlx.nn.layers.activations import gelu, gelu_approx, relu, silu
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.normalization import LayerNorm
from mlx.nn.layers.positional_encoding import RoPE
from mlx.utils import tree_flatten

from mlxsrv.formats.encoders import is_classifier, label_count

Config: TypeAlias = Mapping[str, Any]
ArrayFunction: TypeAlias = Callable[[mx.array], mx.array]
"""A layer or a function; MLX's own layers have no type for a checker."""

_LARGEST = 10**7  # size in a config, which may hold anything
_MOST_LAYERS = 1000
# A class with a head on top puts this before the names of its encoder's weights.
_PREFIX = re.compile(r"(?:(?:model|bert|roberta|camembert)\.)+")
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class TypedModule(Module):
    """MLX's Module, whose own constructor has no types."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]


class Encoder(TypedModule):
    """A model that makes a vector of each token.

    Attributes:
        width: the length of a vector.
        labels: the number of logits that `classify` returns; 0 if there is no head.
        longest: the number of positions; None if there is no bound.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.width = size(config, "hidden_size")
        self.labels = label_count(config) if is_classifier(config) else 0
        self.longest: int | None = None

    def __call__(
        self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None = None
    ) -> mx.array:
        """The last hidden states.

        Args:
            tokens: `(rows, length)`, padded on the right with any token.
            mask: `(rows, length)`, false at padding; vectors there have no meaning.
            firsts: for pairs, how many tokens come before each second text.

        Returns:
            `(rows, length, width)`.

        Raises:
            ValueError: rows are longer than `longest`.
        """
        raise NotImplementedError

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """The logits `(rows, labels)` for last hidden states `(rows, length, width)`.

        Raises ValueError if `labels` is 0.
        """
        raise NotImplementedError

    def check_length(self, tokens: mx.array) -> None:
        """Raises ValueError if there are too many: an index beyond the last position would read
        other memory."""
        if self.longest is not None and tokens.shape[1] > self.longest:
            raise ValueError(f"{tokens.shape[1]} tokens are more than {self.longest}")

    def check_head(self) -> None:
        """Raises ValueError if there is no head."""
        if not self.labels:
            raise ValueError("it has no classification head")


class Dense(TypedModule):
    """sentence-transformers' `Dense`: a linear layer on a text's vector, and an activation."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.linear = linear(
            size(config, "in_features"),
            size(config, "out_features"),
            bias=config.get("bias", True) is not False,
        )
        self._activation = activation(str(config["activation_function"]).lower())

    def __call__(self, vectors: mx.array) -> mx.array:
        return self._activation(self.linear(vectors))


def linear(inputs: int, outputs: int, *, bias: bool = True) -> ArrayFunction:
    return cast(ArrayFunction, Linear(inputs, outputs, bias=bias))


def embedding(count: int, width: int) -> ArrayFunction:
    return cast(ArrayFunction, Embedding(count, width))


def norm(width: int, eps: float, *, bias: bool = True) -> ArrayFunction:
    return cast(ArrayFunction, LayerNorm(width, eps=eps, bias=bias))


def rope(width: int, base: float) -> ArrayFunction:
    """Rotary positions from 0, applied to halves as in all encoders here."""
    return cast(ArrayFunction, RoPE(width, base=base))


def attend(queries: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> mx.array:
    """Attention of all heads.

    Args:
        queries: `(rows, heads, length, size)`; keys and values likewise.
        mask: true for keys that count; of a shape that broadcasts to `(rows, heads, length,
            length)`.

    Returns:
        `(rows, length, width)`.
    """
    rows, heads, length, size = queries.shape
    scale = 1 / math.sqrt(size)
    found = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    return found.transpose(0, 2, 1, 3).reshape(rows, length, heads * size)


def split_heads(states: mx.array, heads: int) -> mx.array:
    """`(rows, length, width)` to `(rows, heads, length, size)`."""
    rows, length, width = states.shape
    return states.reshape(rows, length, heads, width // heads).transpose(0, 2, 1, 3)


# Configs.


def size(config: Config, key: str, default: int | None = None) -> int:
    """A size from the config. Raises ValueError if it is missing or no sensible size."""
    value = config.get(key, default)
    if type(value) is not int or not 0 < value < _LARGEST:
        raise ValueError(f"'config.json' has {value!r} for {key}")
    return value


def count_layers(config: Config) -> int:
    """Raises ValueError."""
    return _at_most(config, "num_hidden_layers", _MOST_LAYERS)


def count_heads(config: Config) -> int:
    """Raises ValueError if the width cannot be split among the heads."""
    heads = size(config, "num_attention_heads")
    if size(config, "hidden_size") % heads:
        raise ValueError(f"'config.json' has {heads} heads, which do not share hidden_size")
    return heads


def epsilon(config: Config, key: str, default: float) -> float:
    """The number that a norm adds to the variance. Raises ValueError."""
    value = config.get(key, default)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise ValueError(f"'config.json' has {value!r} for {key}")
    return float(value)


def activation(name: object) -> ArrayFunction:
    """The function of this name in transformers. Raises ValueError if it is not known."""
    found = _ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"its activation function is not known: {str(name)[:100]!r}")
    return found


_ACTIVATIONS: dict[str, ArrayFunction] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_new": gelu_approx,
    "gelu_fast": gelu_approx,
    "gelu_pytorch_tanh": gelu_approx,
    "relu": relu,
    "silu": silu,
    "swish": silu,
    "tanh": mx.tanh,
    "sigmoid": mx.sigmoid,
    "identity": lambda states: states,
}


def _at_most(config: Config, key: str, limit: int) -> int:
    value = size(config, key)
    if value > limit:
        raise ValueError(f"'config.json' has {value!r} for {key}")
    return value


# Weights.


def map_weights(folder: Path) -> dict[str, mx.array]:
    """The tensors of `model*.safetensors` in the folder, mapped. Raises ValueError."""
    files = sorted(folder.glob("model*.safetensors"))
    if not files:
        raise ValueError("it has no model*.safetensors, and weights in other files are not read")
    found: dict[str, mx.array] = {}
    for file in files:
        try:
            found |= cast(dict[str, mx.array], mx.load(str(file)))
        except RuntimeError as error:
            raise ValueError(f"{file.name!r} cannot be read: {error}") from error
    return found


def fill(module: TypedModule, found: Mapping[str, mx.array]) -> None:
    """Put each weight in its place. Weights without a place, such as other heads', are ignored.

    Raises ValueError if one is missing, or has another shape or type.
    """
    tree: Any = module.parameters()  # type: ignore[no-untyped-call]
    parameters = cast(list[tuple[str, mx.array]], tree_flatten(tree))
    named = {_place(name): array for name, array in found.items()}
    missing = [name for name, _ in parameters if name not in named]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"its weight files lack {', '.join(missing[:3])}{more}")
    weights = [(name, named[name]) for name, _ in parameters]
    for name, array in weights:
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ValueError(f"its weight {name} is {array.dtype}: packed weights are not read")
    module.load_weights(weights)


def _place(name: str) -> str:
    """The name of the parameter that a weight of this name belongs to."""
    name = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
    for old, new in _OLD_NAMES.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name
