"""How a model makes one vector of a text, and whether it is an encoder: read from JSON alone.

sentence-transformers describes a model as a list of modules: what runs the text, how the tokens'
vectors become one, what comes after. Only the lists that this server computes exactly are
accepted, and all others refused with the reason: a vector that is nearly right is worse than none.
Without such files the model's name and architecture say what is usual.

Nothing here imports MLX, so the floors above may know it before a model is loaded. Files come from
anywhere: each is bounded, and whatever is in them, the answer is a value or ValueError.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct

Pooling = Literal["mean", "cls", "last", "max", "mean_sqrt_len", "weightedmean"]
"""How the vectors of a text's tokens become one; `weightedmean` counts token n n times."""

Activation = Literal["sigmoid", "identity", "softmax"]
"""How a cross-encoder's logits become a score: one logit's sigmoid, one as it is, or of two the
probability of the second."""

_Object: TypeAlias = Mapping[str, Any]

ROBERTA = frozenset({"roberta", "xlm-roberta", "camembert"})
"""Families of RoBERTa's kind: BERT whose positions start behind the padding token's id."""
_ENCODERS = frozenset({"bert", "modernbert"}) | ROBERTA
_CLASSIFIER = re.compile(r"\w+ForSequenceClassification")

_LONGEST = 10_000_000  # bytes of a JSON file
_MOST_LABELS = 10**7
_MODES: dict[str, Pooling] = {
    "cls_token": "cls",
    "max_tokens": "max",
    "mean_tokens": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean_tokens": "weightedmean",
    "lasttoken": "last",
}
"""The switches of `1_Pooling/config.json`, each behind `pooling_mode_`."""
_RENAMED: dict[str, Pooling] = {"lasttoken": "last", "mean_sqrt_len_tokens": "mean_sqrt_len"}
_LIMITS = tuple(f"sentence_{name}_config.json" for name in ("bert", "roberta", "xlm-roberta"))
_ACTIVATION = re.compile(r"torch\.nn\.(?:modules\.(?:activation|linear)\.)?(\w+)")
DENSE_ACTIVATIONS = frozenset({"Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"})

_BGE = re.compile(r"(?:^|[-_./ ])bge[-_]", re.IGNORECASE)
_EMBEDS = re.compile(
    r"(?:^|[-_./ ])(?:embed(?:der|ding|dings)?(?:$|[-_. ])|(?:bge|e5|gte)[-_])", re.IGNORECASE
)
# A decoder saved without its output head, as Qwen3Model is; QWenLMHeadModel has one.
_HEADLESS = re.compile(r"\w+(?<!LMHead)(?<!Chat)Model")


class Recipe(Struct, frozen=True):
    """How one vector is made of a text.

    Attributes:
        pooling: how the tokens' vectors become one.
        dense: folders of the linear layers that follow, in order.
        normalize: the vector is brought to length 1 in the end.
        max_length: in tokens; None where the files do not say.
        lowercase: texts are lowercased before they are tokenised.
        prompts: what may be written before a text, by name.
        default_prompt: the name of the one that is, if nothing is asked.
    """

    pooling: Pooling
    dense: tuple[Path, ...]
    normalize: bool
    max_length: int | None
    lowercase: bool
    prompts: dict[str, str]
    default_prompt: str | None


class Judge(Struct, frozen=True):
    """How the logits of a pair of texts become one score."""

    activation: Activation


def is_encoder(config: _Object) -> bool:
    """Whether `engine/encoders` runs models of this kind; `check_encoder` knows about this one."""
    family = config.get("model_type")
    return isinstance(family, str) and family in _ENCODERS


def is_classifier(config: _Object) -> bool:
    """Whether this is a cross-encoder: an encoder whose head judges a pair of texts."""
    return is_encoder(config) and any(map(_CLASSIFIER.fullmatch, _architectures(config)))


def read_judge(folder: Path) -> Judge:
    """How the cross-encoder in `folder` makes a score of its logits.

    Raises ValueError with the reason, if there is none, or scores are not made here as it has them.
    """
    config = read_json(folder / "config.json")
    if not is_classifier(config):
        raise ValueError("it is no cross-encoder with a classification head")
    labels = label_count(config)
    if labels > 2:
        raise ValueError(f"its head has {labels} labels, and relevance is read from one or two")
    saved = _saved_activation(folder, config)
    if labels == 2 and saved in (None, "Identity"):  # what is saved where nobody has chosen
        return Judge("softmax")
    if labels == 1 and saved in (None, "Sigmoid"):
        return Judge("sigmoid")
    if labels == 1 and saved == "Identity":
        return Judge("identity")
    raise ValueError(f"its scores of {labels} labels are made by {saved}, which is not done here")


