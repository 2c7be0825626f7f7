"""Model folders: what a model's files say of it, and whether it can be served.

A list of models must not load any, so nothing here imports MLX or runs a model's code, and only the
headers of the weights are read. Problems with a folder should be known before a request waits for
it. So the rules are those that mlx-lm's `load_model` and transformers will apply, even where a
folder's author meant something else. Whatever the files hold, the result is a `ModelDescription` or
`UnusableFile`.

Every function blocks, and may be called from several threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from mlxsrv.formats.answer_formats import FROM_FILES, Evidence, FormatWords
from mlxsrv.formats.architectures import check_architecture, template_code
from mlxsrv.formats.capabilities import added_tokens, decoder_capabilities
from mlxsrv.formats.encoders import (
    check_no_adapter,
    is_classifier,
    is_encoder,
    read_cross_encoder_config,
)
from mlxsrv.formats.files import (
    LONGEST_TEXT,
    JSONObject,
    UnusableFile,
    check_content,
    read_object,
    read_optional_object,
    read_start,
    reading,
)
from mlxsrv.formats.model_config import (
    context_length,
    hidden_size,
    kv_block_bytes,
    layer_count,
)
from mlxsrv.formats.pooling import is_embedder
from mlxsrv.formats.weights import (
    abbreviate_count,
    check_shape,
    count_parameters,
    quantization_config,
    quantization_level,
    read_weights,
)

ModelType: TypeAlias = Literal["chat", "base", "embedding"]

_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
"""The files of a tokenizer that transformers reads whatever its class is."""

_VOCABULARIES_OF_CLASSES = (
    *("vocab.json", "vocab.txt", "*.tiktoken"),
    *("spiece.model", "sentencepiece.bpe.model"),
)
"""Files that only a tokenizer's own class, or its code, knows how to read."""

_ANY_CLASS = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""The classes that read `_VOCABULARIES` and nothing else."""


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A model, as its files describe it.

    Attributes:
        context_length: in tokens; None where the files do not say.
        family: the config's `model_type`, of the outer model where one wraps another.
        parameters: how many; packed weights count unpacked.
        parameter_size: the same as people write it, "596M".
        quantization_level: "4bit", "mxfp4", or the type of most numbers, "BF16".
        format: "mlx" where mlx-lm has written the weights, else "safetensors".
        size: bytes of the weight files on disk.
        weights: bytes of the tensors in them.
        weights_outside_layers: of these, bytes of tensors that belong to no layer.
        kv_block: bytes of the first block of a KV cache for one row, recurrent state included;
            an estimate, 0 where the config does not say.
        hidden_size: numbers of a hidden state; None where the config does not say.
        layers: how many the model has; None where the config does not say.
        modified_at: Unix time of the newest file.
        writes: it is a decoder, which can write text even if it is made to embed.
        capabilities: some of `completion`, `chat`, `tools`, `thinking`, `insert`, `embedding`,
            `rerank`: those that it is for, and that this server can use.
    """

    type: ModelType
    context_length: int | None
    family: str
    parameters: int
    parameter_size: str
    quantization_level: str
    format: str = "mlx"
    size: int
    weights: int
    weights_outside_layers: int
    kv_block: int
    hidden_size: int | None
    layers: int | None
    modified_at: float
    writes: bool = True
    capabilities: tuple[str, ...]


