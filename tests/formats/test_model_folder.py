"""Model folders: descriptions compared with mlx-lm's models, and all the ways to be broken."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlxsrv.formats import architectures
from mlxsrv.formats.adapters import adapter_bytes
from mlxsrv.formats.files import UnusableFile
from mlxsrv.formats.json_files import JSONObject
from mlxsrv.formats.model_config import kv_block_bytes
from mlxsrv.formats.model_folder import ModelDescription, describe_model
from mlxsrv.formats.weights import abbreviate_count
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.effort import examples
from tests.support.tiny import CHAT_TEMPLATE, write_model

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("original") / "tiny", "qwen3")


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    """A model to break."""
    return Path(shutil.copytree(original, tmp_path / "tiny"))


def change(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; a value of `...` removes one."""
    held = json.loads(path.read_text()) if path.exists() else {}
    held |= values
    path.write_text(json.dumps({k: v for k, v in held.items() if v is not ...}))


def split(folder: Path) -> None:
    """Store the weights as two shards with an index, as large models are."""
    whole = folder / "model.safetensors"
    weights = list(mx.load(str(whole)).items())  # type: ignore[union-attr]
    halves = dict(weights[::2]), dict(weights[1::2])
    for name, half in zip(SHARDS, halves, strict=True):
        mx.save_safetensors(str(folder / name), half, {"format": "mlx"})
    where = {key: name for name, half in zip(SHARDS, halves, strict=True) for key in half}
    change(folder / INDEX, weight_map=where)
    whole.unlink()


def reason(folder: Path, **options: Any) -> str:
    with pytest.raises(UnusableFile) as error:
        describe_model(folder, **options)
    return str(error.value)


# What is said of a healthy one.


def test_all_that_a_chat_model_says(original: Path) -> None:
    weights: dict[str, mx.array] = mx.load(str(original / "model.safetensors"))  # type: ignore[assignment]
    assert describe_model(original) == ModelDescription(
        type="chat",
        context_length=4096,
        family="qwen3",
        parameters=sum(value.size for value in weights.values()),
        parameter_size="164K",
        quantization_level="F32",
        format="mlx",
        size=(original / "model.safetensors").stat().st_size,
        weights=sum(value.nbytes for value in weights.values()),
        kv_block=256 * 2 * 2 * 16 * 2 * 4,
        hidden_size=64,
        layers=2,
        modified_at=max(path.stat().st_mtime for path in original.iterdir()),
        capabilities=("completion", "chat", "tools", "thinking"),
    )


def test_shards_and_links_say_the_same(original: Path, folder: Path, tmp_path: Path) -> None:
    split(folder)
    links = tmp_path / "snapshot"
    links.mkdir()
    for path in folder.iterdir():
        (links / path.name).symlink_to(path)
    whole, linked = describe_model(original), describe_model(links)
    assert describe_model(folder) == linked
    assert linked.weights == whole.weights
    assert linked.parameter_size == whole.parameter_size


def test_one_shard_of_one_needs_no_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    assert describe_model(folder).type == "chat"


@pytest.mark.parametrize("family", ["qwen3", "llama4", "qwen3_next", "falcon_h1", "mamba2"])
def test_the_first_block_of_a_cache_is_what_it_is_said_to_be(family: str, tmp_path: Path) -> None:
    model, _ = mlx_lm.utils.load_model(write_model(tmp_path, family))
    assert describe_model(tmp_path).kv_block == pytest.approx(_first_block(model), rel=0.2)


@pytest.mark.parametrize("family", ["deepseek_v3", "youtu_llm"])
def test_a_latent_cache_is_as_large_as_mlx_lm_keeps_it(family: str) -> None:
    config: JSONObject = {
        "model_type": family,
        **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 64),
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
        **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "v_head_dim"), 16),
        "num_hidden_layers": 2,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "vocab_size": 128,
        "rope_theta": 1e4,
        "rope_scaling": None,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 256,
        "attention_bias": False,
    }
    module = importlib.import_module(f"mlx_lm.models.{family}")
    model = module.Model(module.ModelArgs.from_dict(config))
    assert kv_block_bytes(config, number_bytes=4) == _first_block(model)


