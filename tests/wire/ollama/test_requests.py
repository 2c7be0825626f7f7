"""Requests of Ollama's API: what they ask for, and what is wrong with them."""

from __future__ import annotations

import json
from math import inf
from typing import Any

import msgspec
import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.generation.spec import (
    ChatMessage,
    ChatPrompt,
    GenerationSpec,
    JSONForm,
    PastCall,
    TextPrompts,
)
from mlxsrv.wire.ollama.requests import (
    OLLAMA_CHATS,
    OLLAMA_TEXTS,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from tests.support.ollama import RECORDED

Body = dict[str, Any]
HELLO = [{"role": "user", "content": "Hello"}]


def read_chat(body: Body) -> tuple[OllamaChatRequest, list[str]]:
    return OLLAMA_CHATS.decode(msgspec.json.encode(body))


def chat_spec(**fields: Any) -> GenerationSpec:
    return read_chat({"model": "m", "messages": HELLO, **fields})[0].spec()


def chat_prompt(**fields: Any) -> ChatPrompt:
    prompt = chat_spec(**fields).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


def read_text(body: Body) -> tuple[OllamaGenerateRequest, list[str]]:
    return OLLAMA_TEXTS.decode(msgspec.json.encode({"model": "m", **body}))


def text_spec(**fields: Any) -> GenerationSpec:
    return read_text(fields)[0].spec()


# Chats.

CHATS = [label for label, each in RECORDED.items() if each.path == "/api/chat"]


@pytest.mark.parametrize("label", CHATS)
def test_what_the_client_sends_is_read_whole(label: str) -> None:
    request, ignored = read_chat(RECORDED[label].body or {})
    assert ignored == []
    if label == "chat-image":
        with pytest.raises(InvalidRequest, match=r"^messages\[0\].images: ") as caught:
            request.spec()
        assert caught.value.param == "messages[0].images"
        return
    spec = request.spec()
    assert spec.model == "demo"
    assert spec.streamed == (label in ("chat-stream", "chat-tools-stream"))
    assert spec.timed


def test_a_chat_streams_unless_it_says_otherwise() -> None:
    assert chat_spec().streamed
    assert chat_spec(stream=None).streamed
    assert not chat_spec(stream=False).streamed


def test_options_are_sampling_stops_and_limits() -> None:
    spec = read_chat(RECORDED["chat-options"].body or {})[0].spec()
    wishes = spec.sampling
    assert (wishes.temperature, wishes.top_k, wishes.top_p, wishes.min_p) == (0.5, 5, 0.9, 0.1)
    assert (wishes.presence_penalty, wishes.frequency_penalty) == (0.1, 0.1)
    assert (wishes.seed, wishes.repetition_penalty) == (1, 1.1)
    assert (spec.limit, spec.context, spec.stops, spec.keep_alive) == (10, 2048, ["x"], 300)


@pytest.mark.parametrize(("given", "limit"), [(None, None), (5, 5), (0, 2**31 - 1)])
def test_num_predict_is_the_limit(given: int | None, limit: int | None) -> None:
    assert chat_spec(options={"num_predict": given}).limit == limit


@pytest.mark.parametrize("given", [-1, -2])
def test_a_negative_num_predict_is_as_much_as_fits(given: int) -> None:
    assert chat_spec(options={"num_predict": given}).limit == 2**31 - 1


def test_values_that_say_nothing_ask_for_nothing() -> None:
    spec = chat_spec(
        format="", tools=[], keep_alive="", options={"seed": -1, "num_ctx": 0, "stop": [""]}
    )
    assert (spec.form, spec.keep_alive, spec.sampling.seed) == (None, None, None)
    assert (spec.context, spec.stops) == (None, [])


def test_what_is_not_known_is_ignored_by_name() -> None:
    body = {"model": "m", "messages": HELLO, "options": {"mirostat": 1, "num_gpu": 2}, "top": 1}
    assert read_chat(body)[1] == ["options.mirostat", "options.num_gpu", "top"]
    assert read_chat({"model": "m", "messages": HELLO, "top_logprobs": 2})[1] == ["top_logprobs"]


def test_messages_keep_calls_results_and_thoughts() -> None:
    body = RECORDED["chat-tool-result"].body or {}
    prompt = read_chat(body)[0].spec().prompt
    assert isinstance(prompt, ChatPrompt)
    _, called, result = prompt.messages
    assert called.calls == [PastCall("get_weather", {"city": "Paris"})]
    assert result == ChatMessage(role="tool", content="sunny", name="get_weather", calls=[])
    assert [tool.name for tool in prompt.tools] == ["get_weather"]
    thought = [{"role": "assistant", "content": "a", "thinking": "b"}, *HELLO]
    assert chat_prompt(messages=thought).messages[0].reasoning == "b"


def test_a_last_message_of_the_assistant_is_continued() -> None:
    begun = {"role": "assistant", "content": "Once"}
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert chat_prompt(messages=[*HELLO, begun]).continues
    for last in (HELLO[0], called, {"role": "assistant", "content": ""}):
        assert not chat_prompt(messages=[*HELLO, last]).continues


@pytest.mark.parametrize(
    ("think", "thinking", "effort"),
    [
        (None, None, None),
        (True, True, None),
        (False, False, None),
        ("low", True, "low"),
        ("max", True, "max"),
        ("none", False, "none"),
        ("much", True, "much"),
    ],
)
def test_think_is_thinking_and_effort(
    think: object, thinking: bool | None, effort: str | None
) -> None:
    prompt = chat_prompt(think=think)
    assert (prompt.thinking, prompt.effort) == (thinking, effort)


def test_a_format_is_json_or_a_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert chat_spec(format="json").form == JSONForm("format", {"type": "object"})
    assert chat_spec(format=schema).form == JSONForm("format", schema)


def test_log_probabilities_are_asked_for() -> None:
    assert chat_spec(logprobs=True).logprobs == 0
    assert chat_spec(logprobs=True, top_logprobs=3).logprobs == 3
    assert chat_spec().logprobs is None


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((0, 0), (7, 7), (1.5, 1.5), (-1, inf), ("-1", inf), ("0", 0), ("90", 90)),
        *(
            ("5m", 300),
            ("1h30m", 5400),
            ("1.5h", 5400),
            ("300ms", 0.3),
            ("-1m", inf),
            ("24h", 86400),
        ),
    ],
)
def test_keep_alive_is_seconds_or_a_duration(given: float | str, seconds: float) -> None:
    assert chat_spec(keep_alive=given).keep_alive == pytest.approx(seconds)


