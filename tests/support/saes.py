"""Real but tiny sparse autoencoders, written as each of the libraries writes its own.

The arrays are random and the same for the same arguments: `make_arrays` gives what the files of
`write_sae` hold, under SAELens's names and in its orientation, whatever the files' own are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, Any]
Layout = Literal["saelens", "saelens_old", "gemma_scope", "sparsify"]
"""The program that wrote it: SAELens from version 6 on or before, Gemma Scope, sparsify."""
Kind = Literal["standard", "jumprelu", "topk", "batchtopk", "gated"]
Precision = Literal["F32", "BF16", "F16"]

_TORCH = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def make_arrays(
    architecture: Kind = "standard",
    *,
    d_in: int = 64,
    d_sae: int = 128,
    seed: int = 0,
    dtype: Precision = "F32",
) -> dict[str, Array]:
    """The arrays in float32, rounded to `dtype`: decoder rows of length 1, and an encoder near
    their transpose, so that of a normal input about a third of the features are active."""
    dice = np.random.default_rng(seed)
    decoder = dice.standard_normal((d_sae, d_in))
    decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    arrays = {
        "W_enc": decoder.T + dice.standard_normal((d_in, d_sae)) / (10 * np.sqrt(d_in)),
        "W_dec": decoder,
        "b_enc": dice.standard_normal(d_sae) / 10 - 0.4,
        "b_dec": dice.standard_normal(d_in) / 10,
    }
    if architecture == "jumprelu":
        arrays["threshold"] = dice.uniform(0.05, 0.5, d_sae)
    if architecture == "batchtopk":  # as in a checkpoint; what is trained is saved as jumprelu
        arrays["topk_threshold"] = np.array(0.25)
    if architecture == "gated":
        del arrays["b_enc"]
        arrays["b_gate"] = dice.standard_normal(d_sae) / 10 - 0.4
        arrays["b_mag"] = dice.standard_normal(d_sae) / 10
        arrays["r_mag"] = dice.standard_normal(d_sae) / 10
    return {name: _round(array, dtype) for name, array in arrays.items()}


def write_sae(
    folder: Path,
    *,
    layout: Layout = "saelens",
    architecture: Kind = "standard",
    d_in: int = 64,
    d_sae: int = 128,
    layer: int = 1,
    before: bool = False,
    seed: int = 0,
    dtype: Precision = "F32",
    k: int = 8,
    arrays: dict[str, Array] | None = None,
    **config: Any,
) -> Path:
    """Write one below `folder`, and return the folder that its files are in.

    `arrays` replace those of `make_arrays`. `config` changes what cfg.json says, `...` removes a
    key; of Gemma Scope, which has none, only jumprelu at a layer's output is written.
    """
    if arrays is None:
        arrays = make_arrays(architecture, d_in=d_in, d_sae=d_sae, seed=seed, dtype=dtype)
    if layout == "gemma_scope":
        folder = folder / f"layer_{layer}" / f"width_{d_sae}" / f"average_l0_{k}"
        folder.mkdir(parents=True, exist_ok=True)
        np.savez(folder / "params.npz", allow_pickle=False, **arrays)
        return folder
    hook = f"blocks.{layer}.hook_resid_{'pre' if before else 'post'}"
    if layout == "sparsify":
        # It hooks what a module puts out: a layer's input is the output of the one before.
        folder = folder / f"layers.{layer - before}"
        said: dict[str, Any] = {
            "expansion_factor": d_sae // d_in,
            "normalize_decoder": True,
            "num_latents": d_sae,
            "k": k,
            "multi_topk": False,
            "d_in": d_in,
        }
        renamed = {"W_enc": "encoder.weight", "b_enc": "encoder.bias"}
        arrays = {
            renamed.get(name, name): array.T if name == "W_enc" else array
            for name, array in arrays.items()
        }
    elif layout == "saelens":
        said = {
            "architecture": architecture,
            "d_in": d_in,
            "d_sae": d_sae,
            "dtype": _TORCH[dtype],
            "device": "cpu",
            "apply_b_dec_to_input": True,
            "normalize_activations": "none",
            "reshape_activations": "none",
            "metadata": {
                "sae_lens_version": "6.6.0",
                "model_name": "tiny",
                "hook_name": hook,
                "hook_head_index": None,
                "context_size": 128,
            },
        }
        if architecture in ("topk", "batchtopk"):
            said["k"] = k
    else:
        said = {
            "architecture": "standard" if architecture == "topk" else architecture,
            "d_in": d_in,
            "d_sae": d_sae,
            "dtype": _TORCH[dtype],
            "device": "cuda",
            "model_name": "tiny",
            "hook_name": hook,
            "hook_layer": layer,
            "hook_head_index": None,
            "activation_fn_str": "topk" if architecture == "topk" else "relu",
            "activation_fn_kwargs": {"k": k} if architecture == "topk" else {},
            "apply_b_dec_to_input": True,
            "finetuning_scaling_factor": False,
            "normalize_activations": "none",
            "context_size": 128,
            "sae_lens_training_version": "3.20.0",
        }
    folder.mkdir(parents=True, exist_ok=True)
    said = {name: value for name, value in (said | config).items() if value is not ...}
    (folder / "cfg.json").write_text(json.dumps(said))
    name = "sae.safetensors" if layout == "sparsify" else "sae_weights.safetensors"
    write_safetensors(folder / name, arrays, dtype)
    return folder


def write_safetensors(path: Path, arrays: dict[str, Array], dtype: Precision = "F32") -> None:
    """NumPy knows no bfloat16, so its bytes are made here."""
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    end = 0
    for name, array in arrays.items():
        parts.append(_encode(array, dtype))
        begin, end = end, end + len(parts[-1])
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(parts))


def _encode(array: Array, dtype: Precision) -> bytes:
    if dtype == "BF16":
        bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
        return (bits >> 16).astype("<u2").tobytes()
    return array.astype("<f2" if dtype == "F16" else "<f4").tobytes()


def _round(array: Array, dtype: Precision) -> Array:
    """The nearest that `dtype` can hold (of bfloat16 the one towards zero), in float32."""
    if dtype == "BF16":
        bits = array.astype(np.float32).view(np.uint32)
        return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)
    return array.astype(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