def test_layers_that_keep_a_state_keep_no_tokens() -> None:
    state = {"linear_num_value_heads": 2, "linear_value_head_dim": 8, "linear_key_head_dim": 8}
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    each: JSONObject = {"text_config": {"num_hidden_layers": 3, **state, **attention}}
    each["layer_types"] = ["linear_attention", "full_attention", "linear_attention"]
    assert kv_block_bytes(each) == 2 * (256 * 2 * 2 * 16 + 2 * 2 * 8 * 8)
    assert kv_block_bytes({"hybrid_override_pattern": "M-*M", **attention}) == 2 * 256 * 2 * 2 * 16
    assert kv_block_bytes({"model_type": "qwen3"}) == 0


def _first_block(model: Any) -> int:
    """Bytes of a real cache after one token; a number has four."""
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([[1]]), cache))
    return int(sum(layer.nbytes for layer in cache))


@pytest.mark.parametrize(
    ("mode", "bits", "group_size", "level"),
    [("affine", 4, 32, "4bit"), ("affine", 6, 64, "6bit"), ("mxfp4", 4, 32, "mxfp4")],
)
def test_a_quantized_model_has_as_many_parameters(
    folder: Path, tmp_path: Path, mode: str, bits: int, group_size: int, level: str
) -> None:
    def choose(path: str, _: Any) -> Any:
        eight = {"bits": 8, "group_size": 32, "mode": "affine"}
        return eight if "down_proj" in path else "layers" in path

    model, config = mlx_lm.utils.load_model(folder)
    model, config = mlx_lm.utils.quantize_model(
        model, config, group_size, bits, mode=mode, quant_predicate=choose
    )
    tokenizer = mlx_lm.utils.load_tokenizer(folder)
    mlx_lm.utils.save(tmp_path / "small", folder, model, tokenizer, config)
    small, whole = describe_model(tmp_path / "small"), describe_model(folder)
    assert (small.quantization_level, small.format) == (level, "mlx")
    assert small.parameter_size == whole.parameter_size
    assert small.weights < whole.weights * 0.6


def test_weights_of_others_are_counted_unpacked(folder: Path) -> None:
    packed = {
        "mlp.experts.up_proj_blocks": mx.zeros((100, 16), dtype=mx.uint8),
        "mlp.experts.up_proj_scales": mx.zeros((1000,), dtype=mx.uint8),
        "q_proj.qweight": mx.zeros((100, 25), dtype=mx.int32),
        "q_proj.qzeros": mx.zeros((2, 25), dtype=mx.int32),
        "q_proj.scales": mx.zeros((2, 200), dtype=mx.float16),
        "o_proj.weight": mx.zeros((40, 20), dtype=mx.bfloat16),
        "o_proj.weight_scale_inv": mx.zeros((1, 1)),
    }
    mx.save_safetensors(str(folder / "model.safetensors"), packed)
    change(folder / "config.json", quantization_config={"quant_method": "mxfp4"})
    found = describe_model(folder)
    assert found.parameter_size == "24K"  # 3,200 + 20,000 + 800
    assert (found.quantization_level, found.format) == ("mxfp4", "safetensors")


def test_the_type_of_the_numbers_is_that_of_most_bytes(folder: Path) -> None:
    weights = {"a": mx.zeros((990,), dtype=mx.bfloat16), "b": mx.zeros((90,))}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    found = describe_model(folder)
    assert (found.quantization_level, found.format) == ("BF16", "safetensors")
    change(folder / "config.json", quantization={"bits": 4, "group_size": 64})
    assert describe_model(folder).format == "mlx"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (999, "999"),
        (1_234, "1.2K"),
        (1_480_000, "1.5M"),
        (596_049_920, "596M"),
        (999_600_000, "1.0B"),
        (8_030_261_248, "8.0B"),
        (235_093_634_560, "235.1B"),
        (1_026_470_000_000, "1.0T"),
    ],
)
def test_sizes_are_written_as_people_do(count: int, text: str) -> None:
    assert abbreviate_count(count) == text