def label_count(config: _Object) -> int:
    """How many logits a classification head gives, as transformers has it. Raises ValueError."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    count = config.get("num_labels", 2)
    if type(count) is not int or not 0 < count < _MOST_LABELS:
        raise ValueError(f"'config.json' has {count!r} for num_labels")
    return count


def _saved_activation(folder: Path, config: _Object) -> str | None:
    """The class in PyTorch's `nn`, where sentence-transformers of any version has saved one.

    Raises ValueError for code that is not PyTorch's.
    """
    saved = _read_object(folder / "config_sentence_transformers.json").get("activation_fn")
    if saved is None:
        nested = config.get("sentence_transformers")
        saved = nested.get("activation_fn") if isinstance(nested, dict) else None
    if saved is None:
        saved = config.get("sbert_ce_default_activation_function")
    if saved is None:
        return None
    found = _ACTIVATION.fullmatch(saved) if isinstance(saved, str) else None
    if found is None:
        raise ValueError(f"its scores are made by {str(saved)[:100]!r}, which is not known here")
    return found[1]


def check_encoder(config: _Object) -> None:
    """Raises ValueError with the reason, if this encoder would not be computed exactly."""
    position = config.get("position_embedding_type")
    if position not in (None, "absolute"):
        raise ValueError(f"its position embeddings are {position!r}; only 'absolute' ones are run")
    if config.get("is_decoder"):
        raise ValueError("it is used as a decoder (is_decoder), which is not run here")
    if config.get("lora_adaptations"):
        raise ValueError("it has adapters inside (lora_adaptations), which are not run")
    if config.get("quantization") or config.get("quantization_config"):
        raise ValueError("it is a quantized encoder; those are not run")
    if config.get("model_type") == "modernbert":
        _check_rope(config)


def check_bare(folder: Path) -> None:
    """Raises ValueError if an adapter comes with the encoder in `folder`."""
    if (folder / "adapter_config.json").exists():
        raise ValueError("it comes with an adapter, which is not put on encoders")


def _check_rope(config: _Object) -> None:
    """Raises ValueError, if positions are scaled."""
    kinds = config.get("rope_parameters")
    for place in (config.get("rope_scaling"), *(kinds.values() if isinstance(kinds, dict) else ())):
        found = place.get("rope_type", place.get("type")) if isinstance(place, dict) else None
        if found not in (None, "default"):
            raise ValueError(f"its positions are scaled ({found!r}), which is not done")


def read_recipe(folder: Path, *, decoder: bool, name: str = "") -> Recipe:
    """How the model in `folder` makes one vector of a text.

    Args:
        folder: the model's files.
        decoder: it is a decoder that mlx-lm runs, not an encoder.
        name: what the model is called, where the folder's name is not it.

    Raises:
        ValueError: this server cannot make its vectors; the message says why.
    """
    config = read_json(folder / "config.json")
    if decoder:
        _check_decoder(config)
    else:
        check_encoder(config)
        check_bare(folder)
        if is_classifier(config):
            raise ValueError(
                "it has a head that judges texts; a cross-encoder answers at /v1/rerank"
            )
    listed = _read(folder / "modules.json")
    limits = next((found for file in _LIMITS if (found := _read_object(folder / file))), {})
    prompts, default = _prompts(_read_object(folder / "config_sentence_transformers.json"))
    task = limits.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise ValueError(f"its Transformer is for {str(task)[:100]!r}, not for vectors of tokens")
    if listed is not None:
        pooling, dense, normalize = _follow(folder, listed, prompted=any(prompts.values()))
    else:
        pooling = _usual(folder, config, decoder=decoder, name=name, prompted=any(prompts.values()))
        dense, normalize = (), True
    return Recipe(
        pooling=pooling,
        dense=dense,
        normalize=normalize,
        max_length=_max_length(config, limits),
        lowercase=limits.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default,
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file that must be there. Raises ValueError."""
    found = _read_object(path)
    if not found:
        raise ValueError(f"{path.name!r} is not there")
    return found


def read_dense(folder: Path) -> dict[str, Any]:
    """The `config.json` of a Dense module, if it is one that is computed here.

    Raises ValueError if not, or if its weights are not there as safetensors.
    """
    config = read_json(folder / "config.json")
    asked = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    found = _ACTIVATION.fullmatch(asked) if isinstance(asked, str) else None
    if found is None or found[1] not in DENSE_ACTIVATIONS:
        raise ValueError(f"{folder.name!r} has an activation function that is not known: {asked!r}")
    if config.get("use_residual"):
        raise ValueError(f"{folder.name!r} has a residual connection, which is not computed")
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, "sentence_embedding"):
            raise ValueError(f"{folder.name!r} is about {config[key]!r}, not the text's vector")
    for key in ("in_features", "out_features"):
        if type(config.get(key)) is not int:
            raise ValueError(f"{folder.name!r} does not say its {key}")
    if not (folder / "model.safetensors").is_file():
        raise ValueError(f"{folder.name!r} has no model.safetensors, and no other file is read")
    return {**config, "activation_function": found[1]}


# modules.json.


