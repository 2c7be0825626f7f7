"""Embedding models: which models are made to embed, and how one makes one vector of a text.

Everything is read from JSON, names and model cards alone. sentence-transformers describes a model
as a list of modules: what runs the text, how the tokens' vectors become one, what comes after. Only
lists that this server computes exactly are accepted. All others are refused with the reason: a
vector that is nearly right is worse than none. If there are no such files, the model's name and
architecture decide what is usual.

Whatever the files hold, the result is a value or UnusableFile.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Literal, get_args

from msgspec import Struct

from mlxsrv.formats.encoders import (
    ROBERTA,
    TORCH_ACTIVATION,
    check_encoder,
    check_no_adapter,
    is_classifier,
)
from mlxsrv.formats.files import (
    JSONObject,
    UnusableFile,
    architecture_names,
    read_json,
    read_object,
    read_optional_object,
    read_start,
    text_config,
)

_FILES = ("modules.json", "config_sentence_transformers.json", "1_Pooling")
_NAME = re.compile(
    r"(?:^|[-_./ ])(?:embed(?:der|ding|dings)?(?:$|[-_. ])|(?:bge|e5|gte)[-_])", re.IGNORECASE
)
_GEMMA_NAME = re.compile(r"(?:^|[-_./ ])embed(?:der|ding|dings)?gemma", re.IGNORECASE)
# A model saved without its output head, as Qwen3Model is; QWenLMHeadModel has one.
_HEADLESS = re.compile(r"\w+(?<!LMHead)(?<!Chat)Model")
# LlamaBidirectionalModel, BidirLMModel, MistralBiModel, LlamaEncoderModel
_BOTH_WAYS = re.compile(r"[Bb]idir|Bi(?:Model|For[A-Z])|EncoderModel")
_TAG = re.compile(
    r"^pipeline_tag:\s*['\"]?(?:feature-extraction|sentence-similarity)\b", re.MULTILINE
)
_CARD_BYTES = 65536


def is_embedder(folder: Path, files: frozenset[str], config: JSONObject, name: str) -> bool:
    """Whether a model is made for embeddings, by its files, name, architecture or model card.

    Args:
        files: the names in `folder`.
        config: `config.json`.
        name: what the model is called.
    """
    if not files.isdisjoint(_FILES) or is_embedder_name(name) or _GEMMA_NAME.search(name):
        return True
    if is_headless(config):
        return True
    card = read_start(folder / "README.md", files, _CARD_BYTES).replace("\r\n", "\n")
    front = card.partition("\n---")[0] if card.startswith("---\n") else ""
    return _TAG.search(front) is not None


def is_embedder_name(name: str) -> bool:
    """Whether a name has a word for embeddings, or the name of a family that only makes those."""
    return _NAME.search(name) is not None


def is_headless(config: JSONObject) -> bool:
    """Whether a model was saved without its output head."""
    return any(map(_HEADLESS.fullmatch, architecture_names(config)))


def looks_both_ways(config: JSONObject) -> bool:
    """Whether the tokens of a decoder attend to those behind them as well, by the config's flags or
    by the names of its classes: some models have no flag."""
    code = config.get("auto_map")
    named = code.values() if isinstance(code, dict) else ()
    names = [*architecture_names(config), config.get("model_type"), *named]
    if any(isinstance(name, str) and _BOTH_WAYS.search(name) for name in names):
        return True
    return any(
        place.get("use_bidirectional_attention") or place.get("is_causal") is False
        for place in (config, text_config(config))
    )


Pooling = Literal["mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean"]
"""The way from the vectors of a text's tokens to one; `weightedmean` counts token n n times."""

_MODES: dict[str, Pooling] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "last",
    **{mode: mode for mode in get_args(Pooling)},
}
"""Modes by their names in `1_Pooling/config.json`: those of switches, each behind `pooling_mode_`,
and those of `pooling_mode`."""
_LIMITS = tuple(f"sentence_{name}_config.json" for name in ("bert", "roberta", "xlm-roberta"))
_DENSE_ACTIVATIONS = frozenset({"Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"})
_BGE = re.compile(r"(?:^|[-_./ ])bge[-_]", re.IGNORECASE)


