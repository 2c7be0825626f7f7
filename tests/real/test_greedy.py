"""Greedy text is mlx-lm's, alone and in a crowd, in each number format, over windows, and from kept
prompts."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from mlx_lm import generate

from mlxsrv.settings import Settings
from tests.real.conftest import Load, real
from tests.real.greedy import ask, ask_together, assert_likeliest
from tests.real.material import FORMATS
from tests.support.loading import generate as greedy
from tests.support.loading import load

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "Once upon a time, in a small village by the sea,",
)
CODE = "def sign(x):\n    if x > 0:\n        return 1\n    elif x < 0:\n"
SOURCE = Path(__file__).parents[2] / "mlxsrv" / "text" / "detokenize.py"


@pytest.mark.parametrize("kind", FORMATS)
def test_alone_and_in_a_crowd(client: httpx.Client, mlx_lm: Load, kind: str) -> None:
    name = f"smollm2-{kind}"
    real(name)
    model, tokenizer = mlx_lm(name)
    tokens = 8 if kind.endswith("bit") else 16  # MLX's CPU back end has no fast kernels for them
    alone = [ask(client, name, prompt, tokens) for prompt in PROMPTS]
    crowd = ask_together(client, name, PROMPTS, tokens)
    for prompt, one, other in zip(PROMPTS, alone, crowd, strict=True):
        assert one["prompt_token_ids"] == tokenizer.encode(prompt)
        assert_likeliest(model, one, kind)
        assert_likeliest(model, other, kind)
        if kind != "bfloat16":
            assert one["token_ids"] == other["token_ids"]
    if kind == "float32":  # and what mlx-lm itself writes, which leaves out a first space
        for prompt, one in zip(PROMPTS, alone, strict=True):
            theirs = generate(model, tokenizer, prompt, max_tokens=tokens)
            assert one["text"].removeprefix(" ") == theirs


def test_spaces_of_gemma(client: httpx.Client, mlx_lm: Load) -> None:
    """Its runs of spaces are added tokens. They are text, and stop strings find them."""
    real("gemma3-float32")
    model, tokenizer = mlx_lm("gemma3-float32")
    found = ask(client, "gemma3-float32", CODE, 12)
    assert found["text"] == generate(model, tokenizer, CODE, max_tokens=12)
    assert found["text"].startswith("        return -1\n    else:\n")
    assert_likeliest(model, found)
    stopped = ask(client, "gemma3-float32", CODE, 12, stop=["\n    else"])
    assert stopped["text"] == "        return -1"
    point = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99}}}
    asked = {"json_schema": point | {"required": ["x"]}}
    found = ask(client, "gemma3-float32", "A point, as indented JSON:\n", 24, **asked)
    assert found["finish_reason"] == "stop"
    assert json.loads(found["text"]).keys() == {"x"}


def test_over_the_window(client: httpx.Client, mlx_lm: Load) -> None:
    """Prompts longer than the window of 512, and one that crosses it while it is answered, beside
    short ones."""
    real("gemma3-float32")
    model, tokenizer = mlx_lm("gemma3-float32")
    ids = tokenizer.encode(SOURCE.read_text(), add_special_tokens=False)
    longer, crossing = (tokenizer.decode(ids[:count]) for count in (620, 504))
    together = ask_together(client, "gemma3-float32", (longer, crossing, CODE, PROMPTS[0]), 16)
    assert len(together[0]["prompt_token_ids"]) > 600
    assert 500 < len(together[1]["prompt_token_ids"]) < 512
    for choice in together:
        assert_likeliest(model, choice)
    again = ask(client, "gemma3-float32", longer, 16)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
    assert again["token_ids"] == together[0]["token_ids"]


def test_from_kept_prompts(client: httpx.Client, mlx_lm: Load) -> None:
    """A chat's next turns, each of which goes on from the last one."""
    real("smollm2-float32")
    model, _ = mlx_lm("smollm2-float32")
    content = " ".join(f"Sentence {n} is about rivers of Europe." for n in range(8))
    messages = [{"role": "user", "content": content}]
    for turn, question in enumerate(
        ("Which of them is the longest?", "And where does it end?", "")
    ):
        body = {"model": "smollm2-float32", "messages": messages, "max_tokens": 24}
        more = {"temperature": 0, "return_token_ids": True}
        answer = client.post("/v1/chat/completions", json=body | more).json()
        choice = answer["choices"][0]
        ids = {"prompt_token_ids": answer["prompt_token_ids"], "token_ids": choice["token_ids"]}
        assert_likeliest(model, {"text": choice["message"]["content"], **ids})
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached > 80 or turn == 0
        messages += [
            {"role": "assistant", "content": choice["message"]["content"]},
            {"role": "user", "content": question},
        ]


def test_short_texts_with_a_quantized_cache(mlx_lm: Load) -> None:
    """Four bits from the first token on lead this model elsewhere. Behind a start, as mlx-lm's
    command has one too, its answer to a short question is that without them."""
    _, tokenizer = mlx_lm("smollm2-float32")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tuple(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
    texts = []
    start = Settings().quantized_kv_start
    for bits in (None, 4):
        resident = load(real("smollm2-float32"), kv_bits=bits, quantized_kv_start=start)
        assert resident.loaded.notes == ()
        [tokens] = greedy(resident, prompt, max_tokens=7)
        texts.append(tokenizer.decode(tokens[:7]))
    assert texts == ["The capital of France is Paris."] * 2
