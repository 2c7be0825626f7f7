"""The Responses API over HTTP: whole and streamed answers, the store, recorded requests."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.client import CHAT, Body, ask, chat, refused
from tests.support.scripted import AFTER_TOOL, cut, write_conversation, write_scripted
from tests.support.serving import Server, serving
from tests.support.tiny import CHAT_TEMPLATE, write_model
from tests.wire.responses.asking import FUNCTION, PATCH, check_response, read_events, short

RESPONSES = "/v1/responses"
RECORDED = Path(__file__).parent.parent / "support" / "recorded" / "codex.jsonl"
SHELL = json.dumps({"name": "exec_command", "arguments": {"cmd": "echo hi"}})
EDIT = json.dumps({"name": "apply_patch", "arguments": {"input": "*** Begin Patch\n+é"}})
THOUGHTS = "<think>\nParis, then.\n</think>\n\nIt rains."

SCRIPTS = {
    "thinks": THOUGHTS,
    "edits": f"I edit.\n\n<tool_call>\n{EDIT}\n</tool_call>",
    "nonsense": '<tool_call>\n{"name": "get_weather", "arguments": [1]}\n</tool_call>',
}

TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content or '' }}",
    "{{ message.reasoning_content or '' }}{{ message.content or '' }}",
)


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of the demo model, of models that say SCRIPTS, of one that calls a shell and reads
    what that returns, and of one that never ends."""
    folder = tmp_path_factory.mktemp("responses")
    models = {
        name: write_scripted(folder / name, cut(text, 4), template=TEMPLATE)
        for name, text in SCRIPTS.items()
    }
    models["shell"] = write_conversation(
        folder / "shell",
        {AFTER_TOOL: "It says hi.", "true": f"<tool_call>\n{SHELL}\n</tool_call>"},
        max_position_embeddings=32_768,
    )
    models["endless"] = write_model(folder / "endless", "qwen3", plain=True)
    named = [part for name, path in models.items() for part in ("--model", f"{name}={path}")]
    with serving(folder, *named, "--model", "demo", "--max-responses", "20") as server:
        yield server


@pytest.fixture(scope="module")
def client(talking: Server) -> Iterator[httpx.Client]:
    with talking.client() as client:
        yield client


