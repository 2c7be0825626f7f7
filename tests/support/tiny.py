"""Real but tiny models, made in code, so that tests and benchmarks need no download.

`families` has their configs. The weights are random, yet scaled so that greedy text wanders and its
choices are clear: a test that compares tokens then fails on a wrong cache or mask, not on the last
bit of a sum.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import random
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.families import FAMILIES as FAMILIES
from tests.support.families import RARE as RARE
from tests.support.families import VOCABULARY as VOCABULARY
from tests.support.families import WINDOW as WINDOW

Array: TypeAlias = np.ndarray[Any, Any]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKER_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
END_TOKENS = ("<|im_end|>", "<|endoftext|>")

CHAT_TEMPLATE = """\
{% if tools %}
<|im_start|>system
{% if messages[0].role == 'system' %}
{{ messages[0].content }}
{% endif %}
You may call these tools, each call as JSON between <tool_call> and </tool_call>:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools><|im_end|>
{% endif %}
{% for message in messages %}
{% if message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif not (tools and loop.first and message.role == 'system') %}
<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{% set tool_call = call.function or call %}
{% set arguments = tool_call.arguments %}

<tool_call>
{"name": "{{ tool_call.name }}", "arguments": \
{{ arguments if arguments is string else arguments | tojson }}}
</tool_call>
{%- endfor %}
<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking %}
<think>
{% endif %}
{% endif %}
"""
"""ChatML with tools as Qwen and Hermes models write them (for trim_blocks and lstrip_blocks)."""

_THINKING = "{% if enable_thinking %}\n<think>\n{% endif %}\n"

_TEXT = """\
The quick brown fox jumps over the lazy dog, and then it sleeps until the sun comes up again.
A server streams each token as soon as the model has made it; nobody likes to wait for an answer.
What is the weather in Paris? It is 21 degrees and sunny, so take a hat and leave the umbrella.
def add(a: int, b: int) -> int:
    \"\"\"Return the sum of a and b.\"\"\"
    return a + b
for name, value in sorted(table.items()):
    print(f"{name}: {value:.2f}")
class Queue: async def get(self) -> Item: return await self._items.get()
{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius", "days": 3}}
{"id": 17, "tags": ["red", "green"], "ok": true, "next": null, "price": 12.5}
😀 😂 🚀 🎉 👍🏽 👩‍👩‍👧‍👦 🇫🇷 ❤️ ✨ 🔥 so many emoji 😀😂🚀
你好，世界。今天的天气很好，我们去公园散步吧。语言模型一个词一个词地生成文本。
こんにちは、世界。今日はとても良い天気ですね。 안녕하세요, 세계. 오늘은 날씨가 참 좋네요.
Žluťoučký kůň úpěl ďábelské ódy. Ça va très bien, merci. Größe, Straße, naïve façade.
"""


def write_model(
    folder: Path, family: str, *, seed: int = 0, plain: bool = False, **overrides: Any
) -> Path:
    """Write the family's model, tokenizer included, into `folder` and return it.

