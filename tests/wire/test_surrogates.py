"""Halves of surrogate pairs in the bodies of requests."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.wire.decoding import mend_surrogates
from mlxsrv.wire.earlier_turns import past_arguments
from mlxsrv.wire.openai.requests import CHAT_REQUESTS
from tests.support.growth import assert_linear

HALVES = ["\\ud83d", "\\udE00", "\\uD83D\\uD83D", "\\ude00\\ud83d x"]


@pytest.mark.parametrize("half", HALVES)
def test_half_a_pair_in_a_request_is_a_replacement_character(half: str) -> None:
    body = '{"messages": [{"role": "user", "content": "a' + half + 'b"}]}'
    request, _ = CHAT_REQUESTS.decode(body.encode())
    wanted = json.loads(body)["messages"][0]["content"]
    assert request.messages[0].content == wanted.encode("utf-16", "surrogatepass").decode(
        "utf-16", "replace"
    )


def test_half_a_pair_in_arguments_is_one_too() -> None:
    assert past_arguments('{"a": "\\ud83d"}') == {"a": "\ufffd"}


@given(st.text(st.sampled_from('\\ud83de0A "\n😀'), max_size=40))
def test_sound_json_stays_as_it_is(text: str) -> None:
    for escaped in (True, False):
        body = json.dumps(text, ensure_ascii=escaped).encode()
        assert mend_surrogates(body) == body


def test_a_body_is_gone_through_once() -> None:
    def mend(count: int) -> None:
        body = b'"' + rb"\\\ud83d\n" * count + b'"'
        assert mend_surrogates(body).count(rb"\ufffd") == count

    assert_linear(mend, 2000)
