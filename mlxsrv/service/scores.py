"""Which tokens' scores belong to which piece of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from mlxsrv.engine.events import Likelihood, Token
from mlxsrv.generation import PromptScore, RankedToken, TokenScore
from mlxsrv.wire.logprobs import text_name

_NEWLINES = b"\r\n"


class Scores:
    """Scores of the tokens of an answer's content, each given out with the text that it is in.

    Text may wait, for the rest of a character or of a stop string, and some never comes; so tokens
    wait here until the bytes that they write have been sent. Their bytes, joined, are the text's,
    but for an end that a stop string cuts inside a token: that token is left out.

    Args:
        token_bytes: what a token writes.
        spelling: the same, with special tokens by their names, as in a prompt.
        strips_space: whether the text lacks the space that its first token begins with.
        every: whether tokens that end up in no text are told too: see `rest`. That is the form of
            text completions, where alternatives are told by name: the token itself is one of them,
            and each has a name of its own.
        ends: tokens that end answers; where one is ignored, it has its name all the same.
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
        numbered: bool = False,
    ) -> None:
        self._token_bytes = token_bytes
        self._spelling = spelling
        self._every = every
        self._ends = ends
        self._numbered = numbered
        self._strips_space = strips_space
        self._after_block = False  # leading newlines are dropped after a think block
        self._waiting: deque[tuple[int, TokenScore]] = deque()  # with where the token ends
        self._seen = 0  # bytes of all tokens taken
        self._sent = 0  # bytes of the text given out

    def take(self, token: int, likelihood: Likelihood) -> None:
        """A token of the content."""
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
        """What came last is no content after all: a marker, a thought, a call. The score of the
        token in which the content ended, if it did within one."""
        self._after_block = True
        return self.cut()

    def cut(self) -> tuple[TokenScore, ...]:
        """Forget what waits; but a token that the text has the beginning of is told with that."""
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
        """The scores that go with `text`, the next of the content."""
        self._sent += len(text.encode())
        scores: list[TokenScore] = []
        while self._waiting and self._waiting[0][0] <= self._sent:
            scores.append(self._waiting.popleft()[1])
        return tuple(scores)

    def rest(self, end: Token | None) -> tuple[TokenScore, ...]:
        """What still waits when an answer has ended by itself or at its limit. Where `every` token
        is told: half a character, or a special token, and the token that ended the answer."""
        if not self._every:
            return self.cut()
        waiting = [score for _, score in self._waiting]
        if end is not None and end.likelihood is not None:
            waiting.append(self._score(end.id, b"", end.likelihood, named=True))
        return tuple(waiting)

    def of_prompt(
        self, text: str, tokens: Sequence[int], likelihoods: Sequence[Likelihood]
    ) -> tuple[TokenScore, ...]:
        """The scores of the tokens of a prompt, one for each, which is `text`. It may have special
        tokens by their names, but not one that the tokenizer put before it."""
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
        """The score of a token that has written `data`, and is `named` as it is spelled."""
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
    """The score of a token of which so many bytes are text, unless it is named otherwise."""
    token, names = score.token[:written], score.names
    if names and not named:
        names = (text_name(token), *names[1:])
    return msgspec.structs.replace(score, token=token, names=names)


def _distinct(ids: Sequence[int], names: Iterable[str]) -> Iterator[str]:
    """The names, but the ids of tokens whose name a likelier one has."""
    taken: set[str] = set()
    for id, name in zip(ids, names, strict=True):
        yield f"token_id:{id}" if name in taken else name
        taken.add(name)


def cut_top(likelihoods: Sequence[Likelihood], most: int) -> list[Likelihood]:
    """The same, with no more than so many of the likeliest tokens of each."""
    return [msgspec.structs.replace(each, top=each.top[:most]) for each in likelihoods]


def rank_prompt(
    tokens: Sequence[int], likelihoods: Sequence[Likelihood], spelling: Callable[[int], bytes]
) -> tuple[PromptScore, ...]:
    """What could stand at each place of a prompt: its own token, then the likeliest others."""

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
