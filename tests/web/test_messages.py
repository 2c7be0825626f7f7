"""Anthropic's API over HTTP: recorded requests, usage, caching, errors."""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import mlxsrv
from mlxsrv.wire.anthropic.blocks import read_chat
from tests.support.anthropic_streams import check_type, hear
from tests.support.client import Body
from tests.support.effort import often
from tests.support.scripted import AFTER_TOOL, cut, write_conversation, write_scripted

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
VERSION = {"anthropic-version": "2023-06-01"}
RECORDED = Path(__file__).parents[1] / "support" / "recorded"

TOOL: Body = {
    "name": "get_weather",
    "description": "Weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
THOUGHT = "<think>\nParis, then.\n</think>\n\nYes"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("messages")
    scripts = {AFTER_TOOL: "It is sunny there.", "true": f"I will look.\n{CALL}"}
    models = {
        "agent": write_conversation(folder / "agent", scripts, max_position_embeddings=10**5),
        "cut": write_scripted(folder / "cut", cut(f"So: {CALL}", 3)),
        "wrong": write_scripted(
            folder / "wrong", cut(CALL.replace('{"city": "Paris"}', '{"city": Paris}'), 3)
        ),
        "thinks": write_scripted(folder / "thinks", cut(THOUGHT, 4)),
    }
    settings = mlxsrv.Settings(
        model=("demo", *(f"{name}={path}" for name, path in models.items())), hf_cache=False
    )
    with TestClient(mlxsrv.create_app(settings)) as client:
        client.headers.update(VERSION)
        yield client


def asking(content: Any = "What is the weather in Paris?", /, **fields: Any) -> Body:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "max_tokens": 100, "messages": messages, "temperature": 0, **fields}


def ask(client: TestClient, body: Body) -> Body:
    response = client.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    check_type(response.json(), "Message")
    return dict(response.json())


def stream(client: TestClient, body: Body) -> Body:
    """The message of a stream, with the text of calls in `partial`."""
    response = client.post(MESSAGES, json=body | {"stream": True})
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8", response.text
    assert response.headers["request-id"]
    heard = hear(response.content)
    assert heard.state == "over"
    return heard.message


def refused(client: TestClient, body: Body, status: int, kind: str, path: str = MESSAGES) -> Body:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    answer = response.json()
    check_type(answer, "ErrorResponse")
    assert answer["request_id"] == response.headers["request-id"]
    assert answer["error"]["type"] == kind
    return dict(answer["error"])


def kinds(message: Body) -> list[str]:
    return [block["type"] for block in message["content"]]


# What clients send.


def recorded() -> list[Any]:
    requests = []
    for file in sorted(RECORDED.glob("anthropic*.jsonl")):
        for number, line in enumerate(file.read_text("utf-8").splitlines()):
            request = json.loads(line)
            name = f"{file.stem}-{number}-{request['label']}"
            requests.append(pytest.param(request, id=name))
    return requests


REFUSED = {"image": 400, "batches": 404}


@pytest.mark.parametrize("request_", recorded())
def test_recorded_requests_are_answered(client: TestClient, request_: Body) -> None:
    headers = {name: text for name, text in request_["headers"].items() if text != "..."}
    body = request_["body"]
    if body and "max_tokens" in body and "thinking" not in body:
        body = body | {"max_tokens": min(body["max_tokens"], 6)}  # a long answer shows no more
    response = client.request(
        request_["method"], request_["path"], json=body, headers=VERSION | headers
    )
    expected = REFUSED.get(request_["label"], 200)
    if body and "previous_message_id" in body.get("thread", ()):
        expected = 404
        assert response.json()["error"]["details"]["error_code"] == "thread_not_found"
    assert response.status_code == expected, response.text
    assert response.headers["request-id"]
    if expected != 200:
        check_type(response.json(), "ErrorResponse")
    elif body and body.get("stream"):
        assert hear(response.content).state == "over"
    elif request_["path"].startswith(MESSAGES):
        counts = request_["label"] == "count-tokens"
        check_type(response.json(), "MessageTokensCount" if counts else "Message")
    else:
        listed = response.json()
        for model in listed.get("data", [listed]):
            check_type(model, "ModelInfo")


