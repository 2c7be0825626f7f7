"""Files of sparse autoencoders: the shape and architecture of one, and the layer it is for.

Three layouts are read: SAELens, Gemma Scope and sparsify. Each is read as its own library reads it.
Whatever changes the maths in a way that is not computed here, such as a transcoder's skip
connection, is refused with the reason: activations that are nearly right are worse than none.

Whatever a file holds, the result is a `SAEFile` or `UnusableFile`, whose message is one line and
names files without their folders.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import msgspec

from mlxsrv.formats.arrays import StoredArray, list_arrays
from mlxsrv.formats.files import JSONObject, UnusableFile, positive_int, read_object

Architecture = Literal["standard", "jumprelu", "topk", "batch_topk", "gated"]
SAESource = Literal["saelens", "gemma_scope", "sparsify"]
SAETensorRole = Literal[
    "encoder",
    "decoder",
    "encoder_bias",
    "decoder_bias",
    "threshold",
    "gate_bias",
    "magnitude_bias",
    "magnitude_scale",
    "ones",
]
"""The role of a tensor. `ones` is a factor on activations that must be 1."""

_LARGEST = 2**22  # features; a row of so many float32 is read at once


class SAETensor(NamedTuple):
    """One array of an SAE.

    Attributes:
        stored: where its numbers are.
        by_feature: each row of the matrix in the file belongs to one feature.
    """

    role: SAETensorRole
    stored: StoredArray
    by_feature: bool


_COMMON: dict[str, SAETensorRole] = {
    "W_enc": "encoder",
    "W_dec": "decoder",
    "b_enc": "encoder_bias",
    "b_dec": "decoder_bias",
    "threshold": "threshold",
    "topk_threshold": "threshold",
    "b_gate": "gate_bias",
    "b_mag": "magnitude_bias",
    "r_mag": "magnitude_scale",
    "scaling_factor": "ones",
}
_NAMES: dict[SAESource, dict[str, SAETensorRole]] = {
    "saelens": _COMMON,
    "gemma_scope": _COMMON | {"w_enc": "encoder", "w_dec": "decoder"},
    "sparsify": {
        "encoder.weight": "encoder",
        "encoder.bias": "encoder_bias",
        "W_dec": "decoder",
        "b_dec": "decoder_bias",
    },
}
_BY_FEATURE: dict[SAESource, tuple[SAETensorRole, ...]] = {
    "saelens": ("decoder",),
    "gemma_scope": ("decoder",),
    "sparsify": ("encoder", "decoder"),
}
"""Matrices that are `(d_sae, d_in)` by custom. The others are `(d_in, d_sae)`."""
_GATES: tuple[SAETensorRole, ...] = ("gate_bias", "magnitude_bias", "magnitude_scale")
BIASES: dict[Architecture, tuple[SAETensorRole, ...]] = {
    "standard": ("encoder_bias",),
    "topk": ("encoder_bias",),
    "batch_topk": ("encoder_bias",),
    "jumprelu": ("encoder_bias", "threshold"),
    "gated": _GATES,
}
"""The vectors `(d_sae,)` that each architecture has besides its matrices and the decoder's bias."""


def list_sae_tensors(
    weights: Path, source: SAESource, architecture: Architecture
) -> dict[SAETensorRole, SAETensor]:
    """Return the tensors of an SAE by their roles.

    Raises:
        UnusableFile: one is missing, there are others, or their shapes do not fit each other.
    """
    names = _NAMES[source]
    tensors: dict[SAETensorRole, SAETensor] = {}
    for name, stored in list_arrays(weights).items():
        role = names.get(name)
        if role is None or role in tensors:
            refuse(f"{weights.name!r} holds {short(name)}, which no SAE of its kind has")
        tensors[role] = SAETensor(role, stored, role in _BY_FEATURE[source])
    needed = ("encoder", "decoder", "decoder_bias", *BIASES[architecture])
    spare = {"ones", *(("threshold",) if architecture == "batch_topk" else ())}
    if missing := [role for role in needed if role not in tensors]:
        refuse(f"{weights.name!r} holds no {missing[0].replace('_', ' ')}")
    if odd := [role for role in tensors if role not in needed and role not in spare]:
        refuse(f"{weights.name!r} holds a {odd[0].replace('_', ' ')}; {architecture} has none")
    d_in, d_sae = sizes(tensors)
    return {role: _check_shape(weights, tensor, d_in, d_sae) for role, tensor in tensors.items()}


