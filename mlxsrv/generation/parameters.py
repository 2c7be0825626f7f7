"""Settings of one row of a batch: sampling, bans, steering, constraint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
import numpy as np


class DryPenalty(msgspec.Struct, frozen=True):
    """A penalty of `multiplier * base ** (length - allowed_length)` for the token that would go on
    with a repetition of at least `allowed_length` tokens.

    Attributes:
        last_n: only so many of the last tokens count; -1: all.
        breakers: tokens at which a repetition ends.
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    last_n: int = -1
    breakers: tuple[int, ...] = ()


class Sampling(msgspec.Struct, frozen=True):
    """Settings by which one row's next token is drawn from its logits. `temperature` 0 is greedy.

    `frequency_penalty` and `presence_penalty` count the row's own tokens, `repetition_penalty`
    (1: none) the prompt's as well. `logit_bias` holds (token id, what to add to its logit).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    dry: DryPenalty | None = None

    @property
    def changes_logits(self) -> bool:
        """Whether biases or penalties change the logits."""
        return bool(
            self.logit_bias
            or self.repetition_penalty != 1
            or self.frequency_penalty
            or self.presence_penalty
            or self.dry is not None
        )


class RepetitionLimit(msgspec.Struct, frozen=True):
    """The repetition at which an answer ends: its last tokens are `count` times the same sequence,
    of at least `shortest` and at most `longest` tokens. No answer ends if `longest` is 0."""

    longest: int
    shortest: int = 1
    count: int = 2


class Bans(msgspec.Struct, frozen=True):
    """Tokens that a row may not draw, unless nothing else is left.

    - `min_tokens`: no end token before the row has drawn this many others.
    - `allowed`: no token but these; empty: no limit.
    - `words`: the last token of one of these never follows its other tokens.
    """

    min_tokens: int = 0
    allowed: tuple[int, ...] = ()
    words: tuple[tuple[int, ...], ...] = ()

    def bind(self, drawn: int) -> bool:
        """Whether a token may be banned from a row that has drawn so many, or later."""
        return bool(self.allowed or self.words) or drawn < self.min_tokens


SteeringMode = Literal["additive", "clamp"]


class Steering(msgspec.Struct, frozen=True):
    """Changes to one row's hidden states; the batch's other rows are not touched.

    `values` are (feature, strength) of the SAE of that attachment, sorted. `additive` adds each
    feature's direction, multiplied by its strength. `clamp` adds as much of it as brings the
    feature's activation to that value. `vectors` are (control vector, scale), sorted.
    """

    attachment: int = 0
    mode: SteeringMode = "additive"
    values: tuple[tuple[int, float], ...] = ()
    vectors: tuple[tuple[str, float], ...] = ()


class Grammar(msgspec.Struct, frozen=True):
    """The text that a row must write: a constraint is made of it where the row is admitted.

    Attributes:
        text: the grammar, as llguidance's compiler takes it; empty: any text.
        by_characters: it may have a terminal for each character, so the parser needs more room.
        openers: the grammar is that of tool calls, each from one of these texts on, and all other
            text is free; none: it is that of the whole answer.
        thinking: the prompt has left a think block open, so the answer begins with thoughts. They
            are free.
        budget: tokens that thoughts may take; None: no bound.
    """

    text: str = ""
    by_characters: bool = False
    openers: tuple[str, ...] = ()
    thinking: bool = False
    budget: int | None = None


Mask = np.ndarray[tuple[int], np.dtype[np.int32]]


class Constraint(Protocol):
    """The tokens that a row may draw next: a grammar in some state. Used by one thread."""

    @property
    def dormant(self) -> bool:
        """Whether any token may come next, so that `fill` need not be called."""

    @property
    def failure(self) -> str | None:
        """Why it cannot go on; its row fails then."""

    def fill(self, mask: Mask) -> None:
        """Clear the bits of the tokens that may not come next.

        Args:
            mask: 32 tokens a word, the lowest bit first; all bits are set when it comes.
        """

    def accept(self, token: int) -> None:
        """Go on to the state after `token`."""


MakeConstraint = Callable[[Grammar], Constraint]
"""Makes the constraint of one row of one model, at its beginning. Any thread may call it."""
