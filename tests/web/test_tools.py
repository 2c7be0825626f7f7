"""Tools: calls that the demo model makes, and those that a model may make, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.client import (
    CHAT,
    Body,
    RawClient,
    Streamed,
    ask,
    chat,
    check_schema,
    put_together,
    refused,
    stream,
)
from tests.support.effort import often
from tests.support.scripted import cut, write_scripted
from tests.support.serving import Server, serving
from tests.support.tiny import CHAT_TEMPLATE


def tool(name: str, does: str, **properties: str) -> Body:
    parameters = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": [*properties],
    }
    function = {"name": name, "description": does, "parameters": parameters}
    return {"type": "function", "function": function}


WEATHER = tool("get_weather", "Get the current weather in a city", city="string")
ADD = tool("add", "Add two numbers", a="integer", b="integer")
TOOLS = [WEATHER, ADD]
QUESTION = "What is the weather in Paris?"
PARIS = {"city": "Paris"}
LONG = {"city": "Paris", "days": 3, "unit": "celsius", "note": "Žluťoučký </b> 🚀 \\ \n ok"}

MARKERS = re.compile(r"</?tool_call>|</?think>|<function=|<\|im_|\ufffd")


def call(name: str, arguments: Any) -> str:
    return f'{{"name": {json.dumps(name)}, "arguments": {json.dumps(arguments)}}}'


def marked(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in calls)


# As Qwen's coder models have it: no JSON, so it is read once it is over.
CODER = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
CODER_TEMPLATE = CHAT_TEMPLATE.replace("\n<tool_call>\n{", "\n<tool_call>\n<function=f>{")

NAMELESS = '{"tool": "get_weather", "arguments": {"city": "Paris"}}'

SCRIPTS: dict[str, tuple[str, int]] = {
    "one": (marked(call("get_weather", LONG)), 3),
    "two": ("I will look.\n\n" + marked(call("get_weather", PARIS), call("add", {"a": 1})), 2),
    "thinks": ("<think>\nParis, then.\n</think>\n\n" + marked(call("get_weather", PARIS)), 4),
    "coder": (CODER + "</tool_call>", 3),
    "bare": (marked('{"name": "now"}'), 3),
    "nameless": (f"So: {marked(NAMELESS)} and on", 4),
}
"""The text that a model of this name writes, and how many bytes each of its tokens has."""


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo model, of models that say SCRIPTS, of one that begins a
    call, of one whose markers are tokens, and of three that know no tools."""
    folder = tmp_path_factory.mktemp("tools")
    models = {
        name: write_scripted(
            folder / name,
            cut(text, size),
            template=CODER_TEMPLATE if name == "coder" else CHAT_TEMPLATE,
        )
        for name, (text, size) in SCRIPTS.items()
    }
    begun, _, _ = marked(call("get_weather", PARIS)).partition("ris")
    models["endless"] = write_scripted(
        folder / "endless", cut(begun, 3), max_position_embeddings=1_000_000
    )
    marks = ["Hm:", "<tool_call>", call("get_weather", PARIS), "</tool_call>"]
    models |= {"marks": write_scripted(folder / "marks", marks), **_without_tools(folder)}
    arguments = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    with serving(folder, *arguments) as server:
        yield server


def _without_tools(folder: Path) -> dict[str, Path]:
    turns = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    templates = {
        "knows none": turns,
        "calls strangely": "{% if tools %}{{ tools | tojson }}{% endif %}" + turns,
        "base": None,
    }
    return {
        name: write_scripted(folder / name, ["Hello"], template=template)
        for name, template in templates.items()
    }


