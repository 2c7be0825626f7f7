"""Which tokens' scores belong to which piece of text."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from mlxsrv.events import Likelihood, Token, TokenScore

_NEWLINES = b"\r\n"


class Scores:
    """Scores of the tokens of an answer's content, each given out with the text that it is in.

    Text may wait, for the rest of a character or of a stop string, and some never comes; so tokens
    wait here until the bytes that they write have been sent. Their bytes, joined, are the text's,
    but for an end that a stop string cuts inside a token: that token is left out.

    Args:
        token_bytes: what a token writes.
        strips_space: whether the text lacks the space that its first token begins with.
        every: whether tokens that are no text, or not whole, are told too: see `rest`.
    """

    def __init__(
        self, token_bytes: Callable[[int], bytes], *, strips_space: bool, every: bool = False
    ) -> None:
        self._token_bytes = token_bytes
        self._every = every
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
                self._set_aside([self.score_token(token, likelihood)])
                return
            self._after_block = False
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        self._seen += len(data)
        self._waiting.append((self._seen, self._score(data, likelihood)))

    def leave(self, token: int, likelihood: Likelihood) -> None:
        """What came last is no content after all: `token`, and what waited for it to tell."""
        waiting = [score for _, score in self._waiting]
        self._waiting.clear()
        self._seen = self._sent
        self._set_aside([*waiting, self.score_token(token, likelihood)])
        self._after_block = True

    def _set_aside(self, scores: Sequence[TokenScore]) -> None:
        """Tokens that are in no text are told with the next that is, or never."""
        if self._every:
            self._waiting.extend((self._seen, score) for score in scores)

    def release(self, text: str) -> tuple[TokenScore, ...]:
        """The scores that go with `text`, the next of the content."""
        self._sent += len(text.encode())
        scores: list[TokenScore] = []
        while self._waiting and self._waiting[0][0] <= self._sent:
            scores.append(self._waiting.popleft()[1])
        return tuple(scores)

    def rest(self, end: Token | None) -> tuple[TokenScore, ...]:
        """What still waits at the end, half a character say or a special token, and the token that
        ended the answer. Told only where `every` token is."""
        if not self._every:
            return ()
        waiting = [score for _, score in self._waiting]
        if end is not None and end.likelihood is not None:
            waiting.append(self.score_token(end.id, end.likelihood))
        return tuple(waiting)

    def score_token(self, token: int, likelihood: Likelihood) -> TokenScore:
        """The score of a token of the prompt, which waits for nothing."""
        return self._score(self._token_bytes(token), likelihood)

    def _score(self, data: bytes, likelihood: Likelihood) -> TokenScore:
        top = tuple((self._token_bytes(token), logprob) for token, logprob in likelihood.top)
        return TokenScore(data, likelihood.logprob, top)