def test_without_the_header_the_models_are_openais(client: TestClient) -> None:
    del client.headers["anthropic-version"]
    try:
        assert client.get("/v1/models").json()["object"] == "list"
        assert client.get("/v1/models/demo").json()["object"] == "model"
        assert client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"
    finally:
        client.headers.update(VERSION)


# Answers.


def test_a_stream_says_what_the_whole_says(client: TestClient) -> None:
    for body in (
        asking("What is mlxsrv?"),
        asking("What is mlxsrv?", thinking={"type": "enabled", "budget_tokens": 1024}),
        asking(tools=[TOOL]),
        asking("What is mlxsrv?", stop_sequences=["server"]),
        asking(model="thinks"),
    ):
        whole, streamed = ask(client, body), stream(client, body)
        for block in streamed["content"]:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block.pop("partial"))
        for one in (whole, streamed):
            for block in one["content"]:
                block.pop("id", None)
        assert streamed["content"] == whole["content"] != []
        assert streamed["stop_reason"] == whole["stop_reason"]
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_a_tool_is_called_and_its_result_read(client: TestClient) -> None:
    body = asking(model="agent", tools=[TOOL])
    message = ask(client, body)
    assert kinds(message) == ["text", "tool_use"]
    assert message["stop_reason"] == "tool_use"
    use = message["content"][1]
    assert (use["name"], use["input"]) == ("get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny"}
    body["messages"] += [
        {"role": "assistant", "content": message["content"]},
        {"role": "user", "content": [result]},
    ]
    assert ask(client, body)["content"] == [{"type": "text", "text": "It is sunny there."}]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_that_is_cut_off_is_none(client: TestClient, streamed: bool) -> None:
    for limit in (8, 16, 20):
        body = asking(model="cut", tools=[TOOL], max_tokens=limit)
        message = (stream if streamed else ask)(client, body)
        assert message["stop_reason"] == "max_tokens"
        if not streamed:
            assert {*kinds(message)} == {"text"}
            assert "<tool_call>" in "".join(block["text"] for block in message["content"])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_whose_arguments_are_no_json_is_none(client: TestClient, streamed: bool) -> None:
    message = (stream if streamed else ask)(client, asking(model="wrong", tools=[TOOL]))
    assert message["stop_reason"] == "end_turn"
    if not streamed:
        [block] = message["content"]
        assert block["type"] == "text"
        assert '{"city": Paris}' in block["text"]


def test_the_bound_may_be_more_than_the_context(client: TestClient) -> None:
    assert ask(client, asking("hello", max_tokens=64_000))["stop_reason"] == "end_turn"


def test_a_bound_of_nothing_reads_the_prompt_for_later(client: TestClient) -> None:
    body = asking("Tell me of the sea. " * 20, max_tokens=0)
    nothing = ask(client, body)
    assert (nothing["content"], nothing["stop_reason"]) == ([], "max_tokens")
    usage = ask(client, body | {"max_tokens": 4})["usage"]
    assert usage["cache_read_input_tokens"] >= _prompt(nothing["usage"]) - 1


@pytest.mark.parametrize("path", often([MESSAGES, COUNT], [MESSAGES]))
def test_no_garbage_is_looked_for_while_many_calls_are_read(client: TestClient, path: str) -> None:
    seen = []

    def see(phase: str, info: dict[str, int]) -> None:
        frame = inspect.currentframe()
        while (frame := frame and frame.f_back) is not None:
            if frame.f_code is read_chat.__code__:
                seen.append(phase)

    call = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
    messages = [{"role": "assistant", "content": [call] * 5000}] * 5
    gc.callbacks.append(see)
    try:
        client.post(path, json={"model": "demo", "max_tokens": 1, "messages": messages})
    finally:
        gc.callbacks.remove(see)
    assert not seen


