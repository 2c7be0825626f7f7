"""Requests of OpenAI's API, decoded or refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from mlxsrv.errors import InvalidRequest
from mlxsrv.wire.openai.requests import (
    CHAT_REQUESTS,
    COMPLETION_REQUESTS,
    ChatRequest,
    CompletionRequest,
)
from tests.support.bodies import Kind
from tests.support.openai_bodies import chat, completion


def read_chat(**fields: Any) -> ChatRequest:
    return CHAT_REQUESTS.decode(json.dumps(chat(**fields)).encode())[0]


def read_completion(**fields: Any) -> CompletionRequest:
    return COMPLETION_REQUESTS.decode(json.dumps(completion(**fields)).encode())[0]


def refusal(kind: Kind, body: object) -> InvalidRequest:
    text = body if isinstance(body, str) else json.dumps(body)
    with pytest.raises(InvalidRequest) as caught:
        kind.decode(text.encode())
    return caught.value


def fields(kind: Kind, *, optional: bool) -> list[str]:
    """Every field of a kind, so that a new one is tried, too."""
    return [
        field.encode_name
        for field in msgspec.structs.fields(kind.struct)
        if not (optional and (field.required or field.encode_name in kind.base))
    ]
