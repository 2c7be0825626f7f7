"""Log-probabilities in OpenAI's two forms."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.generation.outputs import TokenScore
from mlxsrv.wire.openai.logprobs import TextScores, chat_logprobs
from tests.support.schemas import as_sent

EURO = "€".encode()
PARTS = [TokenScore(EURO[i : i + 1], -0.5) for i in range(3)]


@st.composite
def scored_texts(draw: st.DrawFn) -> tuple[str, list[TokenScore]]:
    """A text, and tokens that its bytes have been cut into anywhere."""
    text = draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
    data = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    logprobs = st.floats(max_value=0, allow_nan=False)
    top = st.lists(st.tuples(st.binary(max_size=4), logprobs), max_size=3).map(tuple)
    return text, [
        TokenScore(data[start:end], draw(logprobs), draw(top))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)
    ]


def test_a_chat_lists_tokens_with_their_bytes() -> None:
    score = TokenScore(b"the", -0.25, ((b"the", -0.25), (EURO[:1], -3.0)))
    assert as_sent(chat_logprobs([score])) == {
        "content": [
            {
                "token": "the",
                "logprob": -0.25,
                "bytes": [116, 104, 101],
                "top_logprobs": [
                    {"token": "the", "logprob": -0.25, "bytes": [116, 104, 101]},
                    {"token": "\ufffd", "logprob": -3.0, "bytes": [0xE2]},
                ],
            }
        ],
        "refusal": None,
    }


def test_a_completion_has_lists_side_by_side() -> None:
    scores = [
        TokenScore(b"Once", None),
        TokenScore(b" upon", -0.25, ((b" upon", -0.25), (b" more", -2.0))),
        TokenScore(b" a", -3.0, ((b" the", -0.5), (b" a", -3.0))),
    ]
    assert as_sent(TextScores().write(scores)) == {
        "tokens": ["Once", " upon", " a"],
        "token_logprobs": [None, -0.25, -3.0],
        "top_logprobs": [None, {" upon": -0.25, " more": -2.0}, {" the": -0.5, " a": -3.0}],
        "text_offset": [0, 4, 9],
    }


def test_a_token_that_is_no_text_is_spelled_in_bytes() -> None:
    score = TokenScore(EURO[:2], -1.0, ((EURO[:2], -1.0), (b"\xff", -2.0), (b"\\", -3.0)))
    logprobs = TextScores().write([score])
    assert logprobs.tokens == [r"bytes:\xe2\x82"]
    assert logprobs.top_logprobs == [{r"bytes:\xe2\x82": -1.0, r"bytes:\xff": -2.0, "\\": -3.0}]


def test_tokens_that_share_a_character_share_its_offset() -> None:
    scores = [TokenScore(b"a", -1.0), *PARTS, TokenScore("é!".encode(), -1.0)]
    assert TextScores().write([*scores, *scores]).text_offset == [0, 1, 1, 1, 2, 4, 5, 5, 5, 6]


def test_tokens_that_are_written_the_same_have_names() -> None:
    top = ((b"a", -0.5), (b"a", -1.0), (b"", -2.0))
    score = TokenScore(b"a", -1.0, top, names=("a", "a", "token_id:7", ""))
    told = TextScores().write([score])
    assert told.tokens == ["a"]
    assert told.top_logprobs == [{"a": -0.5, "token_id:7": -1.0, "": -2.0}]


@pytest.mark.parametrize("logprob", [-math.inf, math.nan, -10_000.0])
def test_the_impossible_has_a_number(logprob: float) -> None:
    score = TokenScore(b"a", logprob, ((b"b", logprob),))
    [token] = as_sent(chat_logprobs([score]))["content"]
    assert [token["logprob"], token["top_logprobs"][0]["logprob"]] == [-9999.0, -9999.0]
    text = as_sent(TextScores().write([score]))
    assert text["token_logprobs"] == [-9999.0]
    assert text["top_logprobs"] == [{"b": -9999.0}]


def test_a_chat_has_a_number_for_what_nothing_predicts() -> None:
    assert chat_logprobs([TokenScore(b"a", None)]).content[0].logprob == -9999.0


@given(scored_texts())
def test_bytes_of_a_chats_tokens_are_the_text(scored: tuple[str, list[TokenScore]]) -> None:
    text, scores = scored
    tokens = as_sent(chat_logprobs(scores))["content"]
    assert bytes(byte for token in tokens for byte in token["bytes"]).decode() == text
    assert [len(token["top_logprobs"]) for token in tokens] == [len(s.top) for s in scores]


@given(scored_texts(), st.integers(0, 12))
def test_offsets_are_where_the_tokens_stand(scored: tuple[str, list[TokenScore]], cut: int) -> None:
    text, scores = scored
    whole = TextScores().write(scores)
    before = b""
    for score, token, offset in zip(scores, whole.tokens, whole.text_offset, strict=True):
        assert offset == len(before.decode(errors="ignore"))
        if not token.startswith("bytes:"):
            assert text[offset:].startswith(token)
        before += score.token
    pieces = TextScores()
    first, second = pieces.write(scores[:cut]), pieces.write(scores[cut:])
    for name in whole.__struct_fields__:
        assert getattr(first, name) + getattr(second, name) == getattr(whole, name)
