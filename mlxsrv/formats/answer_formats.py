"""The formats in which a model thinks and calls tools, by name, as far as its files show them.

What is found first decides. Marks that are tokens of a vocabulary decide most: no other family has
them. Then comes what `tokenizer_config.json` says, then the chat template, and last the family.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from mlxsrv.formats.format_names import NONE, FormatKind, find_names


class FormatNames(NamedTuple):
    """The names of the formats of one model.

    Attributes:
        calls: that of its tool calls; "none" if it is not known.
        thoughts: that of its thoughts; "none" if it has none.
    """

    calls: str = NONE
    thoughts: str = NONE


class FormatWords(NamedTuple):
    """The operator's words for the formats of one model; None leaves it to the model's files."""

    calls: str | None = None
    thoughts: str | None = None


FROM_FILES = FormatWords()
"""The operator has said nothing."""


class Evidence(msgspec.Struct, frozen=True):
    """All that shows the formats of a model.

    Attributes:
        vocabulary: the names of its tokens; those that were added to it suffice.
        templates: the texts of its chat templates, in the order in which they are looked at.
        settings: `tokenizer_config.json`.
        config: `config.json`.
    """

    vocabulary: Container[str]
    templates: Sequence[str] = ()
    settings: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}


class _Sign(msgspec.Struct, frozen=True):
    """Signs of one format.

    Attributes:
        format: its name.
        marks: all of these are tokens, or stand in the template.
        texts: all of these stand in the template.
        absent: none of these is a token or stands in the template.
    """

    format: str
    marks: Sequence[str] = ()
    texts: Sequence[str] = ()
    absent: Sequence[str] = ()

    def found(self, vocabulary: Container[str], template: str) -> bool:
        def marked(name: str) -> bool:
            return name in vocabulary or name in template

        texts = all(text in template for text in self.texts)
        return texts and all(map(marked, self.marks)) and not any(map(marked, self.absent))


_XTML = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
_DSML = "｜DSML｜"
_SECTION = "<｜tool▁calls▁begin｜>"

_CALLS_BY_TOKENS = (
    _Sign("kimi_k3", _XTML),
    _Sign("harmony", ["<|channel|>", "<|message|>", "<|call|>"]),
    _Sign("muse", ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"], absent=["<|channel|>"]),
    _Sign("gemma4", ["<|tool_call>", "<tool_call|>"]),
    _Sign("functiongemma", ["<start_function_call>"]),
    _Sign("minimax_m3", ["]<]minimax[>["]),
    _Sign("minimax_m2", ["<minimax:tool_call>"]),
    _Sign("kimi_k2", ["<|tool_calls_section_begin|>"]),
    _Sign("deepseek_v32", [_DSML], ["function_calls"]),
    _Sign("deepseek_v4", [_DSML], ["tool_calls>"]),
    _Sign("deepseek_v41", [_DSML], [_DSML + " "]),
    _Sign("seed_oss", ["<seed:tool_call>"]),
    _Sign("longcat", ["<longcat_tool_call>"]),
    _Sign("lfm2", ["<|tool_call_start|>"]),
    _Sign("lfm2", ["<|tool_list_start|>"]),
    _Sign("apertus", ["<|tools_prefix|>"]),
    _Sign("command", ["<|START_ACTION|>"]),
    _Sign("hy_v3", ["<arg_key:opensource>"]),
    _Sign("hy_v3", ["<tool_sep>", "<arg_key>"]),
    _Sign("hy_v3", ["<tool_calls>", "<arg_key>"]),
    _Sign("glm", ["<arg_key>"]),
)

_CALLS_BY_TEXT = (
    _Sign("qwen_xml", texts=["<function=", "<parameter="]),
    _Sign("minicpm5", texts=['<function name="', '<param name="']),
    _Sign("mistral_ids", texts=["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"]),
    _Sign("mistral_args", texts=["[TOOL_CALLS]", "[ARGS]"]),
    _Sign("mistral_list", texts=["[TOOL_CALLS]"]),
    _Sign("deepseek_v3", texts=[_SECTION, "```json"]),
    _Sign("deepseek_v31", texts=[_SECTION]),
    _Sign("olmo3", texts=["<function_calls>"]),
    _Sign("muse", texts=["<atem:"]),
    _Sign("nemotron_v2", texts=["<TOOLCALL>"]),
    _Sign("gigachat", ["<|function_call|>"]),
    _Sign("jamba", texts=["<tool_calls>", "<|bom|>"]),
    _Sign("hunyuan", texts=["<tool_calls>"]),
    _Sign("granite", texts=["<|tool_call|>", "<|start_of_role|>"]),
    _Sign("phi4", texts=["<|tool_call|>"]),
    _Sign("exaone4", ["[|endofturn|]"], ["<tool_call>"]),
    _Sign("ernie45", texts=["<tool_call>", "<response>"]),
    _Sign("hermes", texts=["<tool_call>"]),
    _Sign("functools", texts=["functools"]),
    _Sign("llama_json", texts=["parameters", "ipython"], absent=["<function="]),
    _Sign("llama_json", texts=["parameters", "<|python_tag|>"], absent=["<function="]),
    # Vocabularies that come without a template that knows tools.
    _Sign("mistral_args", ["[TOOL_CALLS]", "[ARGS]"]),
    _Sign("mistral_list", ["[TOOL_CALLS]"]),
    _Sign("deepseek_v31", [_SECTION]),
)

_THOUGHTS = (
    _Sign("kimi_k3", _XTML),
    _Sign("harmony", ["<|channel|>", "<|message|>", "<|call|>"]),
    _Sign("muse", ["<|start|>", "<|message|>", "<|eom|>", "<|eot|>"], absent=["<|channel|>"]),
    _Sign("gemma4", ["<|channel>", "<channel|>"]),
    _Sign("minimax_m3", ["<mm:think>"]),
    _Sign("seed_oss", ["<seed:think>"]),
    _Sign("longcat", ["<longcat_think>"]),
    _Sign("think_colon", ["<|think:start|>", "<|think:end|>"]),
    _Sign("command", ["<|START_THINKING|>"]),
    _Sign("apertus", ["<|inner_prefix|>"]),
    _Sign("mistral", ["[THINK]", "[/THINK]"]),
    _Sign("kimi", texts=["◁think▷"]),
    _Sign("think_headings", texts=["Here is my thought process:", "Here is my response:"]),
    _Sign("hunyuan", ["<think>"], ["<answer>"]),
    _Sign("response", ["<think>"], ["<response>"]),
    _Sign("think", ["<think>", "</think>"]),
    _Sign("think", texts=["</think>"]),
)

# By mlx-lm's name of a parser, with what must be there to believe it.
_CALLS_BY_PARSER = {
    "function_gemma": _Sign("functiongemma", ["<start_function_call>"]),
    "gemma4": _Sign("gemma4", ["<|tool_call>"]),
    "glm47": _Sign("glm", ["<arg_key>"]),
    "json_tools": _Sign("hermes", ["<tool_call>"], absent=["<function="]),
    "kimi_k2": _Sign("kimi_k2", ["<|tool_calls_section_begin|>"]),
    "kimi_k3": _Sign("kimi_k3", _XTML),
    "laguna": _Sign("glm", ["<tool_call>"]),
    "longcat": _Sign("longcat", ["<longcat_tool_call>"]),
    "minicpm5": _Sign("minicpm5"),
    "minimax_m2": _Sign("minimax_m2", ["<minimax:tool_call>"]),
    "muse_spark": _Sign("muse", ["<|start|>"]),
    "qwen3_coder": _Sign("qwen_xml", ["<tool_call>"]),
}

# By mlx-lm's name of code that takes the place of a template.
_CALLS_BY_CODE = {"deepseek_v32": "deepseek_v32", "muse_spark": "muse"}

# By the beginning of a `model_type`.
_CALLS_BY_FAMILY = {
    "deepseek_v32": "deepseek_v32",
    "deepseek_v41": "deepseek_v41",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v3": "deepseek_v3",
    "kimi_k3": "kimi_k3",
    "kimi_k2": "kimi_k2",
    "llama4": "llama4_pythonic",
    "cohere2": "command",
    "granite": "granite",
    "olmo3": "olmo3",
    "lfm2": "lfm2",
    "smollm3": "hermes",
    "gpt_oss": "harmony",
}
_PHI = _Sign("phi4", ["<|tool_call|>"])


def detect(evidence: Evidence, words: FormatWords = FROM_FILES) -> FormatNames:
    """Return the names of a model's formats.

    Raises:
        UnknownFormat: a word is no name.
    """
    return FormatNames(
        calls=_choose("calls", words.calls, _calls(evidence)),
        thoughts=_choose("thoughts", words.thoughts, _thoughts(evidence)),
    )


def _choose(kind: FormatKind, word: str | None, found: Iterable[str]) -> str:
    """Return the first that was found; of those that the operator's word allows, if there is one.

    Raises:
        UnknownFormat: the word is no name.
    """
    allowed = find_names(word or "auto", kind)
    return next((name for name in found if name in allowed), allowed[0])


def _calls(evidence: Evidence) -> Iterator[str]:
    code = str(evidence.settings.get("chat_template_type"))
    yield from filter(None, [_CALLS_BY_CODE.get(code)])
    for template in evidence.templates or [""]:
        yield from _first(_CALLS_BY_TOKENS, evidence, template)
    family = str(evidence.config.get("model_type"))
    if _DSML in evidence.vocabulary:
        yield from (name for prefix, name in _CALLS_BY_FAMILY.items() if family.startswith(prefix))
        yield "deepseek_v4"
    whole = "\n".join(evidence.templates)
    parser = _CALLS_BY_PARSER.get(str(evidence.settings.get("tool_parser_type")))
    yield from _first([parser] if parser is not None else [], evidence, whole)
    for template in evidence.templates or [""]:
        yield from _first(_CALLS_BY_TEXT, evidence, template)
    yield from (name for prefix, name in _CALLS_BY_FAMILY.items() if family.startswith(prefix))
    if family.startswith("phi3"):
        yield from _first([_PHI], evidence, whole)


def _thoughts(evidence: Evidence) -> Iterator[str]:
    yield from _first(_THOUGHTS, evidence, "\n".join(evidence.templates))


def _first(signs: Iterable[_Sign], evidence: Evidence, template: str) -> Iterator[str]:
    return (sign.format for sign in signs if sign.found(evidence.vocabulary, template))


_CHATML = ("<|im_end|>",)
_GLM = ("<|observation|>", "<|user|>", "<|endoftext|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>",)
_MINIMAX = ("[e~[",)
_ENDS: Mapping[str, Sequence[str]] = {
    "apertus": ("<|assistant_end|>",),
    "command": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "deepseek_v32": _DEEPSEEK,
    "deepseek_v4": _DEEPSEEK,
    "deepseek_v41": _DEEPSEEK,
    "exaone4": ("[|endofturn|]",),
    # The original's template writes this behind a call that has no result.
    "functiongemma": ("<start_function_response>", "<end_of_turn>"),
    "gemma4": ("<|tool_response>", "<turn|>"),
    "gigachat": ("<|message_sep|>",),
    "glm": (*_GLM, "<|role_end|>"),
    "granite": ("<|end_of_text|>",),
    "harmony": ("<|return|>", "<|call|>"),
    "hermes": _CHATML,
    "jamba": ("<|eom|>",),
    "kimi_k2": _CHATML,
    "kimi_k3": ("<|end_of_msg|>",),
    "lfm2": _CHATML,
    "llama4_pythonic": ("<|eot|>", "<|eom|>"),
    "llama_json": ("<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>"),
    "longcat": ("</longcat_s>",),
    "minicpm5": _CHATML,
    "minimax_m2": _MINIMAX,
    "minimax_m3": _MINIMAX,
    "mistral_args": ("</s>",),
    "mistral_ids": ("</s>",),
    "mistral_list": ("</s>",),
    "muse": ("<|eot|>",),  # behind <|eom|> the turn goes on
    "nemotron_v2": ("<SPECIAL_12>",),
    "olmo3": _CHATML,
    "phi4": ("<|end|>",),
    "qwen_xml": _CHATML,
    "seed_oss": ("<seed:eos>",),
}
"""Tokens that end a turn, by formats of calls and of thoughts. Published models often forget to
list theirs, and then write on into a result that they invent."""


def find_ends(evidence: Evidence) -> list[str]:
    """Return the tokens that end a turn in the formats that the files show."""
    found = {next(_calls(evidence), NONE), next(_thoughts(evidence), NONE)}
    ends = (end for name in sorted(found) for end in _ENDS.get(name, ()))
    return [end for end in dict.fromkeys(ends) if end in evidence.vocabulary]