def sizes(tensors: dict[SAETensorRole, SAETensor]) -> tuple[int, int]:
    """Return the model's hidden size and the number of features, by the biases."""
    bias = tensors["encoder_bias" if "encoder_bias" in tensors else "gate_bias"].stored.shape
    width = tensors["decoder_bias"].stored.shape
    if len(bias) != 1 or len(width) != 1:
        refuse("one of its biases is not a vector")
    if not (0 < bias[0] <= _LARGEST and 0 < width[0] <= _LARGEST):
        refuse("it has no features, or too many")
    return width[0], bias[0]


def _check_shape(weights: Path, tensor: SAETensor, d_in: int, d_sae: int) -> SAETensor:
    role, stored, by_feature = tensor
    if role in ("encoder", "decoder") and sorted(stored.shape) == sorted((d_in, d_sae)):
        if d_in != d_sae:
            by_feature = stored.shape == (d_sae, d_in)
        return SAETensor(role, stored, by_feature != stored.swapped)
    one = role in ("threshold", "ones") and stored.shape in ((), (1,))  # for all features
    if one or stored.shape == ((d_in,) if role == "decoder_bias" else (d_sae,)):
        return tensor
    raise UnusableFile(
        f"the {role.replace('_', ' ')} in {weights.name!r} is {stored.shape}, where there are "
        f"{d_sae} features of width {d_in}"
    )


def refuse(reason: str) -> NoReturn:
    raise UnusableFile(reason)


def short(value: object) -> str:
    return ascii(value)[:60]


Normalization = Literal["none", "constant_norm_rescale", "layer_norm"]
_LONGEST_TEXT = 1024 * 1024  # bytes of a cfg.json, which has at most a hundred lines
_LONGEST_NAME = 200  # characters
_DEEPEST, _MOST_FOUND, _MOST_SEEN = 8, 1000, 100_000  # folders


class SAEFile(msgspec.Struct, frozen=True, kw_only=True):
    """A sparse autoencoder by its files.

    Attributes:
        weights: the file of arrays.
        d_in: the model's hidden size.
        d_sae: the number of features.
        layer: the layer whose output it is for; None if the files do not say.
        before: it is for the layer's input instead.
        k: how many features of a token may be active, if a number limits them.
        subtracts_b_dec: the decoder's bias is subtracted before encoding.
        rescales: activations are multiplied by the lengths of the decoder's rows.
        bytes: of its arrays in float32, as the engine holds them.
        warnings: sentences about what may surprise its users.
    """

    weights: Path
    source: SAESource
    architecture: Architecture
    d_in: int
    d_sae: int
    layer: int | None
    before: bool = False
    hook_name: str | None = None
    model_name: str | None = None
    k: int | None = None
    subtracts_b_dec: bool
    normalization: Normalization = "none"
    rescales: bool = False
    bytes: int
    warnings: tuple[str, ...] = ()


def read_sae(path: Path) -> SAEFile:
    """Read the files of the SAE at `path`, which is its folder or its file of weights.

    Raises:
        UnusableFile: there is none, or it cannot be used.
    """
    try:
        if path.name in _READERS:
            return _READERS[path.name](path)
        for name, read in _READERS.items():
            if (path / name).is_file():
                return read(path / name)
        refuse(f"there is none of {', '.join(_READERS)}")
    except OSError as error:
        raise UnusableFile(error.strerror or "it cannot be read") from None


