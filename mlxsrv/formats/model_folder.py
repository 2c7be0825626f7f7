"""What a model's folder says, read from its files alone, and whether it can be served.

A list of models must cost no load, so nothing here imports MLX or runs a model's code, and of the
weights only the headers are read. What is wrong with a folder should be known before a request
waits for it: so the rules are those that mlx-lm's `load_model` and transformers will apply, and
where they differ from what a folder's author meant, theirs count. Files come from anywhere: each
is bounded, and whatever is in them, the answer is a `Description` or `Unhealthy`.

Every function blocks, and may be called from several threads at once.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from mlxsrv.formats.architectures import check_architecture, named_architectures, template_code
from mlxsrv.formats.folders import read_start, reading
from mlxsrv.formats.headers import (
    LONGEST_TEXT,
    Object,
    Tensor,
    check_content,
    number,
    read_header,
    read_object,
)
from mlxsrv.formats.headers import Unhealthy as Unhealthy
from mlxsrv.formats.pooling import (
    ROBERTA,
    check_bare,
    is_classifier,
    is_encoder,
    read_judge,
)
from mlxsrv.formats.shape import check_rank, check_shape
from mlxsrv.formats.vocabulary import thinks

Type: TypeAlias = Literal["chat", "base", "embedding"]

_WEIGHTS = "model*.safetensors"  # what mlx-lm's load_model reads
_OTHER_WEIGHTS = (".bin", ".gguf", ".npz", ".pt", ".pth", ".ckpt", ".h5", ".onnx", ".safetensors")
_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "seq_length",
    "seq_len",
    "n_ctx",
)

_EMBEDDING_FILES = ("modules.json", "config_sentence_transformers.json", "1_Pooling")
_EMBEDDING_NAME = re.compile(
    r"(?:^|[-_./ ])(?:embed(?:der|ding|dings)?(?:$|[-_. ]|gemma)|(?:bge|e5|gte)[-_])", re.IGNORECASE
)
# A model saved without a head, as BertModel is; QWenLMHeadModel has one.
_HEADLESS = re.compile(r"\w+(?<!LMHead)(?<!Chat)Model")
_EMBEDDING_TAG = re.compile(
    r"^pipeline_tag:\s*['\"]?(?:feature-extraction|sentence-similarity)\b", re.MULTILINE
)
_THINKING = re.compile(
    r"<think>|<longcat_think>|<\|think:start\|>|enable_thinking|reasoning_content"
)
_TOOLS = re.compile(r"\btools\b")

_KV_BLOCK = 256  # tokens, the step by which mlx-lm's caches grow
_KV_BYTES = 2  # per number
# Families whose cache holds every head's keys and values, where others hold the latent one.
_EXPANDED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
# The size of one layer's recurrent state is the product of these, whatever a family calls them.
_STATES = (
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("num_heads", "head_dim", "state_size"),
    ("intermediate_size", "state_size"),
)


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say.

    Attributes:
        context_length: in tokens; None where the files do not say.
        family: the config's `model_type`, of the outer model where one wraps another.
        parameter_size: as people write it, "596M"; packed weights count unpacked.
        quantization_level: "4bit", "mxfp4", or the type of most numbers, "BF16".
        format: "mlx" where mlx-lm has written the weights, else "safetensors".
        size: bytes of the weight files on disk.
        weights: bytes of the tensors in them.
        kv_block: bytes of the first block of a KV cache for one row, recurrent state included;
            an estimate, 0 where the config does not say.
        hidden_size: numbers of a hidden state; None where the config does not say.
        layers: how many the model has; None where the config does not say.
        modified_at: Unix time, of the newest file.
        capabilities: of `completion`, `chat`, `tools`, `thinking`, `embedding`.
    """

    type: Type
    context_length: int | None
    family: str
    parameter_size: str
    quantization_level: str
    format: str = "mlx"
    size: int
    weights: int
    kv_block: int
    hidden_size: int | None
    layers: int | None
    modified_at: float
    capabilities: tuple[str, ...]