class PoolingConfig(Struct, frozen=True):
    """The way from a text to one vector.

    Attributes:
        pooling: how the tokens' vectors become one.
        dense: folders of the linear layers that follow, in order.
        normalize: the vector is brought to length 1 in the end.
        max_length: in tokens; None where the files do not say.
        lowercase: texts are lowercased before they are tokenized.
        prompts: what may be written before a text, by name.
        default_prompt: the name of the prompt that is written if a request asks for none.
    """

    pooling: Pooling
    dense: tuple[Path, ...]
    normalize: bool
    max_length: int | None
    lowercase: bool
    prompts: dict[str, str]
    default_prompt: str | None


def read_pooling_config(folder: Path, *, decoder: bool, name: str = "") -> PoolingConfig:
    """Return how the model in `folder` makes one vector of a text.

    Args:
        folder: the model's files.
        decoder: it is a decoder that mlx-lm runs, not an encoder.
        name: what the model is called, if the folder's name is not it.

    Raises:
        UnusableFile: this server cannot make its vectors; the message says why.
    """
    config = read_object(folder / "config.json")
    _check_model(folder, config, decoder=decoder)
    limits = next((found for file in _LIMITS if (found := read_optional_object(folder / file))), {})
    task = limits.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise UnusableFile(
            f"its Transformer's task is {str(task)[:100]!r}; only 'feature-extraction' is supported"
        )
    prompts, default = _prompts(read_optional_object(folder / "config_sentence_transformers.json"))
    prompted = any(prompts.values())
    if os.path.lexists(folder / "modules.json"):
        modules = read_json(folder / "modules.json")
        pooling, dense, normalize = _read_modules(folder, modules, prompted=prompted)
    else:
        called = name or folder.absolute().name
        pooling = _usual_pooling(folder, config, decoder=decoder, name=called, prompted=prompted)
        dense, normalize = (), True
    return PoolingConfig(
        pooling=pooling,
        dense=dense,
        normalize=normalize,
        max_length=_max_length(config, limits),
        lowercase=limits.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default,
    )


def _check_model(folder: Path, config: JSONObject, *, decoder: bool) -> None:
    """Raise UnusableFile if the hidden states that are pooled would not be computed exactly."""
    if decoder:
        if looks_both_ways(config):
            raise UnusableFile(
                "it has bidirectional attention; decoders are run with causal attention only"
            )
        return
    check_encoder(config)
    check_no_adapter(folder)
    if is_classifier(config):
        raise UnusableFile(
            "it is a cross-encoder, which scores pairs of texts; ask it at /v1/rerank"
        )


def read_dense_config(folder: Path) -> JSONObject:
    """Return the `config.json` of a Dense module, with the bare name of its activation function.

    Raises:
        UnusableFile: this server does not compute it, or has no weights as safetensors for it.
    """
    config = read_object(folder / "config.json")
    asked = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    found = TORCH_ACTIVATION.fullmatch(asked) if isinstance(asked, str) else None
    if found is None or found[1] not in _DENSE_ACTIVATIONS:
        raise UnusableFile(
            f"{folder.name!r} has an activation function that is not supported: {asked!r}"
        )
    if config.get("use_residual"):
        raise UnusableFile(f"{folder.name!r} has a residual connection, which is not supported")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise UnusableFile(f"{folder.name!r} is about {config[key]!r}, not the text's vector")
    for key in ("in_features", "out_features"):
        if type(config.get(key)) is not int:
            raise UnusableFile(f"{folder.name!r} does not say its {key}")
    if not (folder / "model.safetensors").is_file():
        raise UnusableFile(f"{folder.name!r} has no model.safetensors; other files are not read")
    return {**config, "activation_function": found[1]}


# modules.json.


