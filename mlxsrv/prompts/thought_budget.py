"""A bound on the thoughts of one answer.

While the model thinks, its tokens are counted by the stages that part the answer, so a thought that
the prompt opened counts like one that the model opens. At the bound the tokens come that close a
thought in the model's own way, one after the other; no others may be drawn then. A grammar that the
answer follows may first complete a character. The answer cannot end there, nor with the next token:
it would be a thought without an answer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from mlxsrv.generation.parameters import Constraint, Mask
from mlxsrv.text.pipeline import TextPipeline


class BudgetConstraint:
    """The thoughts of one answer, which take at most so many tokens.

    Args:
        budget: tokens of thoughts, markers included.
        close: the tokens that close a thought.
        ends: tokens that end an answer.
        text: the stages that part the answer's content from its thoughts.
        inner: what the answer follows besides.
    """

    def __init__(
        self,
        budget: int,
        close: Sequence[int],
        ends: Iterable[int],
        text: TextPipeline,
        inner: Constraint | None = None,
    ) -> None:
        self._budget: float = budget
        self._close = close
        self._ends = [(token >> 5, ~(1 << (token & 31))) for token in ends]
        self._text = text
        self._inner = inner
        self._closing = 0  # how many of the closing tokens have come; past them: one step behind
        self._forced = False
        self._closed = True  # the closing tokens have ended the thought
        self._look()

    @property
    def dormant(self) -> bool:
        return not self._forced and (self._inner is None or self._inner.dormant)

    @property
    def failure(self) -> str | None:
        return None if self._inner is None else self._inner.failure

    def fill(self, mask: Mask) -> None:
        if self._forced and self._closing < len(self._close):
            token = self._close[self._closing]
            if not self._is_refused(token, mask):
                mask[:] = 0
                mask[token >> 5] = _word(1 << (token & 31))
            return
        if self._inner is not None and not self._inner.dormant:
            self._inner.fill(mask)
        if self._forced:
            kept = mask.copy()
            for word, bits in self._ends:
                if word < len(mask):
                    mask[word] &= _word(bits)
            if not mask.any():  # a grammar that only allows the end
                mask[:] = kept

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        self._text.feed((token,))
        if self._forced and self._closing < len(self._close):
            self._closing += token == self._close[self._closing]
            self._closed = not self._text.reasoning
            return
        if self._forced and not self._closed and self._text.reasoning:
            self._budget = math.inf  # these tokens do not end it: they would come for ever
        self._forced = False
        self._look()

    def _is_refused(self, token: int, mask: Mask) -> bool:
        """Whether a closing token has to wait, because the grammar refuses it within a character.
        The mask is then the grammar's."""
        if self._inner is None or self._inner.dormant:
            return False
        self._inner.fill(mask)
        return not int(mask[token >> 5]) >> (token & 31) & 1

    def _look(self) -> None:
        """Begin to close the thought if it has taken its tokens."""
        if self._text.reasoning and self._text.reasoning_tokens >= self._budget:
            self._forced = True
            self._closing = 0


def _word(bits: int) -> int:
    """Return 32 bits as a signed number."""
    bits &= 0xFFFFFFFF
    return bits - (1 << 32) if bits >> 31 else bits
