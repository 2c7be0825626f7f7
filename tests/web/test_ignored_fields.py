"""Ignored fields are named in a header and in the log."""

from __future__ import annotations

import httpx
import pytest

from tests.support.client import CHAT, chat
from tests.support.serving import Server

# Fields that mean nothing here.


def ignored(response: httpx.Response) -> set[str]:
    assert response.status_code == 200, response.text
    return {name.strip() for name in response.headers["x-ignored-params"].split(",")}


@pytest.mark.parametrize("streaming", [False, True])
def test_ignored_fields_are_named(client: httpx.Client, streaming: bool) -> None:
    body = chat(stream=streaming, store=True, service_tier="auto", metadata={"a": "b"}, custom=1)
    assert ignored(client.post(CHAT, json=body)) == {
        "store",
        "service_tier",
        "metadata",
        "custom",
    }


def test_ignored_fields_are_named_by_path_and_logged_once(
    client: httpx.Client, server: Server
) -> None:
    message = {"role": "user", "content": "hi"}
    odd = {**message, "mood": 1}
    for messages in ([odd], [message, odd, odd], [odd, message]):
        body = chat(max_tokens=1, messages=messages, verbosity="low", stream_options={"new": 1})
        response = client.post(CHAT, json=body | {"stream": True})
        first = messages.index(odd)
        assert ignored(response) == {
            f"messages[{first}].mood",
            "stream_options.new",
            "verbosity",
        }
    for name in ("messages[].mood", "stream_options.new", "verbosity"):
        assert len(server.log("field ignored", name=name)) == 1


def test_the_user_is_not_ignored(client: httpx.Client, server: Server) -> None:
    response = client.post(CHAT, json=chat(user="Ada Lovelace"))
    assert "x-ignored-params" not in response.headers
    line = server.logged("stream end", request=response.headers["x-request-id"])
    assert line["user"] == "Ada Lovelace"


def test_stream_options_without_a_stream_are_named(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(stream_options={"include_usage": True}))
    assert ignored(response) == {"stream_options"}


@pytest.mark.parametrize(
    "name", ["ключ", "é", "😀", "a b", "a,b", "", "\u2028", "\x00", "x" * 9000]
)
def test_a_field_may_have_any_name(client: httpx.Client, name: str) -> None:
    response = client.post(CHAT, json=chat(**{name: 1}))
    assert response.status_code == 200, response.text
    assert "x-ignored-params" in response.headers
    assert len(response.headers["x-ignored-params"]) <= 8192


def test_a_field_name_cannot_write_headers(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(**{"a\r\nX-Evil: yes": 1}))
    assert response.status_code == 200, response.text
    assert "x-evil" not in response.headers


def test_the_header_is_one_whatever_the_names_are(client: httpx.Client) -> None:
    """h11 sends no value that begins or ends with a space, and a long one may be cut anywhere."""
    for names in ([" a"], ["a "], [" "], [""], ["x" * n + " " for n in range(1000, 1060)]):
        response = client.post(CHAT, json=chat(max_tokens=1, **dict.fromkeys(names, 1)))
        assert response.status_code == 200
        assert "x-ignored-params" in response.headers


def test_many_ignored_fields_fit_the_header(client: httpx.Client) -> None:
    response = client.post(CHAT, json=chat(**{f"field_number_{i}": i for i in range(5000)}))
    assert response.status_code == 200, response.text
    assert 0 < len(response.headers["x-ignored-params"]) <= 8192