def describe_model(
    folder: Path,
    *,
    name: str = "",
    trust_remote_code: bool = False,
    words: FormatWords = FROM_FILES,
    stand_ins: bool = False,
) -> ModelDescription:
    """Return what the files in a folder say of the model.

    Args:
        folder: the model's files, which may be links.
        name: what the model is called, if the folder's name is not it.
        trust_remote_code: Python code that comes with the files may be run.
        words: the operator's, for its formats of calls and thoughts.
        stand_ins: the weights are still to come, and other tensors are in their place: the config
            is not compared with them.

    Raises:
        UnusableFile: mlx-lm cannot load it; the message says why.
    """
    with reading(folder):
        files = frozenset(os.listdir(folder))
        config = read_object(folder / "config.json")
        family = check_architecture(config, trust_remote_code=trust_remote_code)
        if config.get("model_file") is not None:
            check_content(folder / str(config["model_file"]))
        weights = read_weights(folder, files)
        # Only the model's own code knows what it makes of its config.
        if config.get("model_file") is None and not stand_ins:
            check_shape(config, weights.tensors)
        settings = read_optional_object(folder / "tokenizer_config.json")
        _check_tokenizer(folder, files, settings)
        template = _chat_template(folder, files, config, settings)
        encoder = is_encoder(config)
        if encoder:
            check_no_adapter(folder)
        embeds = encoder or is_embedder(folder, files, config, name or folder.absolute().name)
        own = read_optional_object(folder / "sentence_bert_config.json") if embeds else None
        if encoder:
            capabilities = _encoder_capabilities(folder, config)
        elif embeds:
            capabilities = ("embedding",)
        else:
            templates = _template_texts(folder, files, settings)
            tokens = added_tokens(folder, files, settings)
            capabilities = decoder_capabilities(
                chats=template is not None,
                evidence=Evidence(tokens, templates, settings, config),
                words=words,
            )
        quantization = quantization_config(config)
        parameters = count_parameters(weights.tensors, quantization)
        level = quantization_level(weights.tensors, quantization)
        return ModelDescription(
            type="embedding" if embeds else "base" if template is None else "chat",
            context_length=context_length(config, settings, own),
            family=family,
            parameters=parameters,
            parameter_size=abbreviate_count(parameters),
            quantization_level=level,
            format="mlx" if weights.from_mlx or config.get("quantization") else "safetensors",
            size=weights.size,
            weights=weights.bytes,
            weights_outside_layers=weights.bytes_outside_layers,
            kv_block=0 if encoder else kv_block_bytes(config, 4 if level == "F32" else 2),
            hidden_size=hidden_size(config),
            layers=layer_count(config),
            modified_at=_newest(folder, files),
            writes=not encoder,
            capabilities=capabilities,
        )


def read_chat_template(folder: Path) -> str | None:
    """Return the chat template of a model; None if it has none, or has code in its place.

    Raises:
        UnusableFile: a file of it cannot be read.
    """
    with reading(folder):
        files = frozenset(os.listdir(folder))
        settings = read_optional_object(folder / "tokenizer_config.json")
        return _template_text(folder, files, settings) or None


def _newest(folder: Path, files: Iterable[str]) -> float:
    paths = (folder / file for file in files)
    return max(path.stat().st_mtime for path in paths if path.is_file())


def _check_tokenizer(folder: Path, files: Iterable[str], settings: JSONObject) -> None:
    """Raise UnusableFile where transformers would find no vocabulary, or one that is empty."""
    own = settings.get("tokenizer_class") not in _ANY_CLASS or "auto_map" in settings
    wanted = (*_VOCABULARIES, *(_VOCABULARIES_OF_CLASSES if own else ()))
    found = [name for name in sorted(files) if any(fnmatchcase(name, each) for each in wanted)]
    if not found:
        raise UnusableFile("it has no tokenizer: tokenizer.json is missing")
    for name in found:
        check_content(folder / name)


def _chat_template(
    folder: Path, files: Iterable[str], config: JSONObject, settings: JSONObject
) -> str | None:
    """Return the chat template, or the code in its place, that the loaded tokenizer will have.

    A `chat_template.json` does not count: it belongs to image processors.
    """
    text = _template_text(folder, files, settings)
    return template_code(config, settings, given=bool(text)) or text or None


def _template_text(folder: Path, files: Iterable[str], settings: JSONObject) -> str:
    """Return the text of the template; of several, all. Nothing if it has none."""
    return "\n".join(_template_texts(folder, files, settings))


def _template_texts(folder: Path, files: Iterable[str], settings: JSONObject) -> list[str]:
    """Return the texts of the templates, first that for chats with tools."""
    text = read_start(folder / "chat_template.jinja", files, LONGEST_TEXT)
    if text.strip():
        others = folder / "additional_chat_templates"
        names = frozenset(os.listdir(others)) if others.is_dir() else frozenset[str]()
        texts = [read_start(others / "tool_use.jinja", names, LONGEST_TEXT), text]
    else:
        named = settings.get("chat_template")
        listed = named if isinstance(named, list) else [{"name": "default", "template": named}]
        entries = [entry for entry in listed if isinstance(entry, dict)]
        entries.sort(key=lambda entry: entry.get("name") != "tool_use")
        texts = [str(entry.get("template") or "") for entry in entries]
    return [text for text in texts if text.strip()]


def _encoder_capabilities(folder: Path, config: JSONObject) -> tuple[str, ...]:
    """Return nothing for a head whose scores are not known to mean relevance."""
    if not is_classifier(config):
        return ("embedding",)
    try:
        read_cross_encoder_config(folder)
    except UnusableFile:
        return ()
    return ("rerank",)
