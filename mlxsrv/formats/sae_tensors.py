"""The tensors of an SAE, by the names that each library gives them.

A file must hold the tensors that its architecture needs and no others, since others may change the
maths, and they must fit each other. The shape of a matrix shows its orientation. The shape of
a square matrix does not show this; then the library's convention decides.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

from mlxsrv.formats.arrays import StoredArray, list_arrays
from mlxsrv.formats.files import UnusableFile

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
