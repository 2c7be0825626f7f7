"""Scores go out with the text that their tokens are in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.engine.events import Likelihood, Token
from mlxsrv.generation.outputs import TokenScore
from mlxsrv.service.scores import Scores
from mlxsrv.wire.openai.logprobs import TextScores, chat_logprobs

TOKENS = [b"a", b"bc", b" d", b"\xe2\x82", b"\xac", b"\n", b"", "é".encode()]


END = 6


def scores(**options: Any) -> Scores:
    def spelled(token: int) -> bytes:
        return TOKENS[token] or b"<s>"

    options.setdefault("strips_space", False)
    return Scores(lambda token: TOKENS[token], spelled, ends={END}, **options)


def likely(token: int) -> Likelihood:
    return Likelihood(-float(token), ((token, -float(token)),))


def take(stage: Scores, tokens: Sequence[int]) -> None:
    for token in tokens:
        stage.take(token, likely(token))


def test_a_token_waits_until_its_bytes_are_sent() -> None:
    stage = scores()
    take(stage, [0, 1])
    assert stage.release("a") == (TokenScore(b"a", 0.0, ((b"a", 0.0),)),)
    assert stage.release("b") == ()
    assert [score.token for score in stage.release("c")] == [b"bc"]


def test_a_character_cut_between_tokens_comes_with_both() -> None:
    stage = scores()
    take(stage, [3])
    take(stage, [4])
    assert [score.token for score in stage.release("€")] == [b"\xe2\x82", b"\xac"]


def test_of_what_a_stop_string_cuts_only_the_beginning_is_told() -> None:
    stage = scores()
    take(stage, [0, 1, 2])
    assert [score.token for score in stage.release("ab")] == [b"a"]
    assert [score.token for score in stage.discard_waiting()] == [b"b"]
    assert stage.discard_waiting() == ()


def test_thoughts_and_markers_have_no_scores() -> None:
    stage = scores()
    take(stage, [1])  # the beginning of a marker, as it turns out
    stage.leave()
    take(stage, [5, 0])  # a newline after the block is no content
    assert [score.token for score in stage.release("a")] == [b"a"]


def test_a_text_completion_tells_every_token() -> None:
    """Evaluation harnesses count them: what is not told shifts all that follow."""
    stage = scores(every=True)
    take(stage, [0, 3])
    assert [score.token for score in stage.release("a")] == [b"a"]
    end = Token(1, 6, "stop", likely(6))
    assert [score.token for score in stage.rest(end)] == [b"\xe2\x82", b""]
    assert scores().rest(end) == ()


def test_an_end_token_has_one_name_wherever_it_stands() -> None:
    stage = scores(every=True)
    take(stage, [0, END, 0])
    told = [*stage.release("aa"), *stage.rest(Token(1, END, "stop", likely(END)))]
    assert [score.token for score in told] == [b"a", b"", b"a", b""]
    lists = TextScores().write(told)
    assert lists.tokens == ["a", "<s>", "a", "<s>"]
    assert lists.text_offset == [0, 1, 1, 2]
    assert lists.top_logprobs == [{"a": 0.0}, {"<s>": -6.0}, {"a": 0.0}, {"<s>": -6.0}]
    stage = scores()  # of a chat
    take(stage, [END, 0])
    content = chat_logprobs(stage.release("a")).content
    assert [(each.token, each.bytes) for each in content] == [("<s>", []), ("a", [97])]
    assert [each.token for each in content[0].top_logprobs] == ["<s>"]


@pytest.mark.parametrize("own", [0, 8, 9])
def test_there_are_as_many_alternatives_as_were_asked_for(own: int) -> None:
    """Two tokens may be written the same, as `a` and the byte of it in some vocabularies."""
    spelled = {0: b"a", 8: b"a", 9: b"b", 10: b"", 11: b""}
    stage = Scores(spelled.__getitem__, spelled.__getitem__, strips_space=False, every=True)
    top = ((0, -0.5), (8, -1.0), (10, -1.5), (11, -2.0))
    stage.take(own, Likelihood(-1.0, top))
    [told] = stage.release(spelled[own].decode())
    [alternatives] = TextScores().write([told]).top_logprobs
    wanted = {"a": -0.5, "token_id:8": -1.0, "": -1.5, "token_id:11": -2.0}
    assert alternatives == (wanted if own != 9 else {**wanted, "b": -1.0})


def test_a_token_that_is_cut_is_named_by_what_is_left() -> None:
    stage = scores(every=True)
    take(stage, [1])
    assert stage.release("b") == ()
    [told] = stage.discard_waiting()
    assert TextScores().write([told]).tokens == ["b"]


def test_a_prompts_tokens_are_where_its_text_has_them() -> None:
    tokens = [6, 0, 6, 1]  # the first was put there by the tokenizer
    told = scores().of_prompt("a<s>bc", tokens, [likely(token) for token in tokens])
    assert [score.token for score in told] == [b"", b"a", b"<s>", b"bc"]


def test_a_space_that_the_text_lacks_is_not_in_the_bytes() -> None:
    stage = scores(strips_space=True)
    take(stage, [2, 2])
    assert [score.token for score in stage.release("d d")] == [b"d", b" d"]


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=20), st.data())
def test_the_bytes_of_all_tokens_are_the_text(tokens: list[int], data: st.DataObject) -> None:
    whole = b"".join(TOKENS[token] for token in tokens)
    try:
        text = whole.decode()
    except UnicodeDecodeError:
        return
    stage = scores()
    take(stage, tokens)
    given_out: list[TokenScore] = []
    while text:
        size = data.draw(st.integers(1, len(text)))
        piece, text = text[:size], text[size:]
        given_out += stage.release(piece)
    assert b"".join(score.token for score in given_out) == whole