def _follow(folder: Path, listed: Any, *, prompted: bool) -> tuple[Pooling, tuple[Path, ...], bool]:
    """What the modules say: Transformer, Pooling, any number of Dense, Normalize or not."""
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise ValueError("'modules.json' is no list of modules")
    kinds = [_kind(entry) for entry in listed]
    normalize = kinds[-1:] == ["Normalize"]
    between = kinds[2:-1] if normalize else kinds[2:]
    if kinds[:2] != ["Transformer", "Pooling"] or set(between) - {"Dense"}:
        raise ValueError(
            f"its modules are {', '.join(kinds)[:200] or 'none'}; only Transformer, Pooling, "
            "Dense and at last Normalize are computed"
        )
    if listed[0].get("path") not in (None, "", "."):
        raise ValueError("its Transformer is in a folder of its own, where it is not looked for")
    own = read_json(_inside(folder, listed[1]) / "config.json")
    pooling = read_pooling(own, prompted=prompted)
    dense = tuple(_inside(folder, entry) for entry in listed[2 : 2 + len(between)])
    for path in dense:
        read_dense(path)
    return pooling, dense, normalize


def _kind(entry: _Object) -> str:
    """The class of a module, which must be sentence-transformers' own."""
    kind = entry.get("type")
    if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
        raise ValueError(f"it has a module of its own, {str(kind)[:100]!r}, which is not run")
    return kind.rpartition(".")[2]


def _inside(folder: Path, entry: _Object) -> Path:
    """The folder of a module, which is one of the model's. Raises ValueError."""
    path = entry.get("path")
    if not isinstance(path, str) or not re.fullmatch(r"(?!\.)[\w. -]+", path):
        raise ValueError(f"'modules.json' names {str(path)[:100]!r}, which is no folder beside it")
    return folder / path


def read_pooling(config: _Object, *, prompted: bool = True) -> Pooling:
    """What a Pooling module's `config.json` says; `prompted`: prompts come before texts.

    Raises ValueError.
    """
    if prompted and config.get("include_prompt", True) is not True:
        raise ValueError("its pooling leaves out the prompt (include_prompt), which is not done")
    asked = config.get("pooling_mode")
    if asked is None:
        switches = {key: on for key, on in config.items() if key.startswith("pooling_mode_")}
        asked = [key.removeprefix("pooling_mode_") for key, on in switches.items() if on] or "mean"
    names = asked if isinstance(asked, list) else [asked]
    modes = [_mode(name) for name in names]
    if len(modes) != 1:
        raise ValueError(f"its pooling joins several ways: {', '.join(modes)}")
    return modes[0]


def _mode(name: object) -> Pooling:
    for mode in get_args(Pooling):
        if name == mode or _MODES.get(str(name)) == mode or _RENAMED.get(str(name)) == mode:
            found: Pooling = mode
            return found
    raise ValueError(f"its pooling is not known: {str(name)[:100]!r}")


# What is usual.


def _usual(folder: Path, config: _Object, *, decoder: bool, name: str, prompted: bool) -> Pooling:
    """The pooling of a model whose files do not say it, as its name tells."""
    own = _read_object(folder / "1_Pooling" / "config.json")  # conversions lose modules.json
    if own:
        return read_pooling(own, prompted=prompted)
    called = name or folder.absolute().name
    if decoder:
        headless = any(map(_HEADLESS.fullmatch, _architectures(config)))
        return "last" if headless or _EMBEDS.search(called) else "mean"
    return "cls" if _BGE.search(called) else "mean"


def _check_decoder(config: _Object) -> None:
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        if place.get("use_bidirectional_attention") or place.get("is_causal") is False:
            raise ValueError("its attention looks both ways, and decoders here look back only")


def _max_length(config: _Object, limits: _Object) -> int | None:
    """What the files ask for; of RoBERTa's kind no more than there are positions for."""
    asked = limits.get("max_seq_length")
    lengths = [asked] if type(asked) is int and asked > 0 else []
    if config.get("model_type") in ROBERTA:
        positions, padding = config.get("max_position_embeddings"), config.get("pad_token_id", 1)
        if type(positions) is int and type(padding) is int and positions > padding + 1:
            lengths.append(positions - padding - 1)
    return min(lengths, default=None)


def _prompts(config: _Object) -> tuple[dict[str, str], str | None]:
    found = config.get("prompts")
    found = found if isinstance(found, dict) else {}
    prompts = {key: text for key, text in found.items() if isinstance(text, str)}
    default = config.get("default_prompt_name")
    return prompts, default if isinstance(default, str) and default in prompts else None


def _architectures(config: _Object) -> list[str]:
    listed = config.get("architectures")
    listed = listed if isinstance(listed, list) else [listed]
    return [name for name in listed if isinstance(name, str)]


# Files.


def _read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one. Raises ValueError if it holds something else."""
    found = _read(path)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ValueError(f"{path.name!r} is not a JSON object")
    return found


def _read(path: Path) -> Any:
    """What a JSON file holds; None if it is not there. Raises ValueError."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _LONGEST:
            raise ValueError(f"{path.name!r} is no file, or too large")
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ValueError(f"{path.name!r} cannot be read: {error.strerror or error}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise ValueError(f"{path.name!r} is not valid JSON") from None