WRONG = [
    ({"messages": HELLO}, "model"),
    ({"model": ""}, "model"),
    ({"model": "m", "messages": [{"role": "bot"}]}, "messages[0].role"),
    ({"model": "m", "messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
    ({"model": "m", "format": "yaml"}, "format"),
    ({"model": "m", "think": 1}, "think"),
    ({"model": "m", "options": {"temperature": "hot"}}, "options.temperature"),
    ({"model": "m", "options": {"num_predict": -3}}, "options.num_predict"),
    ({"model": "m", "options": []}, "options"),
    ({"model": "m", "top_logprobs": 21}, "top_logprobs"),
    ({"model": "m", "tools": [{"type": "web", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"model": "m", "tools": [{"type": "function"}]}, "tools[0].function"),
    ({"model": "m", "profile": "a", "steering": {"1": 2}}, "steering"),
    *(({"model": "m", "keep_alive": text}, "keep_alive") for text in ("soon", "5 m", "5d", "--1")),
]


@pytest.mark.parametrize(("body", "param"), WRONG)
def test_a_wrong_value_is_refused_with_its_path(body: Body, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_chat(body)
    assert caught.value.param == param


# Texts.


def test_a_prompt_is_a_chat_of_its_own() -> None:
    prompt = text_spec(prompt="Hello", system="brief", think=True).prompt
    assert prompt == ChatPrompt(
        messages=[
            ChatMessage(role="system", content="brief"),
            ChatMessage(role="user", content="Hello"),
        ],
        thinking=True,
        plain="Hello",
    )


def test_a_raw_prompt_is_a_text() -> None:
    prompt = text_spec(prompt="Hello", raw=True).prompt
    assert prompt == TextPrompts(prompts=["Hello"], places=["prompt"])


def test_a_suffix_makes_a_gap_to_fill() -> None:
    request, ignored = read_text({"prompt": "a", "suffix": "c", "system": "s", "template": "t"})
    assert request.spec().prompt == TextPrompts(prompts=["a"], places=["prompt"], suffix="c")
    assert ignored == ["system", "template"]


def test_context_is_ignored_by_name() -> None:
    assert read_text({"prompt": "a", "context": [1, 2]})[1] == ["context"]


@pytest.mark.parametrize("fields", [{"system": "s"}, {"template": "t"}])
def test_a_raw_prompt_has_no_template(fields: Body) -> None:
    with pytest.raises(InvalidRequest, match="raw") as caught:
        read_text({"prompt": "a", "raw": True, **fields})
    assert caught.value.param in fields


def test_images_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^images: ") as caught:
        text_spec(prompt="a", images=["aGk="])
    assert caught.value.param == "images"


def test_nothing_to_answer_is_a_load() -> None:
    assert read_text({})[0].is_empty
    assert read_text({"system": "s"})[0].is_empty
    assert not read_text({"suffix": "s"})[0].is_empty
    assert read_chat({"model": "m"})[0].is_empty
    assert read_chat({"model": "m", "messages": []})[0].is_empty


def test_errors_of_later_stages_have_paths_of_this_dialect() -> None:
    assert text_spec(prompt="a").path("messages") == "prompt"
    assert text_spec(prompt="a").path("chat_template") == "template"
    assert chat_spec().path("context") == "options.num_ctx"
    assert chat_spec().path("tools") == "tools"


def test_images_of_old_turns_leave_a_note() -> None:
    picture = {"role": "user", "content": "Look", "images": ["aGk="]}
    for rest in ({"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Well?"}):
        body = {"model": "m", "messages": [picture, rest]}
        spec = OLLAMA_CHATS.decode(json.dumps(body).encode())[0].spec()
        assert isinstance(spec.prompt, ChatPrompt)
        note = "[image left out: this model reads text only]"
        assert spec.prompt.messages[0].content == f"Look\n\n{note}"
        assert spec.ignored == ["messages[0].images"]


@pytest.mark.parametrize("arguments", ['{"city": "Os', [1], None, {"city": "Oslo"}])
def test_arguments_of_any_kind_are_read(arguments: object) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}, turn]}
    spec = OLLAMA_CHATS.decode(json.dumps(body).encode())[0].spec()
    assert isinstance(spec.prompt, ChatPrompt)
    [read] = spec.prompt.messages[1].calls
    assert read.arguments in ('{"city": "Os', "[1]", {}, {"city": "Oslo"})