QWEN_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "tokenizer", "length"),
    [
        ({"max_position_embeddings": 32768}, 131072, 32768),  # Qwen 2.5
        ({"max_position_embeddings": 131072}, 16384, 131072),  # DeepSeek-R1-Distill
        ({"max_position_embeddings": 8192}, 10**30, 8192),  # Mistral, Gemma
        ({"text_config": {"max_position_embeddings": 131072}}, ..., 131072),  # Gemma 3
        ({"n_positions": 1024, "n_ctx": 512}, 1024, 1024),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, ..., 131072),  # Cohere
        ({"max_position_embeddings": 32768, "rope_scaling": QWEN_YARN}, ..., 131072),
        ({"max_position_embeddings": 2048, "rope_scaling": {"type": "linear"}}, ..., 2048),
        ({"max_sequence_length": 2048}, ..., 2048),
        ({"max_position_embeddings": True, "seq_len": "8"}, 77, 77),
        ({}, 10**30, None),
        ({}, ..., None),
    ],
)
def test_the_context_is_what_the_model_was_made_for(
    config: JSONObject, tokenizer: Any, length: int | None, folder: Path
) -> None:
    change(folder / "config.json", **{"max_position_embeddings": ..., **config})
    change(folder / "tokenizer_config.json", model_max_length=tokenizer)
    assert describe_model(folder).context_length == length


def test_an_embedders_context_is_the_least_that_is_said(folder: Path) -> None:
    change(folder / "config.json", max_position_embeddings=514)
    change(folder / "tokenizer_config.json", model_max_length=512)
    assert describe_model(folder, name="e5-small").context_length == 512
    change(folder / "sentence_bert_config.json", max_seq_length=256)
    assert describe_model(folder, name="e5-small").context_length == 256
    assert describe_model(folder).context_length == 514


# What it is for.

PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("settings", "files", "capabilities"),
    [
        ({}, {}, ()),
        ({"chat_template": PLAIN}, {}, ("chat", "thinking")),
        ({"chat_template": CHAT_TEMPLATE}, {}, ("chat", "tools", "thinking")),
        ({"chat_template": [{"name": "default", "template": PLAIN}]}, {}, ("chat", "thinking")),
        ({}, {"chat_template.jinja": PLAIN + "{{ tools }}"}, ("chat", "tools", "thinking")),
        ({"chat_template": CHAT_TEMPLATE}, {"chat_template.jinja": PLAIN}, ("chat", "thinking")),
        # Only processors of images read this one.
        ({}, {"chat_template.json": json.dumps({"chat_template": PLAIN})}, ()),
        ({"chat_template_type": "deepseek_v32"}, {}, ("chat", "tools", "thinking")),
    ],
)
def test_a_model_chats_if_its_tokenizer_will(
    settings: JSONObject, files: dict[str, str], capabilities: tuple[str, ...], folder: Path
) -> None:
    change(folder / "tokenizer_config.json", **{"chat_template": ..., **settings})
    for name, text in files.items():
        (folder / name).write_text(text)
    found = describe_model(folder)
    assert found.capabilities == ("completion", *capabilities)
    assert (found.type == "chat") == Tokenizer(folder).chat_template.exists


def test_marks_of_thoughts_are_enough_whichever_file_lists_them(folder: Path) -> None:
    both = [{"content": "<think>", "special": False}, {"content": "</think>", "special": False}]
    change(folder / "tokenizer_config.json", chat_template=PLAIN)
    assert describe_model(folder).capabilities == ("completion", "chat", "thinking")
    assert Tokenizer(folder).thinks
    for added, listed, found in (
        ([], {}, ()),
        (both[:1], {}, ()),
        (both, {}, ("thinking",)),
        ([], {"5": both[0], "6": both[1]}, ("thinking",)),
        ([{"content": 1}], {"5": 1}, ()),
    ):
        change(folder / "tokenizer.json", added_tokens=added)
        change(folder / "tokenizer_config.json", added_tokens_decoder=listed)
        assert describe_model(folder).capabilities == ("completion", "chat", *found)
    (folder / "tokenizer.json").write_text("[")
    assert describe_model(folder).capabilities == ("completion", "chat")


