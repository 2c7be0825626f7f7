"""ModernBERT (Warner et al., 2412.13663): rotary positions and gated layers.

Attention is global in some layers, local (to near tokens) in the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

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
    rope,
    size,
    split_heads,
)

_KINDS = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}
"""Kinds of layers: the key of each one's rotary base in older configs, and its default."""

Attend: TypeAlias = Callable[[mx.array, mx.array, mx.array], mx.array]
"""Attention of queries, keys and values, with the mask of a kind of layers."""

_MOST_BLOCKS = 4  # a text of more is cut in blocks for local attention


class ModernBert(Encoder):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        kinds = _layer_kinds(config)
        self.embeddings = _Embeddings(config)
        self.layers = [_Layer(config, kind, first=i == 0) for i, kind in enumerate(kinds)]
        self.final_norm = _norm(config)
        self._reach = size(config, "local_attention", 128) // 2
        self._mean = config.get("classifier_pooling", "cls") == "mean"
        if self.labels:
            self.head = _Head(config)
            self.classifier = linear(self.width, self.labels)

    def __call__(
        self, tokens: mx.array, mask: mx.array, firsts: Sequence[int] | None = None
    ) -> mx.array:
        attention = Attention(mask, self._reach)
        states = self.embeddings(tokens)
        for layer in self.layers:
            states = layer(states, attention.locally if layer.local else attention.globally)
        return self.final_norm(states)

    def classify(self, hidden: mx.array, mask: mx.array) -> mx.array:
        self.check_head()
        pooled = hidden[:, 0]
        if self._mean:
            real = mx.where(mask[:, :, None], hidden.astype(mx.float32), 0)
            pooled = real.sum(1) / mask.sum(1, keepdims=True)
        return self.classifier(self.head(pooled.astype(hidden.dtype)))