@pytest.fixture(scope="module")
def sdk(talking: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{talking.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def asking(**fields: Any) -> Body:
    return {"model": "demo", "input": "What is mlxsrv?", "max_output_tokens": 60, **fields}


def answer(client: httpx.Client, **fields: Any) -> Body:
    response = ask(client, asking(**fields), RESPONSES)
    check_response(response)
    return response


def stream(client: httpx.Client, **fields: Any) -> list[Body]:
    response = client.post(RESPONSES, json=asking(stream=True, **fields))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return read_events(response.content)


def text_of(response: Body) -> str:
    return "".join(
        part["text"]
        for item in response["output"]
        if item["type"] == "message"
        for part in item["content"]
    )


def call_of(response: Body) -> Body:
    [call] = [item for item in response["output"] if item["type"].endswith("call")]
    return dict(call)


# Answers.


def test_it_says_what_a_chat_says(client: httpx.Client) -> None:
    whole = answer(client, temperature=0)
    same = ask(client, chat("What is mlxsrv?", model="demo", max_tokens=60, temperature=0), CHAT)
    assert text_of(whole) == same["choices"][0]["message"]["content"]
    assert whole["usage"]["input_tokens"] == same["usage"]["prompt_tokens"]
    assert whole["usage"]["output_tokens"] == same["usage"]["completion_tokens"]
    events = stream(client, temperature=0)
    assert text_of(events[-1]["response"]) == text_of(whole)
    assert ask(client, asking(temperature=0), "/responses")["object"] == "response"


def test_thoughts_come_back_with_the_next_request(client: httpx.Client) -> None:
    sealed = {"include": ["reasoning.encrypted_content"], "store": False}
    first = answer(client, model="thinks", **sealed)
    reasoning, message = first["output"]
    assert reasoning["content"][0]["text"] == "Paris, then."
    again = [{"role": "user", "content": "And?"}]
    only_sealed = {**reasoning, "content": [], "summary": []}
    second = answer(client, model="thinks", input=[only_sealed, message, *again], **sealed)
    bare = answer(client, model="thinks", input=[message, *again], **sealed)
    more = second["usage"]["input_tokens"] - bare["usage"]["input_tokens"]
    assert more > len("Paris, then.") / 2, "the prompt has the thoughts"
    assert client.get(f"{RESPONSES}/{first['id']}").status_code == 404


def test_a_custom_tool_gets_plain_text(client: httpx.Client) -> None:
    whole = call_of(answer(client, model="edits", tools=[PATCH]))
    assert (whole["type"], whole["name"]) == ("custom_tool_call", "apply_patch")
    assert whole["input"] == "*** Begin Patch\n+é"
    events = stream(client, model="edits", tools=[PATCH])
    deltas = [each["delta"] for each in events if each["type"].endswith("call_input.delta")]
    assert "".join(deltas) == whole["input"]


def test_a_call_that_is_cut_off_is_incomplete(client: httpx.Client) -> None:
    for events in (
        stream(client, model="edits", tools=[PATCH], max_output_tokens=20),
        stream(client, model="shell", tools=[FUNCTION], max_output_tokens=8),
    ):
        response = events[-1]["response"]
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert call_of(response)["status"] == "incomplete"
        done = [each["item"]["type"] for each in events if each["type"].endswith("item.done")]
        assert not [type for type in done if type.endswith("call")]


def test_arguments_that_are_no_object_are_incomplete(client: httpx.Client) -> None:
    response = answer(client, model="nonsense", tools=[FUNCTION])
    assert (response["status"], call_of(response)["status"]) == ("completed", "incomplete")


def test_a_form_binds_the_answer(client: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    response = answer(client, model="endless", text={"format": form, "verbosity": "low"})
    assert response["text"] == {"format": form}
    found = text_of(response)
    assert found.startswith("{")
    if response["status"] == "completed":
        assert isinstance(json.loads(found)["n"], int)


def test_logprobs_where_they_are_asked_for(client: httpx.Client) -> None:
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0}
    part = answer(client, **fields)["output"][0]["content"][0]
    whole = bytes(byte for each in part["logprobs"] for byte in each["bytes"])
    assert whole.startswith(part["text"].encode())
    assert {len(each["top_logprobs"]) for each in part["logprobs"]} == {2}
    deltas = [each for each in stream(client, **fields) if each["type"].endswith("text.delta")]
    streamed = [each["token"] for delta in deltas for each in delta["logprobs"]]
    assert streamed == [each["token"] for each in part["logprobs"]]


def test_a_seed_makes_the_same_text(client: httpx.Client) -> None:
    texts = {text_of(answer(client, model="endless", seed=7, temperature=2)) for _ in range(2)}
    assert len(texts) == 1


def test_a_regex_binds_a_custom_tools_text(client: httpx.Client) -> None:
    """Also a model that knows nothing of it."""
    form = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{2}\n[a-c]{3}"}
    tool = {"type": "custom", "name": "write", "format": form}
    fields = {"tools": [tool], "tool_choice": {"type": "custom", "name": "write"}}
    item = call_of(answer(client, model="endless", **fields))
    assert re.fullmatch(r"[0-9]{2}\n[a-c]{3}", item["input"])


def test_tokens_are_counted_as_the_usage_has_them(client: httpx.Client, sdk: openai.OpenAI) -> None:
    asked: Any = {"model": "thinks", "input": "hi", "instructions": "Be.", "tools": [FUNCTION]}
    used = answer(client, **asked)
    assert sdk.responses.input_tokens.count(**asked).input_tokens == used["usage"]["input_tokens"]
    asked["previous_response_id"] = used["id"]
    more = sdk.responses.input_tokens.count(**asked).input_tokens
    assert more == answer(client, **asked)["usage"]["input_tokens"] > used["usage"]["input_tokens"]


# Recorded requests.


def recorded() -> list[Body]:
    return [json.loads(line)["body"] for line in RECORDED.read_text("utf-8").splitlines()]


def test_codex_is_answered(client: httpx.Client) -> None:
    """Its first turn calls the shell; its second has read what the shell returned."""
    _, first, second = recorded()
    told = []
    for body in (first, second):
        response = client.post(RESPONSES, json={**body, "model": "shell"})
        assert response.status_code == 200, response.text
        ignored = response.headers["x-ignored-params"].split(", ")
        assert {"tools[8]", "prompt_cache_key", "client_metadata"} <= {*ignored}
        told.append(read_events(response.content)[-1]["response"])
    call = call_of(told[0])
    assert (call["name"], json.loads(call["arguments"])) == ("exec_command", {"cmd": "echo hi"})
    assert text_of(told[1]) == "It says hi."
    assert told[0]["status"] == told[1]["status"] == "completed"
    read = told[1]["usage"]["input_tokens_details"]["cached_tokens"]
    assert read > 0.9 * told[0]["usage"]["input_tokens"], "the second turn reads what is new"


def test_a_prompt_that_does_not_fit_has_the_code_that_codex_knows(client: httpx.Client) -> None:
    body = {**recorded()[0], "model": "endless"}
    refused(client.post(RESPONSES, json=body), 400, "context_length_exceeded", param="input")


# The store.


def test_a_conversation_goes_on(client: httpx.Client) -> None:
    first = answer(client, model="thinks", input="One", metadata={"a": "b"}, instructions="Be.")
    second = answer(client, model="thinks", input="Two", previous_response_id=first["id"])
    items = [
        {"role": "user", "content": "One"},
        *first["output"],
        {"role": "user", "content": "Two"},
    ]
    whole = answer(client, model="thinks", input=items)
    assert second["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert second["previous_response_id"] == first["id"]
    assert client.get(f"{RESPONSES}/{first['id']}").json() == first
    assert first["metadata"] == {"a": "b"}
    events = stream(client, model="thinks", input="Three", previous_response_id=second["id"])
    streamed = events[-1]["response"]
    assert client.get(f"/responses/{streamed['id']}").json() == streamed


def test_a_call_goes_on_with_its_output_alone(client: httpx.Client) -> None:
    first = answer(client, model="shell", tools=[FUNCTION])
    output = {
        "type": "function_call_output",
        "call_id": call_of(first)["call_id"],
        "output": [{"type": "input_text", "text": "hi"}],
    }
    fields = {"model": "shell", "tools": [FUNCTION], "input": [output]}
    assert text_of(answer(client, previous_response_id=first["id"], **fields)) == "It says hi."
    reference = {"type": "item_reference", "id": call_of(first)["id"]}
    fields["input"] = [{"role": "user", "content": "?"}, reference, output]
    assert text_of(answer(client, **fields)) == "It says hi."


def test_the_input_of_a_response_can_be_read(sdk: openai.OpenAI) -> None:
    texts = ["a", "b", "c"]
    made = sdk.responses.create(
        model="thinks", input=[{"role": "user", "content": text} for text in texts]
    )
    page = sdk.responses.input_items.list(made.id, limit=2, order="asc")
    assert page.has_more
    found: list[Any] = list(sdk.responses.input_items.list(made.id, limit=2, order="asc"))
    assert [item.content[0].text for item in found] == texts
    newest = sdk.responses.input_items.list(made.id).data
    assert [item.id for item in newest] == [item.id for item in reversed(found)]
    sdk.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError, match="Response with id"):
        sdk.responses.retrieve(made.id)


def test_what_is_not_stored_is_not_found(client: httpx.Client) -> None:
    gone = "resp_gone"
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        response = client.request(method, f"{RESPONSES}/{gone}{path}")
        error = refused(response, 404, "response_not_found")
        assert error["message"] == f"Response with id '{gone}' not found."
    refused(
        client.post(RESPONSES, json=asking(previous_response_id=gone)),
        404,
        "previous_response_not_found",
        param="previous_response_id",
    )
    reference = [{"role": "user", "content": "?"}, {"type": "item_reference", "id": "msg_gone"}]
    refused(
        client.post(RESPONSES, json=asking(input=reference)),
        404,
        "item_not_found",
        param="input[1]",
    )


def test_the_store_forgets_the_oldest(client: httpx.Client) -> None:
    first, *_, last = [answer(client, model="thinks", max_output_tokens=1)["id"] for _ in range(21)]
    assert client.get(f"{RESPONSES}/{first}").status_code == 404
    assert client.get(f"{RESPONSES}/{last}").status_code == 200


# Errors.


def test_errors_have_the_sdks_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        sdk.responses.create(model="nobody", input="hi")
    with pytest.raises(openai.BadRequestError, match="background"):
        sdk.responses.create(model="demo", input="hi", background=True)
    image: Any = {"type": "input_image", "image_url": "data:,", "detail": "auto"}
    with pytest.raises(
        openai.BadRequestError,
        match="not 'input_image'; leave it out, or use the type 'input_text'",
    ):
        sdk.responses.create(model="demo", input=[{"role": "user", "content": [image]}])


def test_a_stored_response_is_not_streamed(client: httpx.Client) -> None:
    made = answer(client, model="thinks")
    response = client.get(f"{RESPONSES}/{made['id']}", params={"stream": "true"})
    refused(response, 400, "unsupported_parameter", param="stream")


def test_the_sdk_streams_and_parses(sdk: openai.OpenAI) -> None:
    with sdk.responses.stream(model="thinks", input="hi") as events:
        types = [short(event.type) for event in events]
        final = events.get_final_response()
    assert types[0] == "created"
    assert final.output_text == "It rains."