@pytest.fixture(scope="module")
def client(calling: Server) -> Iterator[httpx.Client]:
    with calling.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(calling: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def asking(text: str = QUESTION, **fields: Any) -> Body:
    return chat(text, **{"model": "demo", "tools": TOOLS, "max_tokens": 200, **fields})


def the_choice(body: Body) -> Body:
    [choice] = body["choices"]
    return dict(choice)


def calls(message: Body) -> list[tuple[str, Any]]:
    """Name and arguments of each call of a message, or of a stream put together."""
    return [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", [])
    ]


# The demo model's calls.


def test_a_call_has_openais_shape(client: httpx.Client) -> None:
    body = ask(client, asking())
    check_schema(body, "CreateChatCompletionResponse")
    choice = the_choice(body)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    [made] = choice["message"]["tool_calls"]
    assert made.keys() == {"id", "type", "function"}
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", made["id"])
    assert made["type"] == "function"
    assert calls(choice["message"]) == [("get_weather", PARIS)]


def test_a_call_is_streamed_name_first(client: httpx.Client) -> None:
    streamed = stream(client, asking())
    for chunk in streamed.chunks:
        known = {key: value for key, value in chunk.items() if key != "usage"}
        check_schema(known, "CreateChatCompletionStreamResponse")
    assert streamed.finish_reason == "tool_calls"
    assert streamed.content == ""
    first, *deltas, last, _ = (chunk["choices"][0]["delta"] for chunk in streamed.chunks)
    assert first == {"role": "assistant", "content": ""}
    assert last == {}
    [head] = deltas[0]["tool_calls"]
    assert re.fullmatch(r"call_[A-Za-z0-9]{24}", head["id"])
    assert head["function"] == {"name": "get_weather", "arguments": ""}
    assert all(delta.keys() == {"tool_calls"} for delta in deltas)
    assert calls(put_together(streamed)) == [("get_weather", PARIS)]
    assert (
        streamed.usage["completion_tokens"] == ask(client, asking())["usage"]["completion_tokens"]
    )


def test_calls_have_ids_of_their_own(client: httpx.Client) -> None:
    body = ask(client, asking(n=3))
    made = [choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]]
    assert len({*made}) == 3
    assert [choice["finish_reason"] for choice in body["choices"]] == ["tool_calls"] * 3


def test_choices_stream_their_calls_side_by_side(client: httpx.Client) -> None:
    streamed = stream(client, asking(n=2))
    for index in range(2):
        mine = [
            chunk | {"choices": [choice]}
            for chunk in streamed.chunks
            for choice in chunk["choices"]
            if choice["index"] == index
        ]
        alone = Streamed(200, {}, mine, 0)
        assert calls(put_together(alone)) == [("get_weather", PARIS)]
        assert alone.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("question", "name", "arguments", "thinking"),
    [
        (QUESTION, "get_weather", PARIS, False),
        (QUESTION, "get_weather", PARIS, True),
        ("What is 12 plus 30?", "add", {"a": 12, "b": 30}, False),
    ],
)
def test_the_sdk_puts_a_streamed_call_together(
    sdk: openai.OpenAI, question: str, name: str, arguments: Any, thinking: bool
) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": question}],
        "tools": TOOLS,
        "max_tokens": 200,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinking}},
    }
    whole = sdk.chat.completions.create(**asked).choices[0]
    with sdk.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        final = events.current_completion_snapshot.choices[0]
    assert final.finish_reason == whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert not final.message.content
    [streamed], [complete] = final.message.tool_calls or [], whole.message.tool_calls or []
    assert complete.type == "function"
    assert streamed.function.name == complete.function.name == name
    assert streamed.function.arguments == complete.function.arguments
    assert json.loads(complete.function.arguments) == arguments
    thoughts = (whole.message.model_extra or {}).get("reasoning_content")
    assert bool(thoughts) == thinking
    assert (final.message.model_extra or {}).get("reasoning_content") == thoughts


def test_no_call_is_made_where_none_is_needed(client: httpx.Client) -> None:
    choice = the_choice(ask(client, asking("What is mlxsrv?")))
    assert choice["finish_reason"] == "stop"
    assert "lean, streaming-first" in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]
    assert stream(client, asking("What is mlxsrv?")).content == choice["message"]["content"]


@pytest.mark.parametrize("result", ["sunny, 21 °C", '{"temp": 25}'])
def test_the_result_of_a_call_is_answered_in_text(client: httpx.Client, result: str) -> None:
    first = the_choice(ask(client, asking()))["message"]
    told = {"role": "tool", "tool_call_id": first["tool_calls"][0]["id"], "content": result}
    messages = [{"role": "user", "content": QUESTION}, first, told]
    choice = the_choice(ask(client, asking(messages=messages)))
    assert choice["finish_reason"] == "stop"
    assert result in choice["message"]["content"]
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("choice", [None, "auto"])
def test_the_model_chooses_by_default(client: httpx.Client, choice: str | None) -> None:
    message = the_choice(ask(client, asking(tool_choice=choice)))["message"]
    assert calls(message) == [("get_weather", PARIS)]