class Attention:
    """The masks that say which tokens see which, for all layers of one pass.

    Args:
        mask: `(rows, length)`, false at padding.
        reach: how far a local layer looks to either side, in tokens.
    """

    def __init__(self, mask: mx.array, reach: int) -> None:
        self._global = mask[:, None, None, :]
        self._length = mask.shape[1]
        self._block = max(reach, 1)
        self._blocks = -(-self._length // self._block)
        self._cuts = self._blocks > _MOST_BLOCKS
        if self._cuts:
            seen = self._surround(mask[:, None, :, None])[..., 0]
            places = mx.arange(3 * self._block)
            apart = mx.abs(places[self._block : 2 * self._block, None] - places)
        else:
            seen = mask[:, None]
            places = mx.arange(self._length)
            apart = mx.abs(places[:, None] - places)
        # A token always sees itself: padding that sees nothing may become NaN, and NaN with weight
        # 0 is NaN for the others.
        self._local = (seen[:, :, None] & (apart <= reach)) | (apart == 0)

    def globally(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend to the whole text. Shapes as in `attend`."""
        return attend(queries, keys, values, self._global)

    def locally(self, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Every token sees those in reach. A long text is cut in blocks as long as the reach, and
        each block sees itself and its neighbours: the cost grows with the length, not its square.
        """
        if not self._cuts:
            return attend(queries, keys, values, self._local)
        rows = queries.shape[0]
        cut = self._cut(self._pad(queries, 0), 0, self._blocks)
        found = attend(cut, self._surround(keys), self._surround(values), self._local)
        return found.reshape(rows, self._blocks * self._block, -1)[:, : self._length]

    def _pad(self, states: mx.array, around: int) -> mx.array:
        """`(rows, heads, length, size)` padded to whole blocks, with `around` more on each side."""
        missing = self._blocks * self._block - self._length
        edge = around * self._block
        return mx.pad(states, [(0, 0), (0, 0), (edge, missing + edge), (0, 0)])

    def _cut(self, states: mx.array, first: int, count: int) -> mx.array:
        """Cut `count` blocks of each text, from block `first` on, out of states `(rows, heads,
        length, size)`. Returns them as rows of their own, `(rows * count, heads, block, size)`."""
        rows, heads, _, size = states.shape
        begin, end = first * self._block, (first + count) * self._block
        blocks = states[:, :, begin:end].reshape(rows, heads, count, self._block, size)
        return blocks.transpose(0, 2, 1, 3, 4).reshape(rows * count, heads, self._block, size)

    def _surround(self, states: mx.array) -> mx.array:
        """Each block with its neighbours: `(rows * blocks, heads, 3 * block, size)`."""
        padded = self._pad(states, 1)
        return mx.concatenate([self._cut(padded, i, self._blocks) for i in range(3)], axis=2)


class _Embeddings(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = embedding(size(config, "vocab_size"), size(config, "hidden_size"))
        self.norm = _norm(config)

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.norm(self.tok_embeddings(tokens))


class _Layer(TypedModule):
    def __init__(self, config: Config, kind: str, *, first: bool) -> None:
        super().__init__()
        self.local = kind == "sliding_attention"
        if not first:  # the embeddings have been normed already
            self.attn_norm = _norm(config)
        self.attn = _Attention(config, _theta(config, kind))
        self.mlp_norm = _norm(config)
        self.mlp = _Gated(config)

    def __call__(self, states: mx.array, attention: Attend) -> mx.array:
        normed = self.attn_norm(states) if "attn_norm" in self else states
        states = states + self.attn(normed, attention)
        return states + self.mlp(self.mlp_norm(states))


class _Attention(TypedModule):
    def __init__(self, config: Config, theta: float) -> None:
        super().__init__()
        width, bias = size(config, "hidden_size"), _flag(config, "attention_bias")
        self.heads = count_heads(config)
        self.rope = rope(width // self.heads, base=theta)
        self.Wqkv = linear(width, 3 * width, bias=bias)
        self.Wo = linear(width, width, bias=bias)

    def __call__(self, states: mx.array, attention: Attend) -> mx.array:
        made = mx.split(self.Wqkv(states), 3, axis=-1)
        queries, keys, values = (split_heads(each, self.heads) for each in made)
        return self.Wo(attention(self.rope(queries), self.rope(keys), values))


class _Gated(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width, bias = size(config, "hidden_size"), _flag(config, "mlp_bias")
        inner = size(config, "intermediate_size")
        self.Wi = linear(width, 2 * inner, bias=bias)
        self.Wo = linear(inner, width, bias=bias)
        self._activation = activation(config.get("hidden_activation", "gelu"))

    def __call__(self, states: mx.array) -> mx.array:
        inputs, gate = mx.split(self.Wi(states), 2, axis=-1)
        return self.Wo(self._activation(inputs) * gate)


class _Head(TypedModule):
    def __init__(self, config: Config) -> None:
        super().__init__()
        width = size(config, "hidden_size")
        self.dense = linear(width, width, bias=_flag(config, "classifier_bias"))
        self.norm = _norm(config)
        self._activation = activation(config.get("classifier_activation", "gelu"))

    def __call__(self, pooled: mx.array) -> mx.array:
        return self.norm(self._activation(self.dense(pooled)))


def _norm(config: Config) -> ArrayFunction:
    width, eps = size(config, "hidden_size"), epsilon(config, "norm_eps", 1e-5)
    return norm(width, eps=eps, bias=_flag(config, "norm_bias"))


def _layer_kinds(config: Config) -> list[str]:
    """Each layer's kind. Raises ValueError."""
    count, listed = count_layers(config), config.get("layer_types")
    if listed is None:
        every = size(config, "global_attn_every_n_layers", 3)
        return ["sliding_attention" if i % every else "full_attention" for i in range(count)]
    if not isinstance(listed, list) or len(listed) != count or set(listed) - set(_KINDS):
        raise ValueError("'config.json' has layer_types that are not known")
    return listed


def _theta(config: Config, kind: str) -> float:
    """The base of a layer's rotary positions. Raises ValueError."""
    key, default = _KINDS[kind]
    kinds = config.get("rope_parameters")
    own = kinds.get(kind) if isinstance(kinds, dict) else None
    value = own.get("rope_theta") if isinstance(own, dict) else None
    value = config.get(key) if value is None else value
    if value is None and kind == "sliding_attention":
        value = config.get("global_rope_theta") if key in config else None
    value = default if value is None else value
    if type(value) not in (int, float) or not value > 0:
        raise ValueError(f"'config.json' has {value!r} for {key}")
    return float(value)


def _flag(config: Config, key: str) -> bool:
    return config.get(key) is True
