"""The tiny models are real: mlx-lm loads each and generates with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx_lm
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.support.effort import often
from tests.support.tiny import (
    END_TOKENS,
    FAMILIES,
    MARKER_TOKENS,
    SPECIAL_TOKENS,
    make_tokenizer,
    write_model,
)

PROMPT = "The quick brown fox jumps over the lazy dog, and then it sleeps until the sun comes up."


@pytest.mark.parametrize(
    "family", often(FAMILIES, [name for name in FAMILIES if name != "qwen3-46m"])
)
@pytest.mark.slow
def test_family_loads_and_generates(family: str, tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(write_model(tmp_path / "model", family)))
    caches = make_prompt_cache(model)
    assert tuple(type(cache).__name__ for cache in caches) == FAMILIES[family].caches
    assert all(hasattr(cache, "merge") for cache in caches) is FAMILIES[family].batchable

    tokens = _generate(model, tokenizer, 8)
    assert len(tokens) == 8
    assert len(set(tokens)) > 2, "greedy text should wander"


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3-46m"])
def test_weights_depend_on_the_seed_alone(family: str, tmp_path: Path) -> None:
    first, same, other = (
        (write_model(tmp_path / name, family, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("first", 7), ("same", 7), ("other", 8))
    )
    assert first == same
    assert first != other


def test_overrides_reach_the_config(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "llama4", vocab_size=600, attention_chunk_size=32)
    model, tokenizer = mlx_lm.load(str(folder))
    assert len(tokenizer.get_vocab()) == model.args.text_config.vocab_size == 600
    assert model.args.text_config.attention_chunk_size == 32


def test_plain_model_says_only_whole_text(tmp_path: Path) -> None:
    model, tokenizer = mlx_lm.load(str(write_model(tmp_path, "qwen3", plain=True)))
    tokens = _generate(model, tokenizer, 100)
    assert len(tokens) == 100
    assert all("\ufffd" not in tokenizer.decode([token]) for token in tokens)


def test_plain_needs_an_output_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="output head"):
        write_model(tmp_path, "lfm2", plain=True)


@pytest.mark.parametrize("vocabulary", [512, 4096])
@pytest.mark.parametrize(
    "text", [PROMPT, "def f(x):\n\treturn x", "👩‍👩‍👧‍👦 🇫🇷", "你好，世界", "Größe"]
)
def test_tokenizer_returns_the_text(vocabulary: int, text: str) -> None:
    tokenizer = make_tokenizer(vocabulary)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_added_tokens_are_one_token_each(tmp_path: Path) -> None:
    _, tokenizer = mlx_lm.load(str(write_model(tmp_path, "qwen3")))
    for token in SPECIAL_TOKENS + MARKER_TOKENS:
        assert len(tokenizer.encode(token)) == 1
    assert tokenizer.decode(tokenizer.encode("<think>"), skip_special_tokens=True) == "<think>"
    assert tokenizer.decode(tokenizer.encode("<|im_end|>"), skip_special_tokens=True) == ""
    ends = {tokenizer.convert_tokens_to_ids(token) for token in END_TOKENS}
    assert tokenizer.eos_token_ids == ends


CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (
            [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
            {},
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            [{"role": "user", "content": "U"}],
            {"enable_thinking": True},
            "<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n<think>\n",
        ),
        (
            [{"role": "user", "content": "U"}],
            {"add_generation_prompt": False},
            "<|im_start|>user\nU<|im_end|>\n",
        ),
        (
            [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "2"},
            ],
            {},
            '<|im_start|>assistant\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n'
            "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n2\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}],
            {"tools": [TOOL]},
            "<|im_start|>system\nS\nYou may call these tools, each call as JSON between "
            "<tool_call> and </tool_call>:\n<tools>\n"
            '{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}'
            "\n</tools><|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        ),
    ],
)
def test_chat_template(
    messages: list[dict[str, Any]], options: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    _, tokenizer = mlx_lm.load(str(write_model(tmp_path, "qwen3")))
    # mlx-lm asks every model that can think to do so
    options = {"add_generation_prompt": True, "enable_thinking": False} | options
    assert tokenizer.apply_chat_template(messages, tokenize=False, **options) == expected


def _generate(model: Any, tokenizer: Any, count: int) -> list[int]:
    prompt = tokenizer.encode(PROMPT)
    stream = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=count)
    return [response.token for response in stream]
