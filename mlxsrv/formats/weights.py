"""Weight files: which ones mlx-lm reads, how they are packed, how many parameters they hold, and
whether the model's config can be true of them.

Only the headers are read.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from mlxsrv.formats.files import JSONObject, UnusableFile, positive_int, read_object, text_config
from mlxsrv.formats.safetensors import Tensor, read_header

_WEIGHTS = "model*.safetensors"  # what mlx-lm's load_model reads
_OTHER_WEIGHTS = (".bin", ".gguf", ".npz", ".pt", ".pth", ".ckpt", ".h5", ".onnx", ".safetensors")
_INDEX = "model.safetensors.index.json"
_LAYER = re.compile(r"(?:^|\.)layers\.\d+\.")


class Weights(msgspec.Struct, frozen=True):
    """The tensors of all weight files, by name.

    Attributes:
        size: bytes of the files.
        from_mlx: a file says that MLX has written it.
    """

    tensors: dict[str, Tensor]
    size: int
    from_mlx: bool

    @property
    def bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())

    @property
    def bytes_outside_layers(self) -> int:
        """Bytes of the tensors that belong to no layer, such as embeddings and the output head."""
        return sum(tensor.bytes for name, tensor in self.tensors.items() if not _LAYER.search(name))


def read_weights(folder: Path, files: Iterable[str]) -> Weights:
    """Return all tensors that mlx-lm would load; of two with one name it keeps one.

    Raises:
        UnusableFile: a file is missing or damaged, or there are none.
    """
    tensors: dict[str, Tensor] = {}
    size, from_mlx = 0, False
    for path in _weight_files(folder, files):
        found, tagged = read_header(path)
        tensors |= found
        size += path.stat().st_size
        from_mlx |= tagged
    if not tensors:
        raise UnusableFile("its weight files hold no tensors")
    return Weights(tensors, size, from_mlx)


def _weight_files(folder: Path, files: Iterable[str]) -> list[Path]:
    if glob.escape(str(folder)) != str(folder):
        raise UnusableFile("its path has one of *?[ in it, which mlx-lm takes for a pattern")
    found = sorted(name for name in files if fnmatchcase(name, _WEIGHTS))
    if _INDEX in files:
        missing = sorted(_read_index(folder / _INDEX).difference(found))
        if missing:
            raise UnusableFile(f"{missing[0]!r} is not there, and {_INDEX!r} names it")
    else:
        for name in found:
            part = re.search(r"-(\d+)-of-(\d+)\.safetensors$", name)
            if part is not None and part[2].lstrip("0") != "1":
                raise UnusableFile(f"{name!r} is one of several, and there is no {_INDEX!r}")
    if not found:
        others = sorted(name for name in files if name.endswith(_OTHER_WEIGHTS))
        instead = f"; there is {others[0]!r}, which is not read" if others else ""
        raise UnusableFile(f"it has no {_WEIGHTS}{instead}")
    return [folder / name for name in found]


def _read_index(path: Path) -> set[str]:
    """Return the shards that the index names. Each is a file beside it that mlx-lm reads."""
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise UnusableFile(f"{_INDEX!r} names no files")
    for name in shards.values():
        if not isinstance(name, str) or re.search(r"[/\\\0]", name):
            raise UnusableFile(f"{_INDEX!r} names something that is not a file beside it")
        if not fnmatchcase(name, _WEIGHTS):
            raise UnusableFile(f"{_INDEX!r} names {name[:100]!r}, and only {_WEIGHTS} are read")
    return set(shards.values())


def quantization_config(config: JSONObject) -> JSONObject:
    """Return how the weights are packed, from where mlx-lm looks for it; empty if they are not."""
    for place in (config, text_config(config)):
        for key in ("quantization", "quantization_config"):
            found = place.get(key)
            if isinstance(found, dict) and found:
                return found
    return {}


def quantization_level(tensors: Mapping[str, Tensor], quantization: JSONObject) -> str:
    """Return the config's name for the packing, or the type of most bytes if nothing is packed."""
    by_type: dict[str, int] = {}
    for tensor in tensors.values():
        by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.bytes
    if any(dtype.startswith(("U", "I", "F8")) for dtype in by_type):
        bits, method = positive_int(quantization, "bits"), quantization.get("quant_method")
        mode = quantization.get("mode", "affine")
        if bits is not None and mode == "affine":
            return f"{bits}bit"
        named = method if mode == "affine" else mode
        if isinstance(named, str) and re.fullmatch(r"[\w-]{1,40}", named, re.ASCII):
            return named
    return ascii(max(by_type, key=by_type.__getitem__))[1:-1][:20]


def count_parameters(tensors: Mapping[str, Tensor], quantization: JSONObject) -> int:
    """Return how many numbers the model computes with.

    Packed weights count unpacked. Scales and other numbers that only unpack them do not count.
    """
    total = 0
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        scales = tensors.get(f"{stem}.scales")
        if kind in ("scales", "biases", "qzeros", "g_idx") and scales is not None:
            continue
        if re.search(r"[._](?:weight_scale\w*|weight_shape|input_scale)$", name):
            continue
        if name.endswith("_scales") and name.removesuffix("scales") + "blocks" in tensors:
            continue
        packed = tensor.dtype in ("U32", "I32", "U8")
        if kind == "weight" and tensor.dtype == "U32" and scales is not None:
            total += scales.numbers * _group_size(stem, quantization)
        elif packed and (kind in ("qweight", "weight_packed") or name.endswith("_blocks")):
            total += tensor.bytes * 8 // min(positive_int(quantization, "bits") or 4, 32)
        else:
            total += tensor.numbers
    return total


def _group_size(layer: str, quantization: JSONObject) -> int:
    """Return how many numbers share a scale in a layer, which may have a setting of its own."""
    own = quantization.get(layer)
    of_layer = positive_int(own, "group_size") if isinstance(own, dict) else None
    return of_layer or positive_int(quantization, "group_size") or 64


def abbreviate_count(count: int) -> str:
    """Write a count as sizes of models are written: 596M has three digits, 4.0B a decimal."""
    for unit, letter in ((10**12, "T"), (10**9, "B")):
        if count >= unit * 0.9995:
            return f"{count / unit:.1f}{letter}"
    for unit, letter in ((10**6, "M"), (10**3, "K")):
        if count >= unit * 0.9995:
            return f"{count / unit:.{0 if count >= 9.95 * unit else 1}f}{letter}"
    return str(count)


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
