"""Assign the scores of tokens to the pieces of text that they belong to."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from mlxsrv.engine.events import Likelihood, Token
from mlxsrv.generation.outputs import PromptScore, RankedToken, TokenScore, text_name

_NEWLINES = b"\r\n"


class Scores:
    """Gives out the scores of an answer's content, each with the text that its token is in.

    Text may wait, for the rest of a character or of a stop string, and some never comes. So tokens
    wait here until the bytes that they write have been sent. The joined bytes of all tokens are the
    text's, except where a stop string cuts a token: that token is left out.

    Args:
        token_bytes: returns the bytes that a token writes.
        spelling: the same, but special tokens have their names, as in a prompt.
        strips_space: whether the text lacks the space that its first token begins with.
        every: whether tokens that write no text have scores too: see `rest`. Text completions need
            that. They also name alternatives: the token itself is one of them, and each has
            a name of its own.
        ends: tokens that end answers. One that is ignored has its name in the scores.
        markers: tokens that are a whole marker of the model's formats.
        numbered: whether tokens are named by their ids.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        spelling: Callable[[int], bytes],
        *,
        strips_space: bool,
        every: bool = False,
        ends: Collection[int] = (),
        markers: Collection[int] = (),
        numbered: bool = False,
    ) -> None:
        self.markers = markers
        self._token_bytes = token_bytes
        self._spelling = spelling
        self._every = every
        self._ends = ends
        self._numbered = numbered
        self._strips_space = strips_space
        self._after_block = False  # leading newlines are dropped after a think block
        self._waiting: deque[tuple[int, TokenScore]] = (
            deque()
        )  # with the position of the token's end
        self._seen = 0  # bytes of all tokens taken
        self._sent = 0  # bytes of the text given out

    def take(self, token: int, likelihood: Likelihood) -> None:
        """Take a token of the content."""
        data = self._token_bytes(token)
        if self._after_block:
            data = data.lstrip(_NEWLINES)
            if not data:
                return
            self._after_block = False
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        self._seen += len(data)
        named = token in self._ends
        self._waiting.append((self._seen, self._score(token, data, likelihood, named=named)))

    def leave(self) -> tuple[TokenScore, ...]:
        """The last tokens are a marker, a header, a thought or a tool call, and no content. Returns
        the score of the token in which the content ended, if it ended within one."""
        self._after_block = True
        return self.discard_waiting()

    def discard_waiting(self) -> tuple[TokenScore, ...]:
        """Forget what waits. Returns the score of a token that is partly in the text, if any."""
        begun: tuple[TokenScore, ...] = ()
        if self._waiting:
            end, score = self._waiting[0]
            written = self._sent - (end - len(score.token))
            if written > 0:
                begun = (_shortened(score, written, named=self._numbered),)
        self._waiting.clear()
        self._seen = self._sent
        return begun

    def release(self, text: str) -> tuple[TokenScore, ...]:
        """The scores that go with `text`, the next piece of the content."""
        self._sent += len(text.encode())
        scores: list[TokenScore] = []
        while self._waiting and self._waiting[0][0] <= self._sent:
            scores.append(self._waiting.popleft()[1])
        return tuple(scores)

    def rest(self, end: Token | None) -> tuple[TokenScore, ...]:
        """The scores that still wait when an answer has ended by itself or at its limit. With
        `every`: those of half a character or a special token, and of the end token."""
        if not self._every:
            return self.discard_waiting()
        waiting = [score for _, score in self._waiting]
        if end is not None and end.likelihood is not None:
            waiting.append(self._score(end.id, b"", end.likelihood, named=True))
        return tuple(waiting)

    def of_prompt(
        self, text: str, tokens: Sequence[int], likelihoods: Sequence[Likelihood]
    ) -> tuple[TokenScore, ...]:
        """The scores of the tokens of a prompt, one for each.

        Args:
            text: the prompt. It has special tokens by their names, but not one that the tokenizer
                put before it.
        """
        scores: list[TokenScore] = []
        data, at = text.encode(), 0
        for token, likelihood in zip(tokens, likelihoods, strict=True):
            spelled = self._spelling(token)
            written = spelled if data.startswith(spelled, at) else b""
            at += len(written)
            scores.append(self._score(token, written, likelihood))
        return tuple(scores)

    def _score(
        self, token: int, data: bytes, likelihood: Likelihood, *, named: bool = False
    ) -> TokenScore:
        """The score of a token that has written `data`. With `named`, its name is its spelling."""
        ids = [other for other, _ in likelihood.top]
        logprobs = [logprob for _, logprob in likelihood.top]
        if self._every and likelihood.logprob is not None and token not in ids:
            ids.append(token)
            logprobs.append(likelihood.logprob)
        spelled = [self._spelling(id) for id in ids]
        shown = self._spelling(token) if named else data
        names: tuple[str, ...] = ()
        if self._numbered:
            names = tuple(f"token_id:{id}" for id in (token, *ids))
        elif self._every:
            names = (text_name(shown), *_distinct(ids, map(text_name, spelled)))
        elif named:
            names = tuple(each.decode(errors="replace") for each in (shown, *spelled))
        top = tuple(zip(spelled, logprobs, strict=True))
        return TokenScore(data, likelihood.logprob, top, names)


def _shortened(score: TokenScore, written: int, *, named: bool) -> TokenScore:
    """The score of a token of which only `written` bytes are in the text.

    Args:
        named: whether its name does not depend on its bytes.
    """
    token, names = score.token[:written], score.names
    if names and not named:
        names = (text_name(token), *names[1:])
    return msgspec.structs.replace(score, token=token, names=names)


def _distinct(ids: Sequence[int], names: Iterable[str]) -> Iterator[str]:
    """The names of tokens; a token whose name a likelier one has is named by its id."""
    taken: set[str] = set()
    for id, name in zip(ids, names, strict=True):
        yield f"token_id:{id}" if name in taken else name
        taken.add(name)


def cut_top(likelihoods: Sequence[Likelihood], most: int) -> list[Likelihood]:
    """The same, with at most `most` of the likeliest tokens at each place."""
    return [msgspec.structs.replace(each, top=each.top[:most]) for each in likelihoods]


def rank_prompt(
    tokens: Sequence[int], likelihoods: Sequence[Likelihood], spelling: Callable[[int], bytes]
) -> tuple[PromptScore, ...]:
    """The tokens that could stand at each place of a prompt: its own, then the likeliest others."""

    def ranked(id: int, logprob: float, rank: int) -> RankedToken:
        return RankedToken(id, logprob, rank, spelling(id).decode(errors="replace"))

    scores: list[PromptScore] = []
    for token, likelihood in zip(tokens, likelihoods, strict=True):
        if likelihood.logprob is None or likelihood.rank is None:
            scores.append(None)
            continue
        own = ranked(token, likelihood.logprob, likelihood.rank)
        others = enumerate(likelihood.top, start=1)
        top = [ranked(id, logprob, rank) for rank, (id, logprob) in others if id != token]
        scores.append((own, *top))
    return tuple(scores)
