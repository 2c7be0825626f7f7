"""Compares the sizes in a model's config with the headers of its weights.

A model is built from its config before any weight is read, on the thread that serves all models. A
config of 60,000 layers with weights of two would stop everybody for minutes and take gigabytes.
Loading would then fail, since every part must have its weights. So sizes that the weights cannot
have are refused before anything is built.

Only what is certain is refused. Conversions leave parts out, layers share weights, and files pack
several numbers in one: so a size may be some times what the files show.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.json_files import JSONObject, text_config
from mlxsrv.formats.safetensors import Tensor

MOST_LAYERS = 1000
"""The most layers of any model; the deepest models have about two hundred."""

_LAYERS = re.compile(r"(?!\w*_per_)(?:num|n)_(?:\w+_)?layers?|num_loops|altup_num_inputs")
_LISTS = re.compile(r"\w*(?:layer|block)\w*|\w*pattern")
_PATTERNS = re.compile(r"\w*pattern")
"""Keys of lists with an entry for each layer, and of texts with a letter for each."""
_SIZES = frozenset(
    (
        *("vocab_size", "hidden_size", "n_embd", "d_model", "head_dim"),
        *("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size"),
        *("num_attention_heads", "n_head", "n_heads", "num_key_value_heads"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    )
)
"""Keys of sizes that divide a dimension of some tensor, or that count tensors."""

_TOLERANCE = 4  # times what the files show
_SPARE = 64  # layers that a conversion may have left out
_DEEPEST = 3  # configs in configs


def check_shape(config: JSONObject, tensors: Mapping[str, Tensor]) -> None:
    """Raise UnusableFile if a model of these sizes could not have these tensors."""
    named = {name[: found.end()] for name in tensors for found in re.finditer(r"\d+", name)}
    most = min(_TOLERANCE * len(named) + _SPARE, MOST_LAYERS)
    for key, value in _depths(config):
        if value > most:
            _refuse(key, value, "its weights do not have so many layers")
    sizes = [size for tensor in tensors.values() for size in tensor.shape]
    largest = _TOLERANCE * max([len(tensors), *sizes])
    for place in (config, text_config(config)):
        for key in _SIZES & place.keys():
            if type(place[key]) is int and place[key] > largest:
                _refuse(key, place[key], "no tensor in its weights has such a size")


def _refuse(key: str, value: int, why: str) -> None:
    raise UnusableFile(f"'config.json' has {str(value)[:20]} for {key}, and {why}")


def _depths(config: JSONObject, depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield the numbers of layers that a config and the configs inside it ask for, by key.

    A quantization config does not count: it may list every matrix that is not packed.
    """
    for key, value in config.items():
        if type(value) is int and _LAYERS.fullmatch(key):
            yield key, value
        elif (isinstance(value, list) and _LISTS.fullmatch(key)) or (
            isinstance(value, str) and _PATTERNS.fullmatch(key)
        ):
            yield key, len(value)
        elif isinstance(value, dict) and depth < _DEEPEST and not key.startswith("quantization"):
            yield from _depths(value, depth + 1)