def test_a_family_may_bring_its_template(folder: Path) -> None:
    change(folder / "tokenizer_config.json", chat_template=...)
    change(folder / "config.json", model_type="muse_spark")
    assert describe_model(folder).type == "chat"


@pytest.mark.parametrize(
    ("name", "embeds"),
    [
        ("Qwen/Qwen3-Embedding-0.6B", True),
        ("mlx-community/embeddinggemma-300m-4bit", True),
        ("nomic-ai/nomic-embed-text-v1.5", True),
        ("BAAI/bge-small-en-v1.5", True),
        ("intfloat/multilingual-e5-large", True),
        ("Alibaba-NLP/gte-Qwen2-7B-instruct", True),
        ("mlx-community/Qwen3-4B-4bit", False),
        ("google/gemma-3n-E4B-it", False),
        ("acme/embedded-systems-coder", False),
        ("acme/cambridge-e52", False),
    ],
)
def test_an_embedder_is_known_by_name(name: str, embeds: bool, original: Path) -> None:
    found = describe_model(original, name=name)
    assert found.type == ("embedding" if embeds else "chat")
    assert ("embedding" in found.capabilities) == embeds


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("modules.json", "[]"),
        ("config_sentence_transformers.json", "{}"),
        ("1_Pooling/config.json", "{}"),
        ("README.md", "---\nlicense: mit\npipeline_tag: feature-extraction\n---\n# E"),
        ("README.md", "---\r\npipeline_tag: 'sentence-similarity'\r\n---\r\n"),
    ],
)
def test_an_embedder_is_known_by_its_files(file: str, text: str, folder: Path) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(text.encode())
    assert describe_model(folder).type == "embedding"


@pytest.mark.parametrize(
    ("listed", "embeds"),
    [
        (["Qwen3Model"], True),
        ("BertModel", True),
        (["Qwen3ForCausalLM"], False),
        (["QWenLMHeadModel"], False),
        ([None, 5], False),
    ],
)
def test_an_embedder_is_known_by_having_no_head(listed: Any, embeds: bool, folder: Path) -> None:
    change(folder / "config.json", architectures=listed)
    assert (describe_model(folder).type == "embedding") == embeds


def test_what_a_readme_says_below_its_front_matter_is_no_tag(folder: Path) -> None:
    (folder / "README.md").write_text("---\nlicense: mit\n---\npipeline_tag: feature-extraction\n")
    assert describe_model(folder).type == "chat"


# What is wrong with one.


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _write(name: str, text: bytes | str) -> Callable[[Path], None]:
    data = text.encode() if isinstance(text, str) else text

    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def _config(**values: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **values)


def _cut(count: int) -> Callable[[Path], None]:
    def cut(folder: Path) -> None:
        path = folder / "model.safetensors"
        os.truncate(path, count if count >= 0 else path.stat().st_size + count)

    return cut


def _replace(*names: str) -> Callable[[Path], None]:
    """Files of these names instead of the weights."""

    def replace(folder: Path) -> None:
        whole = folder / "model.safetensors"
        for name in names:
            shutil.copyfile(whole, folder / name)
        whole.unlink()

    return replace


def _shard(**change_of: Any) -> Callable[[Path], None]:
    """Shards, with an index that names these, too."""

    def shard(folder: Path) -> None:
        split(folder)
        named = json.loads((folder / INDEX).read_text())["weight_map"]
        change(folder / INDEX, weight_map=named | change_of)

    return shard


def _without(*names: str) -> Callable[[Path], None]:
    def remove(folder: Path) -> None:
        if SHARDS[0] in names or SHARDS[1] in names or INDEX in names:
            split(folder)
        for name in names:
            (folder / name).unlink()

    return remove


def _header(fields: Any) -> Callable[[Path], None]:
    text = json.dumps(fields).encode()
    return _write("model.safetensors", len(text).to_bytes(8, "little") + text + bytes(16))