def test_tools_of_anthropics_are_left_out(client: TestClient) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    alone = client.post(MESSAGES, json=asking(tools=[TOOL])).json()["usage"]
    response = client.post(MESSAGES, json=asking(tools=[search, TOOL]))
    assert response.headers["x-ignored-params"] == "tools[0]"
    usage = response.json()["usage"]
    assert _prompt(usage) == _prompt(alone)


def _prompt(usage: Mapping[str, int]) -> int:
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage[name] for name in names)


# The prompt.


def test_a_count_is_that_of_the_usage(client: TestClient) -> None:
    for body in (
        asking(max_tokens=1),
        asking(tools=[TOOL], max_tokens=1),
        asking(tools=[TOOL], tool_choice={"type": "none"}, system="Be brief."),
        asking([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        asking(thinking={"type": "enabled", "budget_tokens": 1024}),
    ):
        count = client.post(COUNT, json={**body, "max_tokens": None})
        assert count.status_code == 200, count.text
        check_type(count.json(), "MessageTokensCount")
        assert count.json()["input_tokens"] == _prompt(ask(client, body)["usage"])


def test_the_second_turn_of_an_agent_reads_only_what_is_new(client: TestClient) -> None:
    """As Claude Code asks: 20,000 tokens of instructions and tools, of which marks of the cache and
    a line of the header change with each request."""
    tools = [
        {**TOOL, "name": f"tool_{i}", "description": f"Tool {i}. " + "It does things. " * 20}
        for i in range(40)
    ]
    instructions = "You are an agent. Follow the rules of the house. " * 60

    def turn(number: int, messages: list[Body]) -> Body:
        billing = f"x-anthropic-billing-header: cc_version=2.1; cch={number:05}"
        marked = [dict(tool) for tool in [*tools, TOOL]]
        marked[-1 - number]["cache_control"] = {"type": "ephemeral"}
        body = asking(model="agent", tools=marked, max_tokens=32_000) | {"messages": messages}
        body["system"] = [{"type": "text", "text": text} for text in (billing, instructions)]
        return body

    messages: list[Body] = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = ask(client, turn(0, messages))
    size = _prompt(first["usage"])
    assert size > 20_000
    assert first["usage"]["cache_read_input_tokens"] == 0
    use = first["content"][-1]
    mark = {"cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "sunny", **mark}
    messages += [
        {"role": "assistant", "content": first["content"]},
        {"role": "user", "content": [result]},
    ]
    second = stream(client, turn(1, messages))
    assert second["content"] == [{"type": "text", "text": "It is sunny there."}]
    assert second["usage"]["cache_read_input_tokens"] >= size - 1
    assert second["usage"]["input_tokens"] < 200


# Errors.


def test_a_prompt_that_is_too_long_is_told_in_the_words_that_agents_know(
    client: TestClient,
) -> None:
    for words in (5_000, 200_000):
        body = asking("word " * words)
        error = refused(client, body, 400, "invalid_request_error")
        parts = error["message"].split()
        assert error["message"] == f"prompt is too long: {parts[4]} tokens > 4096 maximum"
        assert int(parts[4]) > 4096
        assert error["details"] == {"error_code": "context_length_exceeded"}
    assert client.post(COUNT, json=asking("word " * 5_000)).json()["input_tokens"] > 4096


@pytest.mark.parametrize(
    ("body", "status", "kind", "told"),
    [
        (asking(model="none"), 404, "not_found_error", "none"),
        ({"max_tokens": 5}, 400, "invalid_request_error", "messages"),
        (asking([{"type": "image", "source": {}}]), 400, "invalid_request_error", "content[0]"),
        (asking(max_tokens=-1), 400, "invalid_request_error", "max_tokens"),
        (asking(stream=True, model="none"), 404, "not_found_error", "none"),
    ],
)
def test_refusals(client: TestClient, body: Body, status: int, kind: str, told: str) -> None:
    assert told in refused(client, body, status, kind)["message"]


def test_a_route_that_is_not_there_is_refused_in_the_clients_dialect(client: TestClient) -> None:
    refused(client, {}, 404, "not_found_error", path="/v1/messages/batches")
    assert client.get(MESSAGES).json()["error"]["type"] == "invalid_request_error"
