"""Log-probabilities, as OpenAI's two completion endpoints write them.

Chats have a list of tokens, each with its bytes, so a token that is no text alone loses nothing.
Text completions have the older form: four lists, where a token is only a string.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from msgspec import Struct

from mlxsrv.generation.outputs import PromptScore, TokenScore, text_name

_LOWEST = -9999.0  # OpenAI's value for an impossible token; JSON has no infinity


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST else _LOWEST


# Chat.


class TopLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


def chat_logprobs(scores: Sequence[TokenScore]) -> ChatLogprobs:
    return ChatLogprobs([_chat_token(score) for score in scores])


def _chat_token(score: TokenScore) -> TokenLogprob:
    own, *others = _names(score, _chat_name)
    return TokenLogprob(
        token=own,
        logprob=_LOWEST if score.logprob is None else _finite(score.logprob),
        bytes=list(score.token),
        top_logprobs=[
            TopLogprob(name, _finite(logprob), list(token))
            for name, (token, logprob) in zip(others, score.top, strict=True)
        ],
    )


def _names(score: TokenScore, name: Callable[[bytes], str]) -> Sequence[str]:
    """The name of the token, then those of the likeliest tokens."""
    return score.names or [name(token) for token in (score.token, *(each for each, _ in score.top))]


def _chat_name(token: bytes) -> str:
    return token.decode(errors="replace")


# Text.


class TextLogprobs(Struct, frozen=True):
    """One entry a token in each list; null where nothing predicts the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextScores:
    """Writes the log-probabilities of one text, whole or in pieces. Offsets are in characters and
    go on from piece to piece. Tokens that share a character have its offset."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, scores: Sequence[TokenScore]) -> TextLogprobs:
        logprobs = TextLogprobs([], [], [], [])
        for score in scores:
            logprobs.tokens.append(_names(score, text_name)[0])
            logprobs.token_logprobs.append(
                None if score.logprob is None else _finite(score.logprob)
            )
            logprobs.top_logprobs.append(_text_top(score))
            logprobs.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(score.token))
        return logprobs


def _text_top(score: TokenScore) -> dict[str, float] | None:
    """The likeliest tokens; the token itself is one of them."""
    if score.logprob is None:
        return None
    names = _names(score, text_name)[1:]
    logprobs = (_finite(logprob) for _, logprob in score.top)
    return dict(zip(names, logprobs, strict=True))


# Prompts, as vLLM writes them.


class PromptLogprob(Struct, frozen=True):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""For each token of a prompt, the tokens that could stand there by their ids: the prompt's own and
the likeliest. Null for the first."""


def prompt_logprobs(scores: Sequence[PromptScore]) -> PromptLogprobs:
    return [
        None
        if score is None
        else {each.id: PromptLogprob(_finite(each.logprob), each.rank, each.text) for each in score}
        for score in scores
    ]
