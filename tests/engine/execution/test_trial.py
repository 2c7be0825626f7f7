"""The trial of a model at its load finds what no batch can be trusted with."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx_lm.models.switch_layers import SwitchLinear

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.execution.trial import try_rows
from tests.support.architectures import make_model


def find(model: Any) -> KVCacheFactory:
    caches = KVCacheFactory(model)
    for _ in try_rows(model, caches):
        pass
    return caches


def make_phi3small() -> Any:
    model = make_model("phi3small")
    model._dummy_tokenizer_ids = mx.array([0])  # those of its real vocabulary are not here
    return model


def test_rows_decode_alone_where_a_model_is_wrong_beside_others() -> None:
    wrong = {
        "afm7": make_model("afm7"),
        "gpt_bigcode": make_model("gpt_bigcode"),
        "minimax_m3_vl": make_model("minimax_m3_vl"),
        "phi3small": make_phi3small(),
    }
    for name, model in wrong.items():
        caches = find(model)
        assert (caches.batched, caches.pads, caches.group_masks) == (False, False, False), name
        [note] = caches.notes
        assert note.startswith("max_concurrency: rows of this model decode one at a time"), name


@pytest.mark.parametrize(("heads", "groups"), [((4, 2), True), ((6, 3), True), ((4, 4), False)])
def test_masks_have_a_dimension_more_where_queries_are_grouped(
    heads: tuple[int, int], groups: bool
) -> None:
    """Also if there are as many heads of keys as rows: then a mask that is wrong is no error."""
    queries, keys = heads
    caches = find(make_model("gemma2", num_attention_heads=queries, num_key_value_heads=keys))
    assert (caches.batched, caches.pads, caches.group_masks) == (True, True, groups)


@pytest.mark.parametrize("weight", [1.0, 0.01])
def test_padding_is_found_in_states_that_logits_hardly_show(weight: float) -> None:
    model = make_model("rwkv7")
    for layer in model.layers:
        layer.attn.o_proj.weight *= weight
        layer.ffn.value.weight *= weight
    caches = find(model)
    assert (caches.batched, caches.pads) == (True, False)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3", {"num_hidden_layers": 12}),
        ("qwen3_moe", {"num_hidden_layers": 12, "num_experts": 16}),
        ("qwen3_next", {}),
    ],
)
def test_rounding_is_not_taken_for_an_error(
    monkeypatch: pytest.MonkeyPatch, name: str, sizes: dict[str, int]
) -> None:
    """As on a GPU, where another number of rows takes another kernel: products are off by the last
    bit of a bfloat16, and logits have such bits."""
    for kind in (Linear, SwitchLinear):
        monkeypatch.setattr(kind, "__call__", round_otherwise(kind.__call__))
    model = make_model(name, **sizes)
    mx.random.seed(1)
    caches = find(RoundedLogits(model))
    assert (caches.batched, caches.pads, caches.notes) == (True, True, ())


def round_otherwise(multiply: Any) -> Any:
    def call(layer: Any, *given: Any, **more: Any) -> mx.array:
        product = multiply(layer, *given, **more)
        size = mx.sqrt((product * product).mean(axis=-1, keepdims=True))
        rounded: mx.array = product + 2**-9 * size * mx.random.normal(product.shape)
        return rounded

    return call


class RoundedLogits:
    """A model whose logits are bfloat16, as those of real ones. (MLX computes experts in float32
    only on a CPU.)"""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache).astype(mx.bfloat16)
        return logits


def test_an_error_of_a_row_alone_is_not_hidden() -> None:
    model = make_model("qwen3")
    model.layers[1].self_attn.o_proj = Linear(8, 64)
    with pytest.raises(ValueError, match="Last dimension"):
        find(model)