def describe(
    folder: Path, *, name: str = "", trust_remote_code: bool = False, stand_ins: bool = False
) -> Description:
    """What is in the folder.

    Args:
        folder: the model's files, which may be links.
        name: what the model is called, where the folder's name is not it.
        trust_remote_code: Python code that comes with the files may be run.
        stand_ins: the weights are still to come, and other tensors are in their place: the config
            is not compared with them.

    Raises:
        Unhealthy: mlx-lm cannot load it; the message says why.
    """
    with reading(folder):
        files = frozenset(os.listdir(folder))
        config = read_object(folder / "config.json")
        family = check_architecture(config, trust_remote_code=trust_remote_code)
        if config.get("model_file") is not None:
            check_content(folder / str(config["model_file"]))
        weights = _read_weights(folder, files)
        # What code of its own makes of a config is its own.
        if config.get("model_file") is None and not stand_ins:
            check_shape(config, weights.tensors)
        _check_tokenizer(folder, files)
        settings = read_object(folder / "tokenizer_config.json", files)
        template = _template(folder, files, config, settings)
        encoder = is_encoder(config)
        if encoder:
            _check_bare(folder)
        embeds = encoder or _embeds(folder, files, config, name or folder.absolute().name)
        own = read_object(folder / "sentence_bert_config.json", files) if embeds else None
        quantization = _quantization(config)
        tensors = weights.tensors
        return Description(
            type="embedding" if embeds else "base" if template is None else "chat",
            context_length=_context_length(config, settings, own),
            family=family,
            parameter_size=_abbreviate(_count_parameters(tensors, quantization)),
            quantization_level=_quantization_level(tensors, quantization),
            format="mlx" if weights.from_mlx or config.get("quantization") else "safetensors",
            size=weights.size,
            weights=sum(tensor.bytes for tensor in tensors.values()),
            kv_block=0 if encoder else _kv_block(config),
            hidden_size=_width({**config, **_inner(config)}),
            layers=_depth({**config, **_inner(config)}),
            modified_at=_newest(folder, files),
            capabilities=_encodes(folder, config)
            if encoder
            else _capabilities(template, embeds, lambda: thinks(folder, files, settings)),
        )


def adapter_bytes(folder: Path) -> int:
    """Bytes of the tensors of a LoRA adapter that mlx-lm has trained.

    Raises:
        Unhealthy: mlx-lm cannot load it; the message says why.
    """
    with reading(folder):
        config = read_object(folder / "adapter_config.json")
        if config.get("fine_tune_type", "lora") != "full":
            if "peft_type" in config:
                raise Unhealthy("it is an adapter of PEFT's; mlx-lm reads its own only")
            _check_lora(config)
        tensors, _ = read_header(folder / "adapters.safetensors")
        if config.get("fine_tune_type", "lora") != "full":
            check_rank(config["lora_parameters"]["rank"], tensors)
        return sum(tensor.bytes for tensor in tensors.values())


def _check_lora(config: Object) -> None:
    if type(config.get("num_layers")) is not int:
        raise Unhealthy("'adapter_config.json' has no num_layers")
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict):
        raise Unhealthy("'adapter_config.json' has no lora_parameters")
    for key in ("rank", "scale", "dropout"):
        if type(parameters.get(key)) not in (int, float):
            raise Unhealthy(f"'adapter_config.json' has no lora_parameters.{key}")


# Files.


def _newest(folder: Path, files: Iterable[str]) -> float:
    paths = (folder / file for file in files)
    return max(path.stat().st_mtime for path in paths if path.is_file())


def _check_tokenizer(folder: Path, files: Iterable[str]) -> None:
    found = [name for name in sorted(files) for p in _TOKENIZER_FILES if fnmatchcase(name, p)]
    if not found:
        raise Unhealthy("it has no tokenizer, such as tokenizer.json")
    for name in found:
        check_content(folder / name)


# Configs.


def _inner(config: Object) -> Object:
    """The config of the text model, where that is part of another."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else {}


def _context_length(config: Object, settings: Object, sentences: Object | None) -> int | None:
    """How many tokens the model was made for; `sentences` are an embedder's own settings.

    A tokenizer's `model_max_length` is not that: Qwen's is that of their largest model, others
    keep a fine-tuning run's, many have none. It counts where the config says nothing. Embedders
    are the exception, as they are in vLLM: some encoders' configs count positions that no text
    gets, and what was trained on short texts says so only there.
    """
    # Cohere's configs have a model_max_length, too, and theirs is the true one.
    length = number(config, "model_max_length", *_CONTEXT_KEYS)
    length = length or number(_inner(config), *_CONTEXT_KEYS)
    if length is not None and config.get("model_type") in ROBERTA:
        # Positions begin behind the padding token's id.
        length -= (number(config, "pad_token_id") or 1) + 1
    asked = number(settings, "model_max_length")
    if sentences is not None:
        limits = (length, asked, number(sentences, "max_seq_length"))
        return min((limit for limit in limits if limit is not None), default=None)
    if length is None:
        return asked
    return max(length, _stretched(config), _stretched(_inner(config)))


def _stretched(config: Object) -> int:
    """Tokens that YaRN stretches positions to: who turns it on often changes nothing else."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    original, factor = number(rope, "original_max_position_embeddings"), rope.get("factor")
    if original is None or not isinstance(factor, (int, float)) or not 1 <= factor <= 10**6:
        return 0
    return int(original * factor)


