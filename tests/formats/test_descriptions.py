"""Descriptions of healthy model folders, compared with mlx-lm's models."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxsrv.formats.files import JSONObject
from mlxsrv.formats.model_config import kv_block_bytes
from mlxsrv.formats.model_folder import ModelDescription, describe_model
from mlxsrv.formats.weights import abbreviate_count
from mlxsrv.prompts.tokenizer import Tokenizer
from tests.support.model_folders import change, folder, original, split
from tests.support.tiny import CHAT_TEMPLATE, write_model

__all__ = ["folder", "original"]


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
        weights_outside_layers=sum(
            value.nbytes for name, value in weights.items() if ".layers." not in name
        ),
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
        # Nothing can read the calls of the first; the second says which parser can.
        ({}, {"chat_template.jinja": PLAIN + "{{ tools }}"}, ("chat", "thinking")),
        (
            {"tool_parser_type": "json_tools"},
            {"chat_template.jinja": PLAIN + "{{ tools }}"},
            ("chat", "tools", "thinking"),
        ),
        # Its tools are described in the system message.
        ({"chat_template": PLAIN + "[TOOL_CALLS]"}, {}, ("chat", "tools", "thinking")),
        ({"chat_template": CHAT_TEMPLATE}, {"chat_template.jinja": PLAIN}, ("chat", "thinking")),
        # Only processors of images read this one.
        ({}, {"chat_template.json": json.dumps({"chat_template": PLAIN})}, ()),
        # Code in the place of a template: it takes tools, and the calls are its own.
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
    loaded = Tokenizer(folder)
    assert (found.type == "chat") == loaded.chat_template.exists
    assert loaded.capabilities == tuple(name for name in capabilities if name != "chat")


def test_marks_of_thoughts_are_enough_whichever_file_lists_them(folder: Path) -> None:
    both = [{"content": "<think>", "special": False}, {"content": "</think>", "special": False}]
    change(folder / "tokenizer_config.json", chat_template=PLAIN)
    assert describe_model(folder).capabilities == ("completion", "chat", "thinking")
    assert Tokenizer(folder).formats.thoughts.thinks
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
    assert ("completion" in found.capabilities) != embeds
    assert found.writes


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