def _dangling(name: str) -> Callable[[Path], None]:
    def link(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to(folder / "blobs" / "gone")

    return link


def _pipe(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return make


LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"

BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (shutil.rmtree, "there is no such folder"),
    (_no_config, "'config.json' is not there"),
    (_write("config.json", ""), "'config.json' is empty"),
    (_write("config.json", "{}"), "something in it"),
    (_write("config.json", "[1]"), "not a JSON object"),
    (_write("config.json", '{"model_type": '), "not valid JSON"),
    (_write("config.json", "[" * 100_000), "not valid JSON"),
    (_write("config.json", b'{"model_type": "\xff"}'), "not valid JSON"),
    (_write("config.json", LFS), "'config.json' is a Git-LFS pointer"),
    (_pipe("config.json"), "'config.json' is not a file"),
    (_config(model_type=...), "no model_type"),
    (_config(model_type=5), "no model_type"),
    (_config(model_type="../models/llama"), "no model_type"),
    (_config(model_type="clip"), "does not know the model type 'clip'"),
    (_config(model_type="Qwen3"), "does not know the model type 'Qwen3'"),
    (_config(model_type="__init__"), "does not know"),
    (_config(model_type="switch_layers"), "cannot run the model type 'switch_layers'"),
    (_config(model_file="custom.py"), "--trust-remote-code"),
    (_without("model.safetensors"), r"it has no model\*.safetensors"),
    (_replace("pytorch_model.bin"), "'pytorch_model.bin', which is not read"),
    (_replace("tiny.gguf"), "'tiny.gguf'"),
    (_replace("weights.npz"), "'weights.npz'"),
    (_replace("weights.00.safetensors"), "'weights.00.safetensors'"),
    (_without(INDEX), "one of several"),
    (_replace(SHARDS[1]), "one of several"),
    (_without(SHARDS[0]), f"'{SHARDS[0]}' is not there"),
    (_shard(x="model-00003-of-00003.safetensors"), "'model-00003-of-00003.safetensors' is not"),
    (_shard(x="../model.safetensors"), "not a file beside it"),
    (_shard(x="/model.safetensors"), "not a file beside it"),
    (_shard(x="model\0.safetensors"), "not a file beside it"),
    (_shard(x=5), "not a file beside it"),
    (_shard(x=".."), "only model"),
    (_shard(x="other.safetensors"), "'other.safetensors', and only model"),
    (_write(INDEX, "{}"), "something in it"),
    (_write(INDEX, '{"weight_map": {}}'), "names no files"),
    (_write(INDEX, '{"weight_map": []}'), "names no files"),
    (_dangling("model.safetensors"), "'model.safetensors' is not there"),
    (_cut(0), "is empty"),
    (_cut(5), "cut short"),
    (_cut(100), "cut short"),
    (_cut(-1), "cut short"),
    (_write("model.safetensors", LFS), "Git-LFS"),
    (_write("model.safetensors", b"\xff" * 64), "cut short, or not safetensors"),
    (_header([]), "no header"),
    (_header({}), "hold no tensors"),
    (_header({"__metadata__": {"format": "mlx"}}), "hold no tensors"),
    (_header({"a": {"dtype": "F32", "shape": [4]}}), "no header"),
    (_header({"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}}), "no header"),
    (_header({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 16]}}), "shape"),
    (_header({"a": {"dtype": "X9", "shape": [3], "data_offsets": [16, 0]}}), "shape"),
    (_header({"a": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}), "cut short"),
    (_without("tokenizer.json", "tokenizer_config.json"), "no tokenizer"),
    (_write("tokenizer.json", LFS), "'tokenizer.json' is a Git-LFS pointer"),
    (_dangling("tokenizer.json"), "'tokenizer.json' is not there"),
    (_write("tokenizer_config.json", "nothing"), "'tokenizer_config.json' is not valid JSON"),
]


@pytest.mark.parametrize(("spoil", "expected"), BROKEN)
def test_a_broken_folder_says_what_is_wrong(
    spoil: Callable[[Path], None], expected: str, folder: Path
) -> None:
    spoil(folder)
    with pytest.raises(UnusableFile, match=expected) as error:
        describe_model(folder)
    assert "\n" not in str(error.value)


def test_code_is_run_when_it_is_trusted(folder: Path) -> None:
    change(folder / "config.json", model_type="my-own", model_file="custom.py")
    assert "'custom.py' is not there" in reason(folder, trust_remote_code=True)
    (folder / "custom.py").write_text("class Model: ...")
    assert describe_model(folder, trust_remote_code=True).family == "my-own"


def test_a_config_is_read_as_python_writes_it(folder: Path) -> None:
    change(folder / "config.json", time_step_limit=[0.0, float("inf")], x=float("nan"))
    assert describe_model(folder).family == "qwen3"


def test_a_path_that_mlx_lm_would_take_for_a_pattern(folder: Path) -> None:
    named = folder.rename(folder.with_name("Qwen [4bit]"))
    with pytest.raises(FileNotFoundError):
        mlx_lm.utils.load_model(named)
    assert "pattern" in reason(named)


def test_what_the_file_system_refuses_is_a_reason(folder: Path) -> None:
    # The name's length, since nothing is forbidden to a test that runs as root.
    change(folder / "config.json", model_file="x" * 300)
    assert reason(folder, trust_remote_code=True).endswith("cannot be read: File name too long")
    change(folder / "config.json", model_file="a\0b")
    assert "file name in it is not valid" in reason(folder, trust_remote_code=True)


# What mlx-lm knows.


def test_the_tables_are_mlx_lms() -> None:
    assert architectures._remappings() == (
        mlx_lm.utils.MODEL_REMAPPING,
        mlx_lm.utils.MODEL_ARCHITECTURE_REMAPPING,
    )


@pytest.mark.slow
def test_the_models_are_mlx_lms() -> None:
    names = architectures._modules("models")
    assert len(names) > 50
    for name in names:
        check = {"model_type": name}
        try:
            module = importlib.import_module(f"mlx_lm.models.{name}")
        except SystemExit:  # without a package that it wants
            module = None
        if hasattr(module, "Model") and hasattr(module, "ModelArgs"):
            assert architectures.check_architecture(check, trust_remote_code=False) == name
            template = getattr(module, "TOKENIZER_DEFAULTS", {}).get("chat_template_type")
            assert architectures._architecture(name).template == template
        else:
            with pytest.raises(UnusableFile, match="cannot run"):
                architectures.check_architecture(check, trust_remote_code=False)


def test_types_that_another_runs_are_known_and_keep_their_name(folder: Path) -> None:
    change(folder / "config.json", model_type="mistral")
    assert describe_model(folder).family == "mistral"
    pair = {"model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"]}
    assert architectures._module(pair) == "bailing_moe_v3"


@pytest.mark.served
def test_nothing_heavy_is_imported(original: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from mlxsrv.formats.model_folder import describe_model\n"
        "describe_model(Path(sys.argv[1]))\n"
        "print([m for m in ('mlx', 'mlx_lm', 'transformers') if m in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(original)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


# Adapters.


@pytest.fixture
def adapter(original: Path, tmp_path: Path) -> Path:
    """A LoRA adapter as mlx-lm's trainer saves one."""
    made = tmp_path / "adapter"
    made.mkdir()
    parameters = {"rank": 4, "scale": 2.0, "dropout": 0.0}
    model, _ = mlx_lm.utils.load_model(original)
    model.freeze()
    linear_to_lora_layers(model, 1, parameters)
    weights = dict(tree_flatten(model.trainable_parameters()))
    mx.save_safetensors(str(made / "adapters.safetensors"), weights)
    change(made / "adapter_config.json", num_layers=1, lora_parameters=parameters)
    return made


def test_an_adapter_has_the_bytes_of_its_tensors(adapter: Path, original: Path) -> None:
    model, _ = mlx_lm.utils.load_model(original)
    mlx_lm.utils.load_adapters(model, str(adapter))
    parameters: Any = tree_flatten(model.parameters())
    lora = [value.nbytes for name, value in parameters if "lora_" in name]
    assert adapter_bytes(adapter) == sum(lora) > 0


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"num_layers": ...}, "num_layers"),
        ({"lora_parameters": ...}, "lora_parameters"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0}}, "lora_parameters.dropout"),
        ({"peft_type": "LORA", "num_layers": ...}, "PEFT"),
    ],
)
def test_an_adapter_that_mlx_lm_cannot_read(
    values: JSONObject, expected: str, adapter: Path
) -> None:
    change(adapter / "adapter_config.json", **values)
    with pytest.raises(UnusableFile, match=expected):
        adapter_bytes(adapter)


