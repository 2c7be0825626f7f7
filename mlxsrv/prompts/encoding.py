"""Incremental encoding: texts to token ids, within a token budget or truncated.

- A text that cannot fit the budget is refused by its bytes, before it is tokenized.
- A long text is tokenized in pieces. Between two pieces other requests may use the tokenizer, and
  the client may have left. The work ends as soon as there are more tokens than the budget has.

The tokens of the pieces are exactly those of the whole: a text is split only where the tokenizer
itself would split it, whatever stands on either side (`split_points`). Where that is not certain
the text is not split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

from mlxsrv.errors import ContextLengthExceeded, InvalidRequest, ServeError
from mlxsrv.prompts.split_points import find_split_points
from mlxsrv.prompts.token_width import max_token_bytes

if TYPE_CHECKING:
    import re

PIECE_CHARACTERS = 32 * 1024
"""Characters of a piece; some ten milliseconds of work."""

_MORE_TOKENS = (0, 1, 3, 8, 32, 128)  # tried beyond a truncation, until the kept ones are the same
_MOST_TRUNCATED = 16  # times the kept tokens, of a text that the tokenizer has to truncate itself
_UNSURE_TOKENS = 64  # at the beginning of a part of a text, which may differ from the whole's

Pause: TypeAlias = Callable[[int], None]
"""Called between two texts or pieces, with the characters of the next one. It may let another
thread use the tokenizer meanwhile, and raises to end the work."""


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


class IncrementalEncoder:
    """Encodes the texts of one model. Not for concurrent use.

    Args:
        wrapper: mlx-lm's tokenizer.

    Attributes:
        pause: called between two texts or pieces.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.pause: Pause = lambda characters: None

    def encode(self, text: str, *, special: bool, budget: TokenBudget | None = None) -> list[int]:
        """Return the ids of a text, with the tokenizer's own tokens around it if `special`.

        A text that fits one piece is not compared with the budget: its tokens are for the caller to
        count.

        Raises:
            ServeError: the budget's refusal.
        """
        if len(text) <= PIECE_CHARACTERS:
            self.pause(len(text))
            return list(self._wrapper.encode(text, add_special_tokens=special))
        if budget is not None:
            self._check_bytes(text, budget)
        if self._split_points is None or self._surroundings is None:
            return self._encode_whole(text, special)
        before, after = self._surroundings if special else ([], [])
        tokens = [*before]
        for piece in _pieces(text, self._split_points):
            self.pause(PIECE_CHARACTERS)
            tokens += self._backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            if budget is not None and len(tokens) > budget.tokens:
                found = f"; the text has more, in {len(text.encode())} bytes"
                raise budget.refusal(found, len(tokens))
        return tokens + after

    def shorten(self, text: str, truncation: Truncation) -> str:
        """Return a part of the text that gives the same tokens once truncated, and hardly more.

        The tokenizer could truncate the whole text, but it makes encodings of all that it cuts off:
        for a pair of texts as many as the product of their numbers.

        Raises:
            InvalidRequest: there is no such part, and the text is long.
        """
        text = self._drop_pieces(text, truncation)
        if self._backend is None:
            return text
        whole = self._backend.encode(text, add_special_tokens=False)
        if len(whole.ids) <= truncation.tokens:
            return text
        right = truncation.side == "right"
        kept = slice(None, truncation.tokens) if right else slice(-truncation.tokens, None)
        for more in _MORE_TOKENS:
            count = min(truncation.tokens + more, len(whole.ids))
            end, begin = whole.offsets[count - 1][1], whole.offsets[-count][0]
            part = text[:end] if right else text[begin:]
            if self._encode_whole(part, special=False)[kept] == whole.ids[kept]:
                return part
        if len(whole.ids) > _MOST_TRUNCATED * truncation.tokens:
            raise InvalidRequest(
                "truncate: a text has no place where it can be cut; shorten it", param="truncate"
            )
        return text

    def _drop_pieces(self, text: str, truncation: Truncation) -> str:
        """Return as many pieces of a long text as have enough tokens, from the kept side on."""
        if len(text) <= PIECE_CHARACTERS or self._split_points is None:
            return text
        pieces, right = _pieces(text, self._split_points), truncation.side == "right"
        kept: list[str] = []
        missing = truncation.tokens
        for piece in pieces if right else reversed([*pieces]):
            self.pause(PIECE_CHARACTERS)
            kept.append(piece)
            missing -= len(self._encode_whole(piece, special=False))
            if missing <= 0:
                break
        return "".join(kept if right else reversed(kept))

    def end(self, text: str, last: int) -> str:
        """Return an end of the text that holds its `last` tokens; all, if that is not known."""
        if len(text) <= PIECE_CHARACTERS or self._max_token_bytes is None:
            return text
        return text[-(last + _UNSURE_TOKENS) * self._max_token_bytes :]

    def _encode_whole(self, text: str, special: bool) -> list[int]:
        if self._backend is None:
            return list(self._wrapper.encode(text, add_special_tokens=special))
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _check_bytes(self, text: str, budget: TokenBudget) -> None:
        """Raise the budget's refusal if a text of so many bytes has more tokens in any case."""
        if self._max_token_bytes is None:
            return
        most, size = budget.tokens * self._max_token_bytes, len(text.encode())
        if size > most:
            found = f", which are at most {most} bytes; the text has {size} bytes"
            raise budget.refusal(found, -(-size // self._max_token_bytes))

    # Facts about the tokenizer, found out when the first long text comes.

    @cached_property
    def _backend(self) -> Any:
        """The tokenizers library's own object, if transformers only calls that; else None."""
        outer = self._wrapper._tokenizer
        kind, backend = type(outer), getattr(outer, "backend_tokenizer", None)
        if backend is None or getattr(outer, "split_special_tokens", False):
            return None
        from transformers import PreTrainedTokenizerFast

        for name in ("encode", "_encode_plus"):
            if getattr(kind, name, None) is not getattr(PreTrainedTokenizerFast, name):
                return None
        # Settings of tokenizer.json that transformers would take back at its first call.
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def _max_token_bytes(self) -> int | None:
        """The bytes of the longest token; no token stands for more characters than that."""
        return None if self._backend is None else max_token_bytes(self._backend)

    @cached_property
    def _split_points(self) -> re.Pattern[str] | None:
        return None if self._backend is None else find_split_points(self._backend)

    @cached_property
    def _surroundings(self) -> tuple[list[int], list[int]] | None:
        """The tokens that are put before and after each text, if they are the same for any."""
        found = [self._find_surroundings(text) for text in ("a", "b c", " d\n")]
        return found[0] if found.count(found[0]) == len(found) else None

    def _find_surroundings(self, text: str) -> tuple[list[int], list[int]] | None:
        inner = self._encode_whole(text, special=False)
        outer = self._encode_whole(text, special=True)
        starts = range(len(outer) - len(inner) + 1)
        found = [at for at in starts if outer[at : at + len(inner)] == inner]
        if len(found) != 1:
            return None
        return outer[: found[0]], outer[found[0] + len(inner) :]


def _pieces(text: str, split_points: re.Pattern[str]) -> Iterator[str]:
    """Yield the text in pieces of at least PIECE_CHARACTERS, split where it may be."""
    begin = 0
    while begin < len(text):
        found = split_points.search(text, begin + PIECE_CHARACTERS)
        end = len(text) if found is None else found.start()
        yield text[begin:end]
        begin = end
