"""The batch check of a model at its load finds models that give other results in a batch."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import mlx.core as mx
import pytest
from mlx.nn.layers.linear import Linear
from mlx_lm.models.switch_layers import SwitchLinear

from mlxsrv.engine.cache.kv_caches import KVCacheFactory
from mlxsrv.engine.cache.kv_costs import find_costs
from mlxsrv.engine.events import kv_bytes
from mlxsrv.engine.execution.batch_check import check_batching
from tests.support.architectures import make_model


def find(model: Any) -> KVCacheFactory:
    caches = KVCacheFactory(model)
    for _ in check_batching(model, caches):
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


def test_the_note_has_what_was_off_and_with_which_kinds() -> None:
    [afm7] = find(make_model("afm7")).notes
    assert "beside others they are off by " in afm7
    [llama4] = find(make_model("llama4")).notes
    assert llama4.endswith("some of its KV caches (ChunkedKVCache, KVCache) are of one row only")


def test_reserved_tokens_that_are_all_alike_hide_nothing() -> None:
    """Values that are all alike give the same, whatever a query attends to."""
    model = make_model("afm7")
    table = model.model.embedding
    table.weight = mx.concatenate([mx.repeat(table.weight[:1], 110, axis=0), table.weight[110:]])
    assert not find(model).batched


def test_a_trial_stops_between_passes_and_takes_little_memory_beside_the_weights() -> None:
    model = CountedPasses(make_model("qwen3", num_attention_heads=16, num_key_value_heads=16))
    mx.eval(model.parameters())
    caches = KVCacheFactory(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    passes = [model.count for _ in check_batching(model, caches)]
    assert all(later == earlier + 1 for earlier, later in pairwise(passes)), passes
    # Less than two of the steps by which mlx-lm's KV caches grow, whatever the number of texts.
    step = kv_bytes(find_costs(model), 256)
    assert mx.get_peak_memory() - before < 2 * step


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


class OtherwiseCalled:
    """A model that does something more when it is called."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class CountedPasses(OtherwiseCalled):
    """A model that counts them."""

    count = 0

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        self.count += 1
        logits: mx.array = self._model(tokens, cache=cache)
        return logits


class RoundedLogits(OtherwiseCalled):
    """A model whose logits are bfloat16, as those of real ones. (MLX computes experts in float32
    only on a CPU.)"""

    def __call__(self, tokens: mx.array, cache: Any) -> mx.array:
        logits: mx.array = self._model(tokens, cache=cache).astype(mx.bfloat16)
        return logits


def test_an_error_of_a_row_alone_is_not_hidden() -> None:
    model = make_model("qwen3")
    model.layers[1].self_attn.o_proj = Linear(8, 64)
    with pytest.raises(ValueError, match="Last dimension"):
        find(model)
