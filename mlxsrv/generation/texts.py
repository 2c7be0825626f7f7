"""Requests for vectors of texts, for scores of pairs of texts, and for tokens, in no dialect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct

from mlxsrv.generation.outputs import Vectors
from mlxsrv.generation.spec import GenerationSpec

Numbers = np.ndarray[tuple[int], np.dtype[np.float32]]
Side = Literal["left", "right"]


PlacedText = tuple[str, str]
"""A text, with its path in the request for error messages."""

PlacedInput = tuple[str | list[int], str]
"""A text or its token ids, with its path in the request."""


class Cut(Struct, frozen=True):
    """The way in which a text that is too long is cut.

    Attributes:
        side: the side that is cut off.
        tokens: how many tokens are left; None: as many as the model reads.
    """

    side: Side
    tokens: int | None = None


class EmbeddingSpec(Struct, frozen=True, kw_only=True):
    """A request for one vector of each text.

    Attributes:
        model: the name of a model; None: the default model.
        cut: None: a text that is too long is refused.
        input_type, instruction: choose what the model's own files say to write before a text.
        dimensions: the width of the vectors; None: the model's.
        encoding: the form of the vectors in the answer.
        keep_alive: seconds that the model stays loaded without a user after this request; None: as
            before.
    """

    texts: Sequence[PlacedInput]
    model: str | None = None
    cut: Cut | None = None
    input_type: Literal["query", "document"] | None = None
    instruction: str | None = None
    dimensions: int | None = None
    encoding: Literal["float", "base64"] = "float"
    keep_alive: float | None = None


class PairsSpec(Struct, frozen=True, kw_only=True):
    """A request for the scores of pairs: the only text of `ones`, or each, with each of `others`.

    Attributes:
        model: the name of a model; None: the default model.
        cut: None: a pair that is too long is refused.
        compares: whether vectors of the texts are compared where the model scores no pairs.
    """

    ones: Sequence[PlacedText]
    others: Sequence[PlacedText]
    compares: bool
    model: str | None = None
    cut: Cut | None = None

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs, as indices of `ones` and `others`."""
        return [(0 if len(self.ones) == 1 else i, i) for i in range(len(self.others))]


class TextVectors(Struct, frozen=True):
    """The vectors of texts.

    Attributes:
        model: the name of the model that made them.
        vectors: of shape (texts, width).
        tokens: how many tokens the texts have.
        load_seconds: how long the request waited for its model.
    """

    model: str
    vectors: Vectors
    tokens: int
    load_seconds: float


class PairScores(Struct, frozen=True):
    """The scores of pairs of texts.

    Attributes:
        model: the name of the model that made them.
        scores: of shape (pairs,).
        tokens: how many tokens the texts have.
    """

    model: str
    scores: Numbers
    tokens: int


class TokensSpec(Struct, frozen=True, kw_only=True):
    """A request for the token ids of a text or of a chat.

    Attributes:
        model: the name of a model; None: the default model.
        content: a text with its path, or a chat.
        special: the tokens that the tokenizer puts around a text are wanted too.
        spelled: the bytes that each token writes are wanted.
        named: the tokens as the vocabulary spells them are wanted.
    """

    content: PlacedText | GenerationSpec
    model: str | None = None
    special: bool = True
    spelled: bool = False
    named: bool = False


class TextTokens(Struct, frozen=True):
    """The token ids of a text, with what else was wanted of each.

    Attributes:
        context: tokens that the model reads; None: any number.
    """

    ids: Sequence[int]
    context: int | None
    spellings: Sequence[bytes] | None = None
    names: Sequence[str] | None = None


class TokenizerInfo(Struct, frozen=True, kw_only=True):
    """Facts that a client needs to write prompts itself. Null: the tokenizer has none."""

    tokenizer_class: str
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    model_max_length: int | None
    vocab_size: int
