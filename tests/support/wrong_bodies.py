"""Bodies with values that JSON does not have, and the field that a refusal names."""

from __future__ import annotations

import json

import httpx

from tests.support.client import CHAT, COMPLETIONS, Body, chat, completion

ENDPOINTS = {CHAT: chat, COMPLETIONS: completion}


def post_text(client: httpx.Client, text: str, path: str = CHAT) -> httpx.Response:
    return client.post(path, content=text.encode())


def with_raw(body: Body, field: str, raw: str) -> str:
    """`body` as JSON with `field` spelled as given, which need not be JSON."""
    rest = json.dumps({name: value for name, value in body.items() if name != field})
    return f'{rest[:-1]}, "{field}": {raw}}}'


def wrong_param(response: httpx.Response) -> str | None:
    param = response.json()["error"]["param"]
    assert param is None or isinstance(param, str)
    return param