def find_saes(root: Path) -> Iterator[Path]:
    """Yield the folders at and below `root` that look like an SAE, in order, up to a thousand.

    Links are followed, but no folder is visited twice, and none inside an SAE.
    """
    waiting = [(root, 0)]
    seen: set[tuple[int, int]] = set()
    found = 0
    while waiting and found < _MOST_FOUND and len(seen) < _MOST_SEEN:
        folder, depth = waiting.pop()
        try:
            about = folder.stat()
            if (about.st_dev, about.st_ino) in seen:
                continue
            seen.add((about.st_dev, about.st_ino))
            with os.scandir(folder) as entries:
                files, below = _split(entries)
        except (OSError, ValueError):
            continue
        if any(name in files and (config is None or config in files) for name, config in _LAYOUTS):
            found += 1
            yield folder
        elif depth < _DEEPEST:
            waiting += [(folder / name, depth + 1) for name in sorted(below, reverse=True)]


def _split(entries: Iterator[os.DirEntry[str]]) -> tuple[set[str], list[str]]:
    files: set[str] = set()
    below: list[str] = []
    for entry in entries:
        if entry.is_dir():
            below.append(entry.name)
        elif entry.name in _READERS or entry.name in ("cfg.json", "config.json"):
            files.add(entry.name)
    return files, below


# Which layer.

_PLACE = re.compile(
    r"(?:[a-z_.]*[._])?(?:blocks|layers|layer|h)[._](\d{1,4})(?:[._](\w+))?",
    re.ASCII | re.IGNORECASE,
)
_OUTPUTS = {None, "output", "hook_out", "resid_post", "hook_resid_post"}
_INPUTS = {"input", "hook_in", "resid_pre", "hook_resid_pre"}


def parse_hook(name: str) -> tuple[int, bool]:
    """Return the layer in a hook's name, and whether the hook is at the layer's input.

    Raises:
        UnusableFile: the hook is at neither the input nor the output of a layer.
    """
    found = _PLACE.fullmatch(name) if len(name) <= _LONGEST_NAME else None
    if found is None or found[2] not in _OUTPUTS | _INPUTS:
        refuse(f"it is for {short(name)}, which is neither a layer's output nor its input")
    return int(found[1]), found[2] in _INPUTS


def _describe(
    weights: Path, source: SAESource, architecture: Architecture, config: JSONObject, **fields: Any
) -> SAEFile:
    """Return the SAE with the arrays in `weights`. Its config must agree with their shapes."""
    tensors = list_sae_tensors(weights, source, architecture)
    d_in, d_sae = sizes(tensors)
    for key, size in (("d_in", d_in), ("d_sae", d_sae), ("num_latents", d_sae), ("width", d_sae)):
        # A num_latents of 0 stands for another key.
        if config.get(key) not in (None, 0, size):
            refuse(f"its {key} is {short(config[key])}, that of its arrays is {size}")
    has_threshold = "threshold" in tensors
    if has_threshold or architecture not in ("topk", "batch_topk"):
        fields["k"] = None
    elif fields["k"] is None or fields["k"] > d_sae:
        refuse(f"its k is {fields['k']}, of {d_sae} features")
    elif architecture == "batch_topk":
        note = "it has no threshold, so the k largest of each token are active"
        fields["warnings"] = (*fields["warnings"], note)
    vectors = len(BIASES[architecture]) + (architecture == "batch_topk" and has_threshold)
    vectors += fields.get("rescales", False)  # the lengths of the decoder's rows
    return SAEFile(
        weights=weights,
        source=source,
        architecture=architecture,
        d_in=d_in,
        d_sae=d_sae,
        bytes=4 * (2 * d_in * d_sae + vectors * d_sae + d_in),
        **fields,
    )


