"""Real tokenizers: the formats that are found in them, and calls in their own tokens."""

from __future__ import annotations

import json
from functools import cache

import pytest

from mlxsrv.formats.answer_formats import FormatWords
from mlxsrv.generation.spec import ChatMessage, ChatPrompt, GenerationSpec, PastCall
from mlxsrv.prompts.planning import plan
from mlxsrv.prompts.tokenizer import Tokenizer
from mlxsrv.text.call_formats.calls import Tools, WrittenCall
from mlxsrv.text.marks import SPELLED
from mlxsrv.text.reader import AnswerReader, OfferedCalls, ToolArguments, ToolOpened
from tests.real.conftest import real

FOUND = {
    "deepseek_v3": ("deepseek_v3", "none", {"<｜end▁of▁sentence｜>"}),
    "deepseek_v4": ("deepseek_v4", "think", {"<｜end▁of▁sentence｜>"}),
    "gemma3": ("none", "none", {"<end_of_turn>"}),
    "gptoss": ("harmony", "harmony", {"<|call|>", "<|return|>"}),
    "llama3": ("none", "none", {"<|end_of_text|>", "<|eot_id|>"}),
    "llama3_1": ("none", "none", {"<|eot_id|>"}),
    "qwen3": ("hermes", "think", {"<|im_end|>"}),
    "qwen3_5": ("none", "think", {"<|im_end|>"}),  # a vocabulary without a template
    "tekken": ("mistral_list", "none", {"</s>"}),
}


@cache
def tokenizer_of(name: str, word: str = "auto") -> Tokenizer:
    return Tokenizer(real(f"tokenizer-{name}"), words=FormatWords(word))


@pytest.mark.parametrize("name", FOUND)
def test_formats_and_the_ends_of_turns_are_found(name: str) -> None:
    tokenizer = tokenizer_of(name)
    calls, thoughts = tokenizer.formats.calls, tokenizer.formats.thoughts
    ends = set(tokenizer.token_names(sorted(tokenizer.turn_ends)))
    assert ("none" if calls is None else calls.name, thoughts.name, ends) == FOUND[name]


FORMATS = {
    "deepseek_v3": "auto",
    "deepseek_v4": "auto",
    "gptoss": "auto",
    "qwen3": "auto",
    "qwen3_5": "qwen3_xml",
    "tekken": "auto",
    "gemma3": "prompted",
    "llama3_1": "llama3_json",
}
ARGUMENTS = {"path": "a b/ç.py", "text": 'x = "</tool_call>"\n\n\tif x:\n  ☺ [TOOL_CALLS]', "n": 3}
SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "text": {"type": "string"},
        "n": {"type": "integer"},
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_come_back_from_their_own_tokens(name: str) -> None:
    """Markers are tokens where the vocabulary has them, also those in a value."""
    tokenizer = tokenizer_of(name, FORMATS[name])
    calls = tokenizer.formats.calls
    assert calls is not None
    spelled = calls.spell([WrittenCall("write", ARGUMENTS, "abcdefgh1")])
    stage = tokenizer.pipeline(
        stops=[],
        chat=True,
        thinking=False,
        calls=OfferedCalls(calls, Tools({"write": SCHEMA})),
    )
    tokens = tokenizer.token_ids(spelled, special=False)
    parts = [part for token in tokens for part in stage.feed([token])] + stage.flush()
    [opened] = [part for part in parts if isinstance(part, ToolOpened)]
    assert opened.name == "write"
    arguments = "".join(part.text for part in parts if isinstance(part, ToolArguments))
    assert json.loads(arguments) == ARGUMENTS
    assert all(isinstance(part, ToolOpened | ToolArguments) for part in parts)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3"])
def test_a_call_in_the_history_is_written_as_the_model_writes_it(name: str) -> None:
    """The template's own text of it is read as the same call."""
    tokenizer = tokenizer_of(name)
    calls = tokenizer.formats.calls
    assert calls is not None
    asked = ChatMessage(role="user", content="one")
    past = PastCall("write", ARGUMENTS, "call_1")
    result = ChatMessage(role="tool", content="two", call_id="call_1")
    chat = [asked, ChatMessage(role="assistant", content="", calls=[past]), result]
    answer, whole = (
        plan(GenerationSpec(prompt=ChatPrompt(messages=messages)), tokenizer).prompts[0].text
        for messages in (
            [asked],
            [*chat, ChatMessage(role="tool", content="two", call_id="call_1")],
        )
    )
    assert whole.startswith(answer)
    frame = tokenizer.formats.thoughts.frame(SPELLED, thinking=False)
    stage = AnswerReader(frame, SPELLED, OfferedCalls(calls, Tools({"write": SCHEMA})))
    parts = stage.feed(whole.removeprefix(answer).partition("two")[0])
    assert [part.name for part in parts if isinstance(part, ToolOpened)] == ["write"]
    arguments = "".join(part.text for part in parts if isinstance(part, ToolArguments))
    assert json.loads(arguments) == ARGUMENTS
