"""Models as embedding needs them: hidden states at the tokens of texts, and a head's logits.

Used on the device thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxsrv.engine.cache.kv_costs import find_costs
from mlxsrv.engine.embedding.encoders.layers import Encoder
from mlxsrv.engine.embedding.pass_costs import find_pass_costs
from mlxsrv.engine.outcomes import EmbedFacts

_INNER = ("language_model", "model", "transformer", "backbone")
"""Names in mlx-lm's models for the part of a model that is nearer to the layers."""


class EmbeddingModel(Protocol):
    """A model that reads texts."""

    reads_slices: bool
    """Whether a text may be read in several slices."""
    labels: int
    """Logits for a pair of texts; 0: the model makes vectors and judges no pairs."""
    longest: int | None
    """Tokens that it has positions for; None: no bound of its own."""

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        """The hidden states of texts, not evaluated.

        Args:
            tokens: `(rows, length)`, padded on the right.
            mask: `(rows, length)`, false at padding.
            firsts: for pairs, the number of tokens of each pair's first text.

        Returns:
            `(rows, length, width)`.
        """

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        """The logits `(rows, labels)` for hidden states; ValueError if `labels` is 0."""

    def find_facts(self) -> EmbedFacts:
        """The facts that the scheduler needs. Nothing is computed: shapes are enough."""


class EmbeddingDecoder(EmbeddingModel):
    """Runs one of mlx-lm's models without its output head.

    Rows are padded on the right, where neither causal attention nor recurrent layers look. So no
    mask is needed.
    """

    reads_slices = True
    labels = 0
    longest: int | None = None

    def __init__(self, model: Any) -> None:
        self._model = model
        self._inner: Any = None  # found when it is first needed

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        return self.compute_hidden(tokens, None)

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        raise ValueError("it is no cross-encoder")

    def find_facts(self) -> EmbedFacts:
        costs = find_costs(self._model)
        try:
            hidden = self.compute_hidden(mx.array([[0, 0]]), None)
        except Exception:  # it generates text all the same; an order to embed is refused
            return EmbedFacts(slices=True, kv_costs=costs)
        recurrent = any(cost.fixed for cost in costs)
        token, score = find_pass_costs(self._model, hidden.dtype, recurrent=recurrent)
        return EmbedFacts(
            slices=True,
            token_bytes=token,
            score_bytes=score,
            hidden_bytes=hidden.nbytes // 2,
            kv_costs=costs,
        )

    def make_cache(self) -> list[Any]:
        """A KV cache for `read`."""
        cache: list[Any] = make_prompt_cache(self._model)
        return cache

    def compute_hidden(self, tokens: mx.array, cache: list[Any] | None) -> mx.array:
        """The hidden states `(rows, length, width)` after the final norm; `cache` holds what the
        rows have read before.

        Raises ValueError if the model does not give its hidden states.
        """
        if self._inner is None:
            self._inner = find_inner(self._model, tokens[:1])
        return cast(mx.array, self._inner(tokens, cache=cache))


def find_inner(model: Any, tokens: mx.array) -> Any:
    """The part of one of mlx-lm's models that gives the hidden states after the final norm.

    Tried with `tokens` `(1, length)`. Nothing is computed: MLX is lazy, and shapes are enough.

    Raises ValueError if there is none.
    """
    inner = model
    while deeper := next((getattr(inner, name, None) for name in _INNER if name in inner), None):
        inner = deeper
    kind = getattr(model, "model_type", type(model).__name__)
    missing = ValueError(f"mlx-lm's models of type {kind!r} do not give their hidden states")
    if inner is model:
        raise missing
    try:
        hidden = inner(tokens, cache=None)
        shape = hidden.shape
    except Exception as error:
        raise missing from error
    # Some have the output head inside; their output is as wide as the vocabulary.
    if len(shape) != 3 or shape[:2] != tokens.shape or shape[2] == model(tokens).shape[-1]:
        raise missing
    return inner


class EmbeddingEncoder(EmbeddingModel):
    """Runs one of this package's encoders."""

    reads_slices = False  # it looks both ways, so it needs the whole text

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = encoder
        self.labels = encoder.labels
        self.longest = encoder.longest

    def run(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        return self._encoder(tokens, mask, firsts)

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        return self._encoder.classify(hidden, mask)

    def find_facts(self) -> EmbedFacts:
        tokens = mx.array([[0, 0]])
        hidden = self.run(tokens, tokens == 0, [1] if self.labels else None)
        token, score = find_pass_costs(self._encoder, hidden.dtype, recurrent=False)
        return EmbedFacts(
            slices=False,
            labels=self.labels,
            longest=self.longest,
            token_bytes=token,
            score_bytes=score,
            hidden_bytes=hidden.nbytes // 2,
        )
