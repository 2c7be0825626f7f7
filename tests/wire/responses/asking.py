"""Tools that the tests of the Responses API share: requests, and a reader of its streams."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import openai.types.responses as sdk
from pydantic import TypeAdapter

from mlxsrv.generation.spec import ChatPrompt, GenerationSpec
from mlxsrv.wire.responses.requests import RESPONSES_REQUESTS, Past, ResponsesRequest
from tests.support.schemas import Body

FUNCTION = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a+/"},
}
NAMESPACE = {
    "type": "namespace",
    "name": "agents",
    "description": "Sub-agents.",
    "tools": [{**FUNCTION, "name": "spawn"}, {"type": "custom", "name": "note"}],
}
TOOLS = [FUNCTION, PATCH, NAMESPACE]


def user(text: str) -> Body:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


def decode(**fields: Any) -> tuple[ResponsesRequest, list[str]]:
    """A request, and the fields in it that are ignored."""
    return RESPONSES_REQUESTS.decode(json.dumps({"input": "hi", **fields}).encode())


def asked(**fields: Any) -> ResponsesRequest:
    return decode(**fields)[0]


def spec(past: Past | None = None, **fields: Any) -> GenerationSpec:
    return asked(**fields).spec(past or Past())


def prompt(past: Past | None = None, **fields: Any) -> ChatPrompt:
    found = spec(past, **fields).prompt
    assert isinstance(found, ChatPrompt)
    return found


@cache
def _of_events() -> TypeAdapter[Any]:
    return TypeAdapter(sdk.ResponseStreamEvent)


def read_events(data: bytes) -> list[Body]:
    """The events of a stream, each as the SDK's types want it and named as its type is."""
    text = data.decode()
    assert text.endswith("\n\n") or not text
    events = []
    for event in text[:-2].split("\n\n"):
        name, payload = event.splitlines()
        events.append(json.loads(payload.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        sdk_event(events[-1])
    return events


def sdk_event(event: Body) -> Any:
    """The event as the SDK has it. Fails unless its types allow it."""
    return _of_events().validate_python(_within_schema(event))


def check_response(response: Body) -> None:
    sdk.Response.model_validate(_within_schema({"response": response})["response"])


def _within_schema(event: Body) -> Body:
    """The event without two values of ours: the reason `timeout`, and a code that Codex knows."""
    response = event.get("response")
    if response is None:
        return event
    response = dict(response)
    if response["incomplete_details"] == {"reason": "timeout"}:
        response["incomplete_details"] = {"reason": "max_output_tokens"}
    if response["error"] and response["error"]["code"] == "context_length_exceeded":
        response["error"] = {**response["error"], "code": "invalid_prompt"}
    return {**event, "response": response}


def short(type: str) -> str:
    return type.removeprefix("response.")