def test_a_full_fine_tune_needs_no_parameters_of_lora(adapter: Path) -> None:
    config = {"num_layers": ..., "lora_parameters": ..., "fine_tune_type": "full"}
    change(adapter / "adapter_config.json", **config)
    assert adapter_bytes(adapter) > 0


@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_an_adapter_that_is_not_all_there(name: str, adapter: Path) -> None:
    (adapter / name).unlink()
    with pytest.raises(UnusableFile, match=f"'{name}' is not there"):
        adapter_bytes(adapter)


# Anything at all.

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
KEYS = [
    *("model_type", "architectures", "text_config", "quantization", "quantization_config"),
    *("max_position_embeddings", "model_max_length", "rope_scaling", "layer_types", "head_dim"),
    *("num_hidden_layers", "num_attention_heads", "kv_lora_rank", "hybrid_override_pattern"),
    *(
        "chat_template",
        "chat_template_type",
        "added_tokens_decoder",
        "weight_map",
        "max_seq_length",
    ),
    *("num_layers", "lora_parameters", "fine_tune_type", "model_file", "full_attention_interval"),
]
OBJECTS = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), JSON, max_size=6)
TENSORS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U32", "U8", "X\ud800"]) | JSON,
        "shape": st.lists(st.integers(0, 2**64), max_size=40) | JSON,
        "data_offsets": st.tuples(st.integers(0, 64), st.integers(0, 64)) | JSON,
    }
)
FILES = [
    *("config.json", "tokenizer_config.json", "sentence_bert_config.json", INDEX),
    *("model.safetensors", "chat_template.jinja", "README.md", "adapter_config.json"),
]


