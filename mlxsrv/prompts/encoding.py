"""Texts -> token ids, within limits.

- A text that cannot fit is refused by its bytes, before anything is spent on it.
- A long one is tokenized in pieces, between which its client may leave and others have their turn,
  and which end as soon as there are too many tokens.

The pieces' tokens are exactly those of the whole: a text is cut only where the tokenizer itself
would, whatever stands on either side (`engine.cuts`). Where that is not certain it is not cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from mlxsrv.errors import ContextLengthExceeded, InvalidRequest, ServeError
from mlxsrv.prompts.cuts import find_cuts
from mlxsrv.prompts.widths import widest_token

if TYPE_CHECKING:
    import re

PIECE_CHARACTERS = 32 * 1024
"""Characters; some ten milliseconds of work."""


_MORE = (0, 1, 3, 8, 32, 128)  # tokens beyond a cut, tried until those before are as they were
_MOST_CUT = 16  # times a cut's tokens, of a text that is left to the tokenizer to cut


_UNSURE = 64  # tokens behind a cut: they may be others than without


class TokenBudget(msgspec.Struct, frozen=True):
    """How many tokens a text may have, and where in its request it stands."""

    tokens: int
    param: str

    def refusal(self, found: str) -> ServeError:
        """The error for a text over the limit; `found` says by how much."""
        return ContextLengthExceeded(
            f"this model's maximum context length is {self.tokens} tokens{found}", param=self.param
        )


class Truncation(msgspec.Struct, frozen=True):
    """Texts are cut to at most so many tokens, at one side."""

    tokens: int
    side: Literal["left", "right"]


class Pause(Protocol):
    """Called between two texts or pieces, after so many `characters` since the last call. It may
    let another thread use the tokenizer meanwhile, and raises to end the work."""

    def __call__(self, characters: int = PIECE_CHARACTERS, /) -> None: ...


def _go_on(characters: int = PIECE_CHARACTERS) -> None:
    """Nobody else waits."""


class IncrementalEncoder:
    """The texts of one model -> token ids. Not for concurrent use.

    Args:
        wrapper: mlx-lm's tokenizer.

    Attributes:
        pause: called between two texts or pieces.
    """

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self.pause: Pause = _go_on

    def encode(self, text: str, *, special: bool, limit: TokenBudget | None = None) -> list[int]:
        """The ids of a text, with those that the tokenizer puts around one if `special`.

        Raises:
            ServeError: the limit's refusal. Tokens of a text that fits a piece are for the caller
                to count.
        """
        if len(text) <= PIECE_CHARACTERS:
            self.pause(len(text))
            return list(self._wrapper.encode(text, add_special_tokens=special))
        if limit is not None:
            self._check_bytes(text, limit)
        if self._cuts is None or self._around is None:
            return self._whole(text, special)
        before, after = self._around if special else ([], [])
        tokens = [*before]
        for piece in _pieces(text, self._cuts):
            self.pause()
            tokens += self._backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            if limit is not None and len(tokens) > limit.tokens:
                raise limit.refusal(f"; the text has more, in {len(text.encode())} bytes")
        return tokens + after

    def shorten(self, text: str, cut: Truncation) -> str:
        """A part of the text, hardly longer than the cut has it, whose tokens at the side that is
        kept are those of the whole.

        The tokenizer would cut the whole as well, but make encodings of all that it cuts off: of a
        pair of texts as many as the product of theirs.

        Raises:
            InvalidRequest: there is no such part, and the text is long.
        """
        text = self._skip(text, cut)
        if self._backend is None:
            return text
        whole = self._backend.encode(text, add_special_tokens=False)
        if len(whole.ids) <= cut.tokens:
            return text
        right = cut.side == "right"
        kept = slice(None, cut.tokens) if right else slice(-cut.tokens, None)
        for more in _MORE:
            count = min(cut.tokens + more, len(whole.ids))
            end, begin = whole.offsets[count - 1][1], whole.offsets[-count][0]
            part = text[:end] if right else text[begin:]
            if self._whole(part, special=False)[kept] == whole.ids[kept]:
                return part
        if len(whole.ids) > _MOST_CUT * cut.tokens:
            raise InvalidRequest(
                "truncate: a text has no place where it can be cut; shorten it", param="truncate"
            )
        return text

    def _skip(self, text: str, cut: Truncation) -> str:
        """Whole pieces of a long text, as many as have enough tokens."""
        if len(text) <= PIECE_CHARACTERS or self._cuts is None:
            return text
        pieces, right = _pieces(text, self._cuts), cut.side == "right"
        kept: list[str] = []
        missing = cut.tokens
        for piece in pieces if right else reversed([*pieces]):
            self.pause()
            kept.append(piece)
            missing -= len(self._whole(piece, special=False))
            if missing <= 0:
                break
        return "".join(kept if right else reversed(kept))

    def end(self, text: str, last: int) -> str:
        """So much of a text's end that its `last` tokens are in it; all, if that is not known."""
        if len(text) <= PIECE_CHARACTERS or self.widest is None:
            return text
        return text[-(last + _UNSURE) * self.widest :]

    def _whole(self, text: str, special: bool) -> list[int]:
        if self._backend is None:
            return list(self._wrapper.encode(text, add_special_tokens=special))
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids)

    def _check_bytes(self, text: str, limit: TokenBudget) -> None:
        """Raises the limit's refusal if the text has too many tokens whatever they are."""
        if self.widest is None:
            return
        most, size = limit.tokens * self.widest, len(text.encode())
        if size > most:
            raise limit.refusal(f", which are at most {most} bytes; the text has {size} bytes")

    # What is known of the tokenizer; found out when the first long text comes.

    @cached_property
    def _backend(self) -> Any:
        """The tokenizers library's own, if transformers does nothing but call it; else None."""
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
    def widest(self) -> int | None:
        """Bytes of the longest token, if known; more characters no token stands for."""
        return None if self._backend is None else widest_token(self._backend)

    @cached_property
    def _cuts(self) -> re.Pattern[str] | None:
        return None if self._backend is None else find_cuts(self._backend)

    @cached_property
    def _around(self) -> tuple[list[int], list[int]] | None:
        """The tokens that are put before and after each text, if they are the same of any."""
        found = [self._surroundings(text) for text in ("a", "b c", " d\n")]
        return found[0] if found.count(found[0]) == len(found) else None

    def _surroundings(self, text: str) -> tuple[list[int], list[int]] | None:
        inner = self._whole(text, special=False)
        outer = self._whole(text, special=True)
        starts = range(len(outer) - len(inner) + 1)
        found = [at for at in starts if outer[at : at + len(inner)] == inner]
        if len(found) != 1:
            return None
        return outer[: found[0]], outer[found[0] + len(inner) :]


def _pieces(text: str, cuts: re.Pattern[str]) -> Iterator[str]:
    """The text in pieces of at least PIECE_CHARACTERS characters, cut where it may be."""
    begin = 0
    while begin < len(text):
        cut = cuts.search(text, begin + PIECE_CHARACTERS)
        end = len(text) if cut is None else cut.start()
        yield text[begin:end]
        begin = end
