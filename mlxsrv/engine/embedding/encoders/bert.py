"""BERT, RoBERTa and XLM-RoBERTa (Devlin et al., 1810.04805; Liu et al., 1907.11692).

One model serves all three. In RoBERTa and XLM-RoBERTa positions begin after the padding token's
id, there is one kind of token only, and the classification head is another.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from mlxsrv.engine.embedding.encoders.layers import (
    ArrayFunction,
    Config,
    Encoder,
    TypedModule,
    activation,
    attend,
    count_heads,
    count_layers,
    embedding,
    epsilon,
    linear,
    norm,
    size,
    split_heads,
)
from mlxsrv.formats.encoders import ROBERTA


class Bert(Encoder):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        roberta = config["model_type"] in ROBERTA
        self.longest = size(config, "max_position_embeddings")
        self.embeddings = _Embeddings(config, roberta=roberta)
        if self.embeddings.padding is not None:
            self.longest -= self.embeddings.padding + 1
        self.encoder = _Layers(config)
        if self.labels and roberta:
            self.classifier: ArrayFunction = _RobertaHead(self.width, self.labels)
        elif self.labels:
            self.pooler = _Pooler(self.width)
            self.classifier = linear(self.width, self.labels)

    def __call__(
        self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None = None
    ) -> mx.array:
        self.check_length(tokens)
        states = self.embeddings(tokens, mask, firsts)
        for layer in self.encoder.layer:
            states = layer(states, mask[:, None, None, :])
        return states

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        self.check_head()
        first = hidden[:, 0]
        pooled = self.pooler(first) if "pooler" in self else first
        return self.classifier(pooled)


class _Embeddings(TypedModule):
    """The sum of a token's embedding, its position's, and its kind's: in which text of a pair."""

    def __init__(self, config: Config, *, roberta: bool) -> None:
        super().__init__()
        width = size(config, "hidden_size")
        self.word_embeddings = embedding(size(config, "vocab_size"), width)
        self.position_embeddings = embedding(size(config, "max_position_embeddings"), width)
        kinds = size(config, "type_vocab_size", 2)
        self.token_type_embeddings = embedding(kinds, width)
        self.LayerNorm = norm(width, eps=epsilon(config, "layer_norm_eps", 1e-12))
        self.padding = _padding(config) if roberta else None
        self._pairs = kinds > 1 and not roberta

    def __call__(self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None) -> mx.array:
        places = mx.arange(tokens.shape[1])[None]
        kinds = mx.zeros_like(places)
        if firsts is not None and self._pairs:
            kinds = (places >= mx.array(list(firsts))[:, None]).astype(mx.int32)
        if self.padding is not None:
            # A padding token inside a text has no position either.
            counted = (mask & (tokens != self.padding)).astype(mx.int32)
            places = mx.cumsum(counted, axis=1) * counted + self.padding
        states = self.word_embeddings(tokens) + self.token_type_embeddings(kinds)
        return self.LayerNorm(states + self.position_embeddings(places))


class _Layers(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.layer = [_Layer(config) for _ in range(count_layers(config))]


class _Layer(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, inner = size(config, "hidden_size"), size(config, "intermediate_size")
        self.attention = _Attention(config)
        self.intermediate = _Linear(width, inner)
        self.output = _Residual(config, inner)
        self._activation = activation(config.get("hidden_act", "gelu"))

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        states = self.attention(states, mask)
        return self.output(self._activation(self.intermediate.dense(states)), states)


class _Attention(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.self = _SelfAttention(config)
        self.output = _Residual(config, size(config, "hidden_size"))

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        return self.output(self.self(states, mask), states)


class _SelfAttention(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = size(config, "hidden_size")
        self.heads = count_heads(config)
        self.query = linear(width, width)
        self.key = linear(width, width)
        self.value = linear(width, width)

    def __call__(self, states: mx.array, mask: mx.array) -> mx.array:
        made = (self.query(states), self.key(states), self.value(states))
        queries, keys, values = (split_heads(each, self.heads) for each in made)
        return attend(queries, keys, values, mask)


class _Linear(TypedModule):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = linear(inputs, outputs)


class _Residual(TypedModule):
    """A linear layer, a residual connection, then the norm."""

    def __init__(self, config: Config, inputs: int) -> None:
        super().__init__()
        width = size(config, "hidden_size")
        self.dense = linear(inputs, width)
        self.LayerNorm = norm(width, eps=epsilon(config, "layer_norm_eps", 1e-12))

    def __call__(self, states: mx.array, before: mx.array) -> mx.array:
        return self.LayerNorm(self.dense(states) + before)


class _Pooler(TypedModule):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = linear(width, width)

    def __call__(self, first: mx.array) -> mx.array:
        return mx.tanh(self.dense(first))


class _RobertaHead(TypedModule):
    def __init__(self, width: int, labels: int) -> None:
        super().__init__()
        self.dense = linear(width, width)
        self.out_proj = linear(width, labels)

    def __call__(self, first: mx.array) -> mx.array:
        return self.out_proj(mx.tanh(self.dense(first)))


def _padding(config: Config) -> int:
    """The padding token's id, after which positions begin. Raises ValueError."""
    value = config.get("pad_token_id", 1)
    if type(value) is not int or not 0 <= value < size(config, "max_position_embeddings") - 1:
        raise ValueError(f"'config.json' has {value!r} for pad_token_id")
    return value
