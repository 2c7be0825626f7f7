"""Tools that the tests of the wire share: OpenAI's own schemas, and readers of streams."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema

from mlxsrv.wire.sse import encode_json

Body = dict[str, Any]

_SCHEMAS = json.loads((Path(__file__).with_name("openai_schemas.json")).read_text("utf-8"))


def check_schema(body: object, name: str) -> None:
    """Fails unless `body` is what OpenAI's schema `name` describes."""
    schema = {"$ref": f"#/$defs/{name}", "$defs": _SCHEMAS["$defs"]}
    jsonschema.Draft202012Validator(schema).validate(body)


def as_sent(response: object) -> Body:
    """The parts of a response that a client reads."""
    return dict(json.loads(encode_json(response)))


def read_frames(data: bytes) -> list[Body | str]:
    """The events of a stream, to the letter of the format: chunks, and `[DONE]`."""
    text = data.decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.splitlines() == [event] and event.startswith("data: ") for event in events)
    payloads = [event.removeprefix("data: ") for event in events]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]


def read_chunks(data: bytes) -> list[Body]:
    """The chunks of a stream that is over."""
    *chunks, done = read_frames(data)
    assert done == "[DONE]"
    return [chunk for chunk in chunks if isinstance(chunk, dict)]


# Where the contract goes beyond OpenAI's schema, and where OpenAI itself does.


def check_chat(body: Body) -> None:
    _check_with_known_reasons(body, "CreateChatCompletionResponse")


def check_chat_chunk(chunk: Body) -> None:
    _check_with_known_reasons(chunk, "CreateChatCompletionStreamResponse")


def check_text(body: Body) -> None:
    """An answer or a chunk: OpenAI has one schema for both, which the chunks that it sends do not
    follow (an open `finish_reason` and `usage` are null), nor does an echo (null is the
    log-probability of the first token, which nothing predicts)."""
    known = dict(body)
    if known.get("usage", {}) is None:
        del known["usage"]
    known["choices"] = [_without_nulls(choice) for choice in known["choices"]]
    _check_with_known_reasons(known, "CreateCompletionResponse")


def _without_nulls(choice: Body) -> Body:
    choice = {**choice, "finish_reason": choice["finish_reason"] or "stop"}
    if choice["logprobs"] is not None:
        logprobs = dict(choice["logprobs"])
        assert logprobs["token_logprobs"].count(None) == logprobs["top_logprobs"].count(None)
        for name in ("token_logprobs", "top_logprobs"):
            logprobs[name] = [value for value in logprobs[name] if value is not None]
        choice["logprobs"] = logprobs
    return choice


def _check_with_known_reasons(body: Body, name: str) -> None:
    """`timeout` and `error` are reasons of ours."""
    choices = [
        {**choice, "finish_reason": "stop"}
        if choice["finish_reason"] in ("timeout", "error")
        else choice
        for choice in body["choices"]
    ]
    check_schema({**body, "choices": choices}, name)