@pytest.mark.parametrize(
    "none",
    often(
        [{"tool_choice": "none"}, {"tools": []}, {"tools": None}],
        [{"tool_choice": "none"}, {"tools": []}],
    ),
)
def test_tools_that_may_not_be_called_are_not_offered(client: httpx.Client, none: Body) -> None:
    without = ask(client, chat(QUESTION, model="demo", max_tokens=200))
    body = ask(client, asking(**none))
    assert body["choices"] == without["choices"]
    assert the_choice(body)["finish_reason"] == "stop"
    assert "tool_calls" not in the_choice(body)["message"]
    assert body["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]
    assert body["usage"]["prompt_tokens"] < ask(client, asking())["usage"]["prompt_tokens"]


# Calls of any model.


@pytest.mark.parametrize(
    ("model", "content", "expected"),
    [
        ("one", None, [("get_weather", LONG)]),
        ("two", "I will look.", [("get_weather", PARIS), ("add", {"a": 1})]),
        ("thinks", None, [("get_weather", PARIS)]),
        ("coder", None, [("get_weather", PARIS)]),
        ("bare", None, [("now", {})]),
    ],
)
def test_calls_in_any_pieces(
    client: httpx.Client, model: str, content: str | None, expected: list[tuple[str, Any]]
) -> None:
    body = ask(client, asking(model=model))
    check_schema(body, "CreateChatCompletionResponse")
    choice = the_choice(body)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == content
    assert calls(choice["message"]) == expected
    streamed = stream(client, asking(model=model))
    together = put_together(streamed)
    assert streamed.finish_reason == "tool_calls"
    assert together["content"] == (content or "")
    assert together["reasoning"] == choice["message"].get("reasoning", "")
    assert [call["function"] for call in together["tool_calls"]] == [
        call["function"] for call in choice["message"]["tool_calls"]
    ]
    assert streamed.usage == body["usage"] | {
        "prompt_tokens_details": streamed.usage["prompt_tokens_details"]
    }


def test_arguments_are_streamed_while_they_are_written(
    calling: Server, client: httpx.Client
) -> None:
    """The call never ends, so none of them waits for its end."""
    [end] = ask(client, {"model": "endless", "prompt": "<|im_end|>"}, "/tokenize")["tokens"]
    never: Body = {"max_tokens": 900_000, "logit_bias": {str(end): -100}}
    with RawClient(calling, asking(model="endless", stream=True, **never)) as raw:
        raw.until(rb'(?s)("arguments":"!.*){3}')
        pieces = re.findall(rb'"arguments":("(?:[^"\\]|\\.)*")', raw.data)
    assert "".join(map(json.loads, pieces)).startswith('{"city": "Pa!')


def test_a_call_that_is_made_again_ends_an_answer_that_must_call(client: httpx.Client) -> None:
    told = client.post("/tokenize", json={"model": "marks", "content": "<|im_end|>"})
    [end] = told.json()["tokens"]  # without it the model calls for ever
    body = asking(model="marks", tool_choice="required", logit_bias={str(end): -100})
    choice, streamed = the_choice(ask(client, body)), stream(client, body)
    [call] = calls(choice["message"])
    assert calls(put_together(streamed)) == [call]
    assert choice["finish_reason"] == streamed.finish_reason == "tool_calls"


def test_without_parallel_calls_the_first_ends_the_answer(client: httpx.Client) -> None:
    asked = asking(model="two", parallel_tool_calls=False)
    body, streamed = ask(client, asked), stream(client, asked)
    for message, reason in (
        (the_choice(body)["message"], the_choice(body)["finish_reason"]),
        (put_together(streamed), streamed.finish_reason),
    ):
        assert calls(message) == [("get_weather", PARIS)]
        assert message["content"] == "I will look."
        assert reason == "tool_calls"
    usage = ask(client, asking(model="two"))["usage"]
    assert body["usage"]["completion_tokens"] == streamed.usage["completion_tokens"]
    assert body["usage"]["completion_tokens"] < usage["completion_tokens"]


@pytest.mark.parametrize(
    ("model", "step"),
    often([("two", 3), ("one", 1), ("two", 1), ("thinks", 1), ("coder", 1)], [("two", 3)]),
)
def test_an_answer_cut_at_any_token_has_the_call_as_far_as_it_came(
    client: httpx.Client, model: str, step: int
) -> None:
    full = ask(client, asking(model=model))
    made = [one["function"] for one in the_choice(full)["message"]["tool_calls"]]
    counts = set()
    bodies = [
        asking(model=model, max_tokens=limit)
        for limit in range(1, full["usage"]["completion_tokens"], step)
    ]
    with ThreadPoolExecutor(8) as threads:  # rows in one batch take the time of one
        cut = [threads.submit(ask, client, body) for body in bodies]
        streams = [threads.submit(stream, client, body) for body in bodies]
    for whole, streaming in zip(cut, streams, strict=True):
        choice, streamed = the_choice(whole.result()), streaming.result()
        message = choice["message"]
        begun = [one["function"] for one in message.get("tool_calls", [])]
        assert choice["finish_reason"] == "length"
        for one, uncut in zip(begun, made, strict=False):
            assert one["name"] == uncut["name"]
            assert uncut["arguments"].startswith(one["arguments"])
        assert begun[:-1] == made[: len(begun)][:-1]
        assert (message["content"] is None) <= bool(begun)
        counts.add(len(begun))
        together = put_together(streamed)
        assert streamed.finish_reason == "length"
        assert streamed.content == (message["content"] or "")
        assert [one["function"] for one in together["tool_calls"]] == begun
    assert counts == {*range(len(made) + 1)}


@pytest.mark.parametrize(("model", "limit"), [("one", 2), ("thinks", 1)])  # "<tool_", "<thi"
def test_an_answer_cut_within_a_marker_shows_no_piece_of_it(
    client: httpx.Client, model: str, limit: int
) -> None:
    asked = asking(model=model, max_tokens=limit)
    assert the_choice(ask(client, asked))["message"]["content"] == ""
    assert stream(client, asked).content == ""


def test_what_is_no_call_is_text(client: httpx.Client) -> None:
    choice = the_choice(ask(client, asking(model="nameless")))
    streamed = stream(client, asking(model="nameless"))
    assert choice["finish_reason"] == streamed.finish_reason == "stop"
    assert choice["message"]["content"] == streamed.content
    assert re.fullmatch(rf"So: .*{re.escape(NAMELESS)}.* and on", streamed.content, re.DOTALL)
    assert "tool_calls" not in choice["message"]
    assert put_together(streamed)["tool_calls"] == []


@pytest.mark.parametrize("model", ["one", "two", "thinks", "coder", "bare"])
def test_markers_are_never_in_the_text(client: httpx.Client, model: str) -> None:
    streamed = stream(client, asking(model=model))
    message = the_choice(ask(client, asking(model=model)))["message"]
    texts = [streamed.content, streamed.reasoning, message["content"], message.get("reasoning")]
    assert not MARKERS.search("".join(text or "" for text in texts))


def test_without_tools_there_are_no_calls_and_no_markers(client: httpx.Client) -> None:
    whole = the_choice(ask(client, asking(model="marks", tools=None)))
    streamed = stream(client, asking(model="marks", tools=None))
    assert whole["message"]["content"] == streamed.content == f"Hm:{call('get_weather', PARIS)}"
    assert whole["finish_reason"] == streamed.finish_reason == "stop"
    with_tools = the_choice(ask(client, asking(model="marks")))["message"]
    assert (with_tools["content"], calls(with_tools)) == ("Hm:", [("get_weather", PARIS)])


@pytest.mark.parametrize("stop", ["Paris", "city", "</tool_call>", "look"])
def test_stop_strings_are_for_the_text_and_not_for_calls(client: httpx.Client, stop: str) -> None:
    choice = the_choice(ask(client, asking(model="two", stop=[stop])))
    if stop == "look":
        assert choice["message"]["content"] == "I will "
        assert choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
    else:
        assert len(calls(choice["message"])) == 2
        assert choice["finish_reason"] == "tool_calls"


# Refusals.


@pytest.mark.parametrize("model", ["knows none", "calls strangely"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_model_without_tools_says_so(client: httpx.Client, model: str, streaming: bool) -> None:
    headers = {"Accept": "application/json"}
    response = client.post(CHAT, json=asking(model=model, stream=streaming), headers=headers)
    refused(response, 400, "unsupported_parameter", param="tools")
    nothing: list[Body] = [{"tools": None}, {"tools": []}, {"tool_choice": "none"}]
    for none in nothing:
        assert client.post(CHAT, json=asking(model=model, **none)).status_code == 200


@pytest.mark.parametrize(
    "arguments",
    [
        *("{}", "", '{"city": "Paris", "n": [1, {"a": null}]}', {"city": "Paris"}),
        *("{", "[]", "5", '"x"', "{'city': 'Paris'}", "null"),
    ],
)
def test_a_call_in_the_history_is_read(client: httpx.Client, arguments: Any) -> None:
    """Also one whose arguments are no JSON object: the server itself sends such calls."""
    made = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "1", "content": "21"},
    ]
    assert client.post(CHAT, json=asking(messages=messages)).status_code == 200
