"""Texts to token ids, within a token budget or truncated.

- A text that cannot fit the budget is refused by its bytes, before it is tokenized.
- A long text is tokenized in pieces. So the work ends soon after nobody waits for it any more, or
  there are more tokens than the budget has. It also bounds memory: for each byte of a text the
  tokenizer takes a hundred or more.

The tokens of the pieces are exactly those of the whole: a text is cut only behind a word, and only
where the text around that place gives the same tokens in two parts as in one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, Literal

import msgspec

from mlxsrv.errors import ContextLengthExceeded, InvalidRequest, ServeError
from mlxsrv.prompts.tokenizer_steps import max_token_bytes

PIECE_CHARACTERS = 32 * 1024
"""Characters of a piece; some ten milliseconds of work."""

_PLACE = re.compile(r"(?<=\w)[ \n]")  # where a text may be cut
_AROUND = 256  # characters on each side of a cut, more than a tokenizer looks ahead or back
_UNSURE_TOKENS = 64  # at the end of a part of a text, which may differ from the whole's


class TokenBudget(msgspec.Struct, frozen=True):
    """The number of tokens that a text may have, and where in its request the text stands."""

    tokens: int
    param: str

    def refusal(self, found: str, tokens: int) -> ServeError:
        """Return the error for a text over the budget.

        Args:
            found: says by how much.
            tokens: how many tokens the text has at least.
        """
        return ContextLengthExceeded(
            f"this model's maximum context length is {self.tokens} tokens{found}",
            param=self.param,
            tokens=tokens,
            most=self.tokens,
        )


class Truncation(msgspec.Struct, frozen=True):
    """Texts are truncated to at most so many tokens, at one side."""

    tokens: int
    side: Literal["left", "right"]


class TextEncoder:
    """Encodes the texts of one model. Any number of threads may encode at the same time.

    The tokenizers library only reads its object while it encodes. transformers does not: each call
    sets that object's truncation and padding. So transformers is passed by, except for tokenizers
    that are Python code; of these calls there is one at a time.

    Args:
        tokenizer: transformers' tokenizer.
        check: called before each text or piece. It raises to end the work.
    """

    def __init__(self, tokenizer: Any, check: Callable[[], None] = lambda: None) -> None:
        self._tokenizer = tokenizer
        self._check = check
        self._backend = _find_backend(tokenizer)
        self._python_calls = threading.Lock()

    def encode(self, text: str, *, special: bool, budget: TokenBudget | None = None) -> list[int]:
        """Return the ids of a text, with the tokenizer's own tokens around it if `special`.

        A text that fits one piece is not compared with the budget: its tokens are for the caller to
        count.

        Raises:
            ServeError: the budget's refusal.
        """
        if len(text) <= PIECE_CHARACTERS:
            return self._encode(text, special)
        if budget is not None:
            self._check_bytes(text, budget)
        if self._backend is None:
            return self._encode(text, special)
        before, after = self._around if special else ([], [])
        ids = [*before]
        for piece in self._pieces(text):
            ids += self._encode(piece)
            if budget is not None and len(ids) > budget.tokens:
                found = f"; the text has more, in {len(text.encode())} bytes"
                raise budget.refusal(found, len(ids))
        return ids + after

    def encode_end(self, text: str, tokens: int, *, special: bool) -> list[int]:
        """Return the last `tokens` ids of what `encode` would return, or all if it has fewer."""
        before, after = self._around if special else ([], [])
        return [*before, *self._encode_part(text, Truncation(tokens, "left")), *after][-tokens:]

    def encode_truncated(self, text: str, truncation: Truncation, *, special: bool) -> list[int]:
        """Return the ids of a text that is truncated inside the tokenizer's own tokens.

        Raises:
            InvalidRequest: the truncation leaves no room beside these tokens.
        """
        before, after = self._around if special else ([], [])
        room = _room(truncation, len(before + after))
        return [*before, *_cut(self._encode_part(text, room), room.tokens, room), *after]

    def encode_pair(
        self, first: str, second: str, budget: TokenBudget | None, truncation: Truncation | None
    ) -> tuple[list[int], int]:
        """Return the ids of two texts as one input of a cross-encoder, and how many of them are the
        first text's; all, if the model does not tell the texts apart.

        Raises:
            ServeError: the budget's refusal.
            InvalidRequest: the truncation leaves no room beside the tokenizer's own tokens.
        """
        before, between, after, overlap = self._around_pair
        if truncation is None:
            one, other = (self.encode(t, special=False, budget=budget) for t in (first, second))
        else:
            room = _room(truncation, len(before + between + after))
            one, other = (self._encode_part(text, room) for text in (first, second))
            keep_one, keep_other = _longest_first(len(one), len(other), room.tokens)
            one, other = _cut(one, keep_one, room), _cut(other, keep_other, room)
        start = len(before) + len(one) + len(between)
        ids = [*before, *one, *between, *other, *after]
        return ids, len(ids) if overlap is None else start - overlap

    # Pieces.

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield the text in pieces of at least PIECE_CHARACTERS, cut where it may be."""
        begin, at = 0, PIECE_CHARACTERS
        while self._backend is not None and (found := _PLACE.search(text, at)):
            end = found.start()
            following = self._find_following(text, end)
            if following is None:
                at = end + (end - begin) // 8 + 1  # for some tokenizers there is no such place
            else:
                yield text[begin:end]
                begin, at = following, following + PIECE_CHARACTERS
        yield text[begin:]

    def _find_following(self, text: str, end: int) -> int | None:
        """Return where the next piece begins if one ends at `end`; None if none may end there.

        It begins with the space there, or behind it where the tokenizer puts one before each text.
        """
        left, stop = text[max(end - _AROUND, 0) : end], end + _AROUND
        whole, first = self._encode(left + text[end:stop]), self._encode(left)
        starts = (end, end + 1)
        return next((s for s in starts if first + self._encode(text[s:stop]) == whole), None)

    def _encode_part(self, text: str, truncation: Truncation) -> list[int]:
        """Return the ids of so much of a text that it has all that truncation keeps."""
        right = truncation.side == "right"
        if self._max_token_bytes is not None:
            most = (truncation.tokens + _UNSURE_TOKENS) * self._max_token_bytes
            text = text[:most] if right else text[-most:]
        pieces = self._pieces(text)
        ids: list[int] = []
        for piece in pieces if right else reversed([*pieces]):
            ids = ids + self._encode(piece) if right else self._encode(piece) + ids
            if len(ids) >= truncation.tokens:
                break
        return ids

    def _encode(self, text: str, special: bool = False) -> list[int]:
        if self._backend is None:
            with self._python_calls:
                self._check()  # after the wait: nobody may want the tokens by then
                return list(self._tokenizer.encode(text, add_special_tokens=special))
        self._check()
        # Of the library's calls this one does not hold the GIL, nor does it note offsets.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _check_bytes(self, text: str, budget: TokenBudget) -> None:
        """Raise the budget's refusal if a text of so many bytes has more tokens in any case."""
        if self._max_token_bytes is None:
            return
        most, size = budget.tokens * self._max_token_bytes, len(text.encode())
        if size > most:
            found = f", which are at most {most} bytes; the text has {size} bytes"
            raise budget.refusal(found, -(-size // self._max_token_bytes))

    # Facts about the tokenizer, found out when they are needed.

    @cached_property
    def _max_token_bytes(self) -> int | None:
        """The bytes of the longest token; no token stands for more characters than that."""
        return None if self._backend is None else max_token_bytes(self._backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts before and after each text."""
        before, after = _split(self._encode("a", special=True), self._encode("a"))
        return before, after

    @cached_property
    def _around_pair(self) -> tuple[list[int], list[int], list[int], int | None]:
        """The tokens before, between and after two texts, and how many of those between belong to
        the second; None if the model does not tell the texts apart."""
        with self._python_calls:
            both = self._tokenizer("a", "b", return_token_type_ids=True)
        before, rest = _split(both["input_ids"], self._encode("a"))
        between, after = _split(rest, self._encode("b"))
        types = list(both["token_type_ids"])
        start = len(both["input_ids"]) - len(after) - len(self._encode("b"))
        return before, between, after, start - types.index(1) if 1 in types else None


def _find_backend(tokenizer: Any) -> Any:
    """Return the tokenizers library's own object if transformers only calls that; else None."""
    kind, backend = type(tokenizer), getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or getattr(tokenizer, "split_special_tokens", False):
        return None
    from transformers import PreTrainedTokenizerFast

    for name in ("encode", "_encode_plus"):
        if getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name):
            return None
    # Settings of tokenizer.json that transformers would take back at its first call.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _split(outer: list[int], inner: list[int]) -> tuple[list[int], list[int]]:
    """Return the ids before and after `inner` in `outer`."""
    starts = range(len(outer) - len(inner) + 1)
    start = next(at for at in starts if outer[at : at + len(inner)] == inner)
    return outer[:start], outer[start + len(inner) :]


def _cut(ids: list[int], count: int, truncation: Truncation) -> list[int]:
    return ids[:count] if truncation.side == "right" else ids[max(len(ids) - count, 0) :]


def _room(truncation: Truncation, own: int) -> Truncation:
    """Return what truncation leaves for texts beside the tokenizer's `own` tokens."""
    if truncation.tokens <= own:
        raise InvalidRequest(
            f"truncate_prompt_tokens: {truncation.tokens} leave no room for text, since the "
            f"model's tokenizer adds {own} of its own",
            param="truncate_prompt_tokens",
        )
    return Truncation(truncation.tokens - own, truncation.side)


def _longest_first(one: int, other: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, as the tokenizers library decides it."""
    short = min(one, other)
    long = max(short, room - short)
    if short + long > room:
        short, long = room // 2, room - room // 2
    return (short, long) if one <= other else (long, short)