def _read_modules(
    folder: Path, modules: Any, *, prompted: bool
) -> tuple[Pooling, tuple[Path, ...], bool]:
    """Follow the modules: Transformer, Pooling, any number of Dense, Normalize or not.

    Returns:
        The pooling, the folders of the Dense modules, and whether vectors are normalized.
    """
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise UnusableFile("'modules.json' is not a list of modules")
    kinds = [_module_class(module) for module in modules]
    normalize = kinds[-1:] == ["Normalize"]
    between = kinds[2:-1] if normalize else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(between) - {"Dense"}:
        raise UnusableFile(
            f"its modules are {', '.join(kinds)[:200] or 'none'}; only Transformer, Pooling, "
            "Dense and a final Normalize are supported"
        )
    if modules[0].get("path") not in (None, "", "."):
        raise UnusableFile("its Transformer is in a folder of its own, which is not supported")
    own = read_object(_module_folder(folder, modules[1]) / "config.json")
    dense = tuple(_module_folder(folder, module) for module in modules[2 : 2 + len(between)])
    for path in dense:
        read_dense_config(path)
    return parse_pooling(own, prompted=prompted), dense, normalize


def _module_class(module: JSONObject) -> str:
    """Return the class of a module, which must be sentence-transformers' own."""
    kind = module.get("type")
    if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
        raise UnusableFile(
            f"it has a module of its own, {str(kind)[:100]!r}, which is not supported"
        )
    return kind.rpartition(".")[2]


def _module_folder(folder: Path, module: JSONObject) -> Path:
    """Return the folder of a module, which must be inside the model's."""
    path = module.get("path")
    if not isinstance(path, str) or not re.fullmatch(r"(?!\.)[\w. -]+", path):
        raise UnusableFile(
            f"'modules.json' names {str(path)[:100]!r}, which is not a folder beside it"
        )
    return folder / path


def parse_pooling(config: JSONObject, *, prompted: bool = True) -> Pooling:
    """Return the pooling that a Pooling module's `config.json` asks for.

    Args:
        prompted: prompts may come before texts.

    Raises:
        UnusableFile: this server does not compute it.
    """
    if prompted and config.get("include_prompt", True) is not True:
        raise UnusableFile(
            "its pooling leaves out the prompt (include_prompt), which is not supported"
        )
    asked = config.get("pooling_mode")
    if asked is None:
        switches = {key: on for key, on in config.items() if key.startswith("pooling_mode_")}
        asked = [key.removeprefix("pooling_mode_") for key, on in switches.items() if on] or "mean"
    modes = [_mode(name) for name in (asked if isinstance(asked, list) else [asked])]
    if len(modes) != 1:
        raise UnusableFile(
            f"its pooling concatenates several modes, which is not supported: {', '.join(modes)}"
        )
    return modes[0]


def _mode(name: object) -> Pooling:
    mode = _MODES.get(str(name))
    if mode is None:
        raise UnusableFile(f"its pooling is not supported: {str(name)[:100]!r}")
    return mode


def _usual_pooling(
    folder: Path, config: JSONObject, *, decoder: bool, name: str, prompted: bool
) -> Pooling:
    """Return the pooling that is usual for a model without `modules.json`, by its name."""
    own = read_optional_object(folder / "1_Pooling" / "config.json")  # conversions lose the list
    if own:
        return parse_pooling(own, prompted=prompted)
    if decoder:
        return "last" if is_headless(config) or is_embedder_name(name) else "mean"
    return "cls" if _BGE.search(name) else "mean"


def _max_length(config: JSONObject, limits: JSONObject) -> int | None:
    """Return the limit that the files give; for RoBERTa's kind at most its number of positions."""
    asked = limits.get("max_seq_length")
    lengths = [asked] if type(asked) is int and asked > 0 else []
    if config.get("model_type") in ROBERTA:
        positions, padding = config.get("max_position_embeddings"), config.get("pad_token_id", 1)
        if type(positions) is int and type(padding) is int and positions > padding + 1:
            lengths.append(positions - padding - 1)
    return min(lengths, default=None)


def _prompts(config: JSONObject) -> tuple[dict[str, str], str | None]:
    """Return the prompts by name, and the name of the default one."""
    found = config.get("prompts")
    found = found if isinstance(found, dict) else {}
    prompts = {key: text for key, text in found.items() if isinstance(text, str)}
    default = config.get("default_prompt_name")
    return prompts, default if isinstance(default, str) and default in prompts else None
