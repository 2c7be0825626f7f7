"""The names of formats of calls and of thoughts, and what vLLM and SGLang call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

NONE = "none"
"""No format: text is content as it is written."""

_CALLS: Mapping[str, str] = {
    "apertus": "apertus2509",
    "command": "cohere cohere2 cohere_command3 cohere_command4 command_a command_r7b",
    "deepseek_v3": "deepseek_r1",
    "deepseek_v31": "",
    "deepseek_v32": "dsml",
    "deepseek_v4": "dsml",
    "deepseek_v41": "dsml",
    "ernie45": "",
    "exaone4": "exaone",
    "functiongemma": "function_gemma",
    "functools": "",
    "gemma4": "gemma",
    "gigachat": "gigachat3",
    "glm": "glm4 glm45 glm47 glm5 laguna ling3 poolside_v1 ring spark",
    "granite": "granite3",
    "harmony": "gpt_oss openai openai_gptoss",
    "hermes": "granite4 json_tools qwen qwen25 qwen3 qwen3_json smollm3",
    "hunyuan": "hunyuan_a13b",
    "hy_v3": "hy_v4",
    "jamba": "",
    "kimi_k2": "kimi",
    "kimi_k3": "",
    "lfm2": "pythonic",
    "llama4_pythonic": "pythonic",
    "llama_json": "llama3 llama3_json llama4_json",
    "longcat": "",
    "minicpm5": "",
    "minimax_m2": "minimax",
    "minimax_m3": "",
    "mistral_args": "mistral mistral_v11 magistral devstral",
    "mistral_ids": "mistral",
    "mistral_list": "mistral",
    "muse": "muse_spark",
    "nemotron_v2": "",
    "olmo3": "pythonic",
    "phi4": "phi4_mini_json",
    "prompted": "",
    "pythonic": "toolace",
    "qwen_xml": "mimo nemotron_v3 qwen3 qwen_coder qwen3_coder qwen3_xml step3p5",
    "seed_oss": "",
    "xlam": "",
}

_THOUGHTS: Mapping[str, str] = {
    "apertus": "apertus2509",
    "command": "cohere cohere2 cohere_command3 cohere_command4 command_a command_r7b",
    "gemma4": "",
    "harmony": "gpt_oss openai openai_gptoss",
    "hunyuan": "hunyuan_a13b",
    "kimi": "",
    "kimi_k3": "",
    "longcat": "",
    "minimax_m3": "",
    "mistral": "magistral",
    "muse": "muse_spark",
    "response": "ernie45 granite",
    "seed_oss": "",
    "think": "deepseek_r1 deepseek_v3 exaone4 glm45 glm47 hy_v3 kimi_k2 minimax_m2 "
    "minimax_m2_append_think nemotron_v3 olmo3 qwen3 step3p5",
    "think_colon": "",
    "think_headings": "granite",
}

_LISTS = {"calls": _CALLS, "thoughts": _THOUGHTS}

FormatKind = Literal["calls", "thoughts"]


class UnknownFormat(ValueError):
    """No format has this name. The message lists those that there are."""


def names(kind: FormatKind) -> Sequence[str]:
    """Return the names of all formats of a kind."""
    return (NONE, *_LISTS[kind])


def find_names(word: str, kind: FormatKind) -> Sequence[str]:
    """Return the formats that have this name; what others call it may be one of several, and "auto"
    stands for all.

    Raises:
        UnknownFormat: there is none.
    """
    asked = word.strip().lower().translate(str.maketrans("-.", "__"))
    if asked == "auto":
        return names(kind)
    exact = [name for name in names(kind) if name == asked]
    found = exact + [name for name, others in _LISTS[kind].items() if asked in others.split()]
    if not found:
        known = ", ".join(names(kind))
        raise UnknownFormat(f"no format of {kind} is called {word!r}; there are: {known}")
    return found