@settings(max_examples=examples(300), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(FILES),
    content=st.binary(max_size=60) | OBJECTS | st.dictionaries(st.text(max_size=9), TENSORS),
    keep=st.booleans(),
)
@example(name="config.json", content={"model_type": "a\ud800"}, keep=True)
@example(name="config.json", content={"rope_scaling": {"type": "yarn", "factor": 1e400}}, keep=True)
@example(name=INDEX, content={"weight_map": {"a": "model\ud800.safetensors"}}, keep=True)
@example(name="model.safetensors", content={"a\ud800": {}}, keep=True)
def test_whatever_a_file_holds_there_is_an_answer(
    name: str, content: Any, keep: bool, original: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Files of random content, or of their old content with random additions."""
    folder = tmp_path_factory.getbasetemp() / "fuzzed-e5-model"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original, folder)
    path = folder / name
    if isinstance(content, dict) and name == "model.safetensors":
        text = json.dumps(content).encode()
        content = len(text).to_bytes(8, "little") + text + bytes(64)
    elif isinstance(content, dict):
        held = json.loads(path.read_text()) if keep and path.exists() else {}
        content = json.dumps(held | content).encode()
    path.write_bytes(content)
    for answer in (
        _answer(describe_model, folder, trust_remote_code=True),
        _answer(adapter_bytes, folder),
    ):
        if isinstance(answer, UnusableFile):
            assert len(str(answer).splitlines()) == 1
        assert msgspec.json.encode(str(answer) if isinstance(answer, UnusableFile) else answer)


def _answer(look: Callable[..., Any], folder: Path, **options: Any) -> Any:
    try:
        return look(folder, **options)
    except UnusableFile as error:
        return error
