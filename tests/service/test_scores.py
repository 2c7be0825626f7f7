"""Scores go out with the text that their tokens are in."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mlxsrv.events import Likelihood, Token, TokenScore
from mlxsrv.service.scores import Scores

TOKENS = [b"a", b"bc", b" d", b"\xe2\x82", b"\xac", b"\n", b"", "é".encode()]


def scores(*, strips_space: bool = False, every: bool = False) -> Scores:
    def spelled(token: int) -> bytes:
        return TOKENS[token] or b"<s>"

    return Scores(lambda token: TOKENS[token], spelled, strips_space=strips_space, every=every)


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
    assert [score.token for score in stage.cut()] == [b"b"]
    assert stage.cut() == ()


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