    `overrides` change the config (of the text model, where one is nested); `vocab_size` sizes the
    tokenizer too. A `plain` model only ever says complete text: no end token, no marker, no part
    of a character; and it never thinks, which mlx-lm would ask of it by default. A benchmark wants
    that, for then each request runs to its `max_tokens` and each token is one visible step.
    """
    described = (FAMILIES | RARE)[family]
    vocabulary = overrides.pop("vocab_size", described.vocabulary)
    tokenizer = make_tokenizer(vocabulary)
    config = _complete_config(described.config, overrides, tokenizer)
    muted = _not_plain(tokenizer) if plain else []
    template = CHAT_TEMPLATE.replace(_THINKING, "") if plain else CHAT_TEMPLATE
    return write_folder(folder, config, make_weights(config, seed, muted), tokenizer, template)


def write_folder(
    folder: Path,
    config: dict[str, Any],
    weights: dict[str, mx.array],
    tokenizer: Tokenizer,
    template: str = CHAT_TEMPLATE,
) -> Path:
    """Write all files of a model into `folder`, which is made, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": config["eos_token_id"]})
    _write_tokenizer(folder, tokenizer, template)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    return folder


@functools.cache
def make_tokenizer(vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens, the added ones last."""
    added = [AddedToken(token, special=True) for token in SPECIAL_TOKENS]
    added += [AddedToken(token, special=False) for token in MARKER_TOKENS]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(vocabulary), trainer)
    tokenizer.add_tokens(added)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the training text yields no vocabulary of {vocabulary}")
    return tokenizer


def _training_text(vocabulary: int) -> Iterator[str]:
    """The module's text; where a large vocabulary needs more, also made-up words."""
    yield from _TEXT.splitlines(keepends=True)
    dice = random.Random(0)
    syllables = [a + b for a in "bcdfghjklmnprstvwz" for b in "aeiou"]
    words = 0 if vocabulary <= 2 * VOCABULARY else vocabulary
    if vocabulary > 2**16:  # of which words have fewer parts that are not there yet
        words *= 2
    for _ in range(words):
        word = "".join(dice.choices(syllables, k=dice.randint(2, 4)))
        yield f" {word} {word}"


def _complete_config(
    base: dict[str, Any], overrides: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    sizes = overrides | {"vocab_size": tokenizer.get_vocab_size()}
    config = dict(base)
    if "text_config" in config:
        config["text_config"] = config["text_config"] | sizes
    else:
        config |= sizes
    return config | {"eos_token_id": find_end_tokens(tokenizer)}


def find_end_tokens(tokenizer: Tokenizer) -> list[Any]:
    return [tokenizer.token_to_id(token) for token in END_TOKENS]


def _not_plain(tokenizer: Tokenizer) -> list[int]:
    """Tokens that end or mark something, are no whole character, or are a space alone.

    (mlx-lm's detokenizer holds a lone space back until the next token.)
    """
    added = set(SPECIAL_TOKENS + MARKER_TOKENS)
    return [
        number
        for token, number in tokenizer.get_vocab().items()
        if token in added or "\ufffd" in (text := tokenizer.decode([number])) or text == " "
    ]


def _write_tokenizer(folder: Path, tokenizer: Tokenizer, template: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": template,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def make_weights(
    config: dict[str, Any], seed: int = 0, muted: Collection[int] = ()
) -> dict[str, mx.array]:
    """Random weights under the names of mlx-lm's model class, which `sanitize` leaves alone. The
    logits of `muted` tokens are zero."""
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    parameters: Any = tree_flatten(model.parameters())
    weights = {name: _random_weight(name, value, seed) for name, value in parameters}
    if muted:
        _mute(weights, muted)
    return {name: mx.array(weight, dtype=mx.float32) for name, weight in weights.items()}


def _mute(weights: dict[str, Array], tokens: Collection[int]) -> None:
    """Zero the tokens' rows of the output head: a zero logit is far below the best of the rest."""
    heads = [name for name in weights if name.endswith("lm_head.weight")]
    if not heads:
        raise ValueError("a model without an output head of its own cannot be made plain")
    for name in heads:
        weights[name][[*tokens]] = 0


def _random_weight(name: str, value: Any, seed: int) -> Array:
    """Values for one parameter, the same for the same name and seed whatever else there is."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    normal = np.random.default_rng(int.from_bytes(digest[:8], "big")).standard_normal(value.shape)
    for part, scale in _SCALES.items():
        if part in name:
            return scale(normal)
    if value.ndim <= 1:  # norms, skip weights, time steps: the model class knows best
        return np.array(value)
    return _projection(normal)


def _projection(normal: Array) -> Array:
    """Weights of a linear layer that keeps the variance of its input."""
    scaled: Array = normal / np.sqrt(normal.shape[-1])
    return scaled


_SCALES: dict[str, Callable[[Array], Array]] = {
    # logits with a deviation of 4: the best of them leads by more than rounding can move it
    "lm_head": lambda normal: 4 * _projection(normal),
    "embed": lambda normal: normal,
    # slow decay, or state forgets its prompt and a test cannot see a wrong one
    "A_log": lambda normal: np.log(0.05) + normal,
    "conv": lambda normal: normal / 2,
    "sinks": lambda normal: normal,
    "bias": lambda normal: normal / 10,
}
"""The scale of a standard normal draw, by the first part that the parameter's name contains."""


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