def _flag(config: JSONObject, key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        refuse(f"its {key} is {short(value)}, which is neither true nor false")
    return value


def _text(value: object) -> str | None:
    return (
        value
        if isinstance(value, str) and 0 < len(value) <= _LONGEST_NAME and value.isprintable()
        else None
    )


def _count(config: JSONObject, key: str) -> int:
    """Return a positive integer, which may be written as 64.0. Raises UnusableFile."""
    value = config.get(key)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    found = positive_int({key: value}, key)
    if found is None:
        refuse(f"its {key} is {short(value)}")
    return found


# SAELens. Before version 6 all keys were side by side, and some had other names.

_KINDS: dict[str, Architecture] = {
    "standard": "standard",
    "jumprelu": "jumprelu",
    "topk": "topk",
    "gated": "gated",
    # These are saved as jumprelu once trained; a checkpoint has one threshold for all features.
    "batchtopk": "batch_topk",
    "batch_topk": "batch_topk",
    "matryoshka_batchtopk": "batch_topk",
}
_NORMALIZATIONS: dict[Any, Normalization] = {
    None: "none",
    False: "none",
    "none": "none",
    "constant_norm_rescale": "constant_norm_rescale",
    "layer_norm": "layer_norm",
}


def _read_saelens(weights: Path) -> SAEFile:
    config = read_object(weights.with_name("cfg.json"), limit=_LONGEST_TEXT)
    nested = config.get("metadata")
    fields = {**(nested if isinstance(nested, dict) else {}), **config}
    architecture, k = _saelens_kind(fields)
    if fields.get("hook_head_index", fields.get("hook_point_head_index")) is not None:
        refuse("it is for one head of an attention")
    if fields.get("reshape_activations") not in (None, "none"):
        refuse(f"it reshapes activations by {short(fields['reshape_activations'])}")
    if fields.get("hook_name_out") is not None:
        refuse("it is a transcoder")
    warnings = []
    hook_name = fields.get("hook_name", fields.get("hook_point"))
    layer, before = _saelens_layer(
        hook_name, fields.get("hook_layer", fields.get("hook_point_layer"))
    )
    if hook_name is None:
        warnings.append("its files do not say which hook it is for")
    loading = fields.get("model_from_pretrained_kwargs")
    if isinstance(loading, dict) and loading.get("center_writing_weights") is True:
        warnings.append("it was trained on hidden states with their mean taken out")
    return _describe(
        weights,
        "saelens",
        architecture,
        config,
        layer=layer,
        before=before,
        hook_name=_text(hook_name),
        model_name=_text(fields.get("model_name")),
        k=k,
        subtracts_b_dec=_flag(fields, "apply_b_dec_to_input", True),
        normalization=_normalization(fields.get("normalize_activations")),
        rescales=architecture in ("topk", "batch_topk")
        and _flag(fields, "rescale_acts_by_decoder_norm", False),
        warnings=tuple(warnings),
    )


def _saelens_kind(fields: JSONObject) -> tuple[Architecture, int | None]:
    name = fields.get("architecture", "standard")
    if not isinstance(name, str) or name not in _KINDS:
        refuse(f"its architecture is {short(name)}, which is not supported")
    architecture = _KINDS[name]
    function = fields.get("activation_fn_str", fields.get("activation_fn"))
    options = fields.get("activation_fn_kwargs")
    options = options if isinstance(options, dict) else {}
    if options.get("signed"):
        refuse("it takes the k largest absolute values, which is not supported")
    if function == "topk" and architecture in ("standard", "topk"):
        architecture = "topk"
    elif function not in (None, "relu", name):
        refuse(f"its activation function is {short(function)}, which is not supported")
    if architecture not in ("topk", "batch_topk"):
        return architecture, None
    k = fields.get("k", options.get("k"))
    return architecture, None if k is None else _count({"k": k}, "k")


def _saelens_layer(hook_name: object, hook_layer: object) -> tuple[int | None, bool]:
    stated = hook_layer if type(hook_layer) is int and 0 <= hook_layer < 10_000 else None
    if hook_name is None:
        return stated, False
    if not isinstance(hook_name, str):
        refuse(f"its hook is {short(hook_name)}")
    layer, before = parse_hook(hook_name)
    if stated not in (None, layer):
        refuse(f"its hook is {short(hook_name)}, its layer {stated}")
    return layer, before


def _normalization(value: object) -> Normalization:
    if value is True or value == "expected_average_only_in":
        refuse("it scales hidden states by a factor that its files do not contain")
    if not (value is None or isinstance(value, bool | str)) or value not in _NORMALIZATIONS:
        refuse(f"it normalizes activations by {short(value)}, which is not supported")
    return _NORMALIZATIONS[value]


# sparsify: the folder has the name of the module whose output it is for.


def _read_sparsify(weights: Path) -> SAEFile:
    config = read_object(weights.with_name("cfg.json"), limit=_LONGEST_TEXT)
    if config.get("activation", "topk") != "topk":
        refuse(f"its activation is {short(config['activation'])}, which is not supported")
    for key, what in (
        ("transcode", "it is a transcoder"),
        ("skip_connection", "it has a skip connection"),
        ("embed_skip", "it has a skip connection"),
        ("gram_lookup", "it reads a table of n-grams"),
        ("signed", "it takes the k largest absolute values, which is not supported"),
    ):
        if _flag(config, key, False):
            refuse(what)
    if not config.get("num_latents"):
        width = _count(config, "d_in") * _count(config, "expansion_factor")
        config = config | {"num_latents": width}
    folder = weights.absolute().parent
    name = folder.parent.name if re.fullmatch(r"seed\d+", folder.name) else folder.name
    layer, warnings = None, ["its folder's name does not say which layer it is for"]
    if re.search(r"embed|wte", name):
        refuse("it is for embeddings, not for a layer's output")
    if re.search(r"(?:^|[._])(?:blocks|layers|layer|h)[._]\d", name):
        (layer, _), warnings = parse_hook(name), []
    return _describe(
        weights,
        "sparsify",
        "topk",
        config,
        layer=layer,
        hook_name=name if layer is not None else None,
        model_name=_sparsify_model(folder.parent),
        k=_count(config, "k"),
        subtracts_b_dec=True,
        warnings=tuple(warnings),
    )


def _sparsify_model(folder: Path) -> str | None:
    """Return the model's name from the training run's config, beside the folders of its SAEs."""
    try:
        return _text(read_object(folder / "config.json", limit=_LONGEST_TEXT).get("model"))
    except (UnusableFile, OSError):
        return None


# Gemma Scope: the folders' names say the layer, the repository's name the place in it. The second
# edition, for Gemma 3, has a config.json too.

_OTHER_SITES = re.compile(
    r"gemma-scope.*-(?:att|mlp|transcoders)\b|(?:attn_out|mlp_out|transcoder|clt)"
)


def _read_gemma(weights: Path) -> SAEFile:
    folders = weights.absolute().parent.parts[::-1]
    if "embedding" in folders[:3]:
        refuse("it is for embeddings, not for a layer's output")
    if any(_OTHER_SITES.match(name.split("--")[-1]) for name in folders[:8]):
        refuse("it is for an attention, an MLP or a transcoder, not for a layer's output")
    layer, warnings = None, []
    for name in folders[:4]:
        if found := re.search(r"(?:^|_)layer_(\d{1,4})(?:_|$)", name):
            layer = int(found[1])
            break
    if layer is None:
        warnings.append("its folders' names do not say which layer it is for")
    config: JSONObject = {}
    if weights.suffix != ".npz":
        config = read_object(weights.with_name("config.json"), limit=_LONGEST_TEXT)
        if config.get("architecture") != "jump_relu" or config.get("type", "sae") != "sae":
            refuse("it is not a jumprelu SAE")
        hook = config.get("hf_hook_point_in")
        if hook is not None:
            stated, before = parse_hook(hook if isinstance(hook, str) else short(hook))
            if before or layer not in (None, stated):
                refuse(f"its hook is {short(hook)}, and that is not what its folder says")
            layer, warnings = stated, []
    return _describe(
        weights,
        "gemma_scope",
        "jumprelu",
        config,
        layer=layer,
        model_name=_text(config.get("model_name")),
        hook_name=_text(config.get("hf_hook_point_in")),
        subtracts_b_dec=False,
        warnings=tuple(warnings),
    )


_READERS: dict[str, Callable[[Path], SAEFile]] = {
    "sae_weights.safetensors": _read_saelens,
    "sae.safetensors": _read_sparsify,
    "params.npz": _read_gemma,
    "params.safetensors": _read_gemma,
}
_LAYOUTS = (
    ("sae_weights.safetensors", "cfg.json"),
    ("sae.safetensors", "cfg.json"),
    ("params.npz", None),
    ("params.safetensors", "config.json"),
)