def _kv_block(config: Object) -> int:
    text = {**config, **_inner(config)}
    attending, recurrent = _layers(text)
    state = next((size for keys in _STATES if (size := _product(text, keys))), 0)
    return _KV_BYTES * (attending * _kv_numbers(text) * _KV_BLOCK + recurrent * state)


def _layers(text: Object) -> tuple[int, int]:
    """How many layers keep every token, and how many a state; each does both if nothing is said."""
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(kinds, list):
        named = [kind for kind in kinds if isinstance(kind, str)]
        attending = sum("attention" in kind and "linear" not in kind for kind in named)
        return attending, sum("linear" in kind or "mamba" in kind for kind in named)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, (str, list)):
        return pattern.count("*"), pattern.count("M")
    layers = _depth(text) or 0
    interval = number(text, "full_attention_interval", "attn_layer_period")
    if interval is not None:
        return layers // interval, layers - layers // interval
    return layers, layers


def _depth(text: Object) -> int | None:
    return number(text, "num_hidden_layers", "n_layer", "num_layers", "n_layers")


def _width(text: Object) -> int | None:
    return number(text, "hidden_size", "n_embd", "d_model")


def _product(config: Object, keys: Iterable[str]) -> int:
    return math.prod(number(config, key) or 0 for key in keys)


def _kv_numbers(text: Object) -> int:
    """Numbers that one layer with attention keeps of one token."""
    heads = number(text, "num_attention_heads", "n_head", "n_heads") or 0
    latent = number(text, "kv_lora_rank")
    if latent is not None:
        rope = number(text, "qk_rope_head_dim") or 0
        if text.get("model_type") in _EXPANDED:
            nope, value = number(text, "qk_nope_head_dim") or 0, number(text, "v_head_dim")
            return heads * (nope + rope + (value or nope))
        return latent + rope + 2 * (number(text, "index_head_dim") or 0)
    width = _width(text) or 0
    size = number(text, "head_dim") or (width // heads if heads else 0)
    kept = number(text, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    return 2 * kept * size if heads else 0


# What the model is for.


def _template(folder: Path, files: Iterable[str], config: Object, settings: Object) -> str | None:
    """The chat template, or the code that stands for one, as the loaded tokenizer has it: so a
    `chat_template.json`, which belongs to processors of images, is none."""
    text = read_start(folder / "chat_template.jinja", files, LONGEST_TEXT)
    if not text.strip():
        named = settings.get("chat_template")
        listed = named if isinstance(named, list) else [{"template": named}]
        texts = [entry.get("template") for entry in listed if isinstance(entry, dict)]
        text = "\n".join(text for text in texts if isinstance(text, str))
    given = bool(text.strip())
    return template_code(config, settings, given=given) or (text if given else None)


def _embeds(folder: Path, files: frozenset[str], config: Object, name: str) -> bool:
    if not files.isdisjoint(_EMBEDDING_FILES) or _EMBEDDING_NAME.search(name):
        return True
    if any(_HEADLESS.fullmatch(architecture) for architecture in named_architectures(config)):
        return True
    card = read_start(folder / "README.md", files, 65536).replace("\r\n", "\n")
    front = card.partition("\n---")[0] if card.startswith("---\n") else ""
    return _EMBEDDING_TAG.search(front) is not None


def _check_bare(folder: Path) -> None:
    try:
        check_bare(folder)
    except ValueError as error:
        raise Unhealthy(str(error)) from None


def _encodes(folder: Path, config: Object) -> tuple[str, ...]:
    """A head whose scores are not known to be of relevance is for nothing here."""
    if not is_classifier(config):
        return ("embedding",)
    try:
        read_judge(folder)
    except ValueError:
        return ()
    return ("rerank",)


def _capabilities(
    template: str | None, embeds: bool, thinks: Callable[[], bool]
) -> tuple[str, ...]:
    """Of an embedder only what it is for, and that it is a decoder: its template is its base
    model's. The tokenizer is asked whether it `thinks` only where the template does not say so."""
    if embeds:
        return ("completion", "embedding")
    if template is None:
        return ("completion",)
    found = {
        "tools": _TOOLS.search(template) is not None,
        "thinking": _THINKING.search(template) is not None or thinks(),
    }
    return ("completion", "chat", *(name for name, has in found.items() if has))


# Weights.


class _Weights(msgspec.Struct, frozen=True):
    tensors: dict[str, Tensor]
    size: int
    from_mlx: bool


def _read_weights(folder: Path, files: Iterable[str]) -> _Weights:
    """All that mlx-lm would load; of two tensors with one name it keeps one."""
    tensors: dict[str, Tensor] = {}
    size, from_mlx = 0, False
    for path in _weight_files(folder, files):
        found, tagged = read_header(path)
        tensors |= found
        size += path.stat().st_size
        from_mlx |= tagged
    if not tensors:
        raise Unhealthy("its weight files hold no tensors")
    return _Weights(tensors, size, from_mlx)


def _weight_files(folder: Path, files: Iterable[str]) -> list[Path]:
    if glob.escape(str(folder)) != str(folder):
        raise Unhealthy("its path has one of *?[ in it, which mlx-lm takes for a pattern")
    found = sorted(name for name in files if fnmatchcase(name, _WEIGHTS))
    if _INDEX in files:
        missing = sorted(_read_index(folder / _INDEX).difference(found))
        if missing:
            raise Unhealthy(f"{missing[0]!r} is not there, and {_INDEX!r} names it")
    else:
        for name in found:
            part = re.search(r"-(\d+)-of-(\d+)\.safetensors$", name)
            if part is not None and part[2].lstrip("0") != "1":
                raise Unhealthy(f"{name!r} is one of several, and there is no {_INDEX!r}")
    if not found:
        others = sorted(name for name in files if name.endswith(_OTHER_WEIGHTS))
        instead = f"; there is {others[0]!r}, which is not read" if others else ""
        raise Unhealthy(f"it has no {_WEIGHTS}{instead}")
    return [folder / name for name in found]


def _read_index(path: Path) -> set[str]:
    """The shards that the index names, each a file beside it that mlx-lm reads."""
    shards = read_object(path).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise Unhealthy(f"{_INDEX!r} names no files")
    for name in shards.values():
        if not isinstance(name, str) or re.search(r"[/\\\0]", name):
            raise Unhealthy(f"{_INDEX!r} names what is no file beside it")
        if not fnmatchcase(name, _WEIGHTS):
            raise Unhealthy(f"{_INDEX!r} names {name[:100]!r}, and only {_WEIGHTS} are read")
    return set(shards.values())


def _quantization(config: Object) -> Object:
    """How the weights are packed, where mlx-lm looks for it."""
    for place in (config, _inner(config)):
        for key in ("quantization", "quantization_config"):
            found = place.get(key)
            if isinstance(found, dict) and found:
                return found
    return {}


def _quantization_level(tensors: Mapping[str, Tensor], quantization: Object) -> str:
    """What the config calls it, if anything is packed; else the type that most bytes have."""
    by_type: dict[str, int] = {}
    for tensor in tensors.values():
        by_type[tensor.dtype] = by_type.get(tensor.dtype, 0) + tensor.bytes
    if any(dtype.startswith(("U", "I", "F8")) for dtype in by_type):
        bits, method = number(quantization, "bits"), quantization.get("quant_method")
        mode = quantization.get("mode", "affine")
        if bits is not None and mode == "affine":
            return f"{bits}bit"
        named = method if mode == "affine" else mode
        if isinstance(named, str) and re.fullmatch(r"[\w-]{1,40}", named, re.ASCII):
            return named
    return ascii(max(by_type, key=by_type.__getitem__))[1:-1][:20]


def _count_parameters(tensors: Mapping[str, Tensor], quantization: Object) -> int:
    """Numbers that the model computes with: unpacked, without what only unpacks them."""
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
            total += tensor.bytes * 8 // min(number(quantization, "bits") or 4, 32)
        else:
            total += tensor.numbers
    return total


def _group_size(layer: str, quantization: Object) -> int:
    """Numbers that share a scale in a layer, which may have a setting of its own."""
    own = quantization.get(layer)
    of_layer = number(own, "group_size") if isinstance(own, dict) else None
    return of_layer or number(quantization, "group_size") or 64


def _abbreviate(count: int) -> str:
    """As people write sizes of models: three digits of millions, tenths of billions."""
    for unit, letter in ((10**12, "T"), (10**9, "B")):
        if count >= unit * 0.9995:
            return f"{count / unit:.1f}{letter}"
    for unit, letter in ((10**6, "M"), (10**3, "K")):
        if count >= unit * 0.9995:
            return f"{count / unit:.{0 if count >= 9.95 * unit else 1}f}{letter}"
    return str(count)
