"""Sizes from a model's `config.json` and its tokenizer's settings: context, layers, KV cache.

Families of models spell these keys in many ways. A missing or odd value counts as not given.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from mlxsrv.formats.encoders import ROBERTA
from mlxsrv.formats.files import JSONObject, merged_config, positive_int, text_config

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_context_length",
    "seq_length",
    "seq_len",
    "n_ctx",
)

_KV_BLOCK = 256  # tokens, the step by which mlx-lm's caches grow
# Families with multi-head latent attention whose cache holds the keys and values of every head;
# the caches of others hold the latent vector.
_EXPANDED = frozenset({"deepseek_v2", "minicpm3", "youtu_llm"})
# The size of one layer's recurrent state is the product of these, whatever a family calls them.
_STATES = (
    ("linear_num_value_heads", "linear_value_head_dim", "linear_key_head_dim"),
    ("mamba_n_heads", "mamba_d_head", "mamba_d_state"),
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size"),
    ("num_heads", "head_dim", "state_size"),
    ("intermediate_size", "state_size"),
)


def context_length(
    config: JSONObject, settings: JSONObject, sentences: JSONObject | None
) -> int | None:
    """Return how many tokens the model was made for, or None if the files do not say.

    A tokenizer's `model_max_length` counts only where the config says nothing: Qwen's is that of
    their largest model, others keep a fine-tuning run's, many have none. For embedding models the
    least of all limits counts, as in vLLM: some encoders' configs count positions that no text
    gets, and a model that was trained on short texts says so only in its own settings.

    Args:
        config: `config.json`.
        settings: `tokenizer_config.json`.
        sentences: `sentence_bert_config.json` of an embedding model; None for other models.
    """
    # Cohere's configs have a model_max_length, too, and theirs is the true one.
    length = positive_int(config, "model_max_length", *_CONTEXT_KEYS)
    length = length or positive_int(text_config(config), *_CONTEXT_KEYS)
    if length is not None and config.get("model_type") in ROBERTA:
        # Positions begin behind the padding token's id.
        length -= (positive_int(config, "pad_token_id") or 1) + 1
    from_tokenizer = positive_int(settings, "model_max_length")
    if sentences is not None:
        limits = (length, from_tokenizer, positive_int(sentences, "max_seq_length"))
        return min((limit for limit in limits if limit is not None), default=None)
    if length is None:
        return from_tokenizer
    return max(length, _yarn_length(config), _yarn_length(text_config(config)))


def _yarn_length(config: JSONObject) -> int:
    """Return the tokens that YaRN extends the context to; 0 without YaRN.

    People who turn YaRN on often leave the other keys as they are.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict) or "yarn" not in (rope.get("rope_type"), rope.get("type")):
        return 0
    original = positive_int(rope, "original_max_position_embeddings")
    factor = rope.get("factor")
    if original is None or not isinstance(factor, (int, float)) or not 1 <= factor <= 10**6:
        return 0
    return int(original * factor)


def layer_count(config: JSONObject) -> int | None:
    return positive_int(
        merged_config(config), "num_hidden_layers", "n_layer", "num_layers", "n_layers"
    )


def hidden_size(config: JSONObject) -> int | None:
    return positive_int(merged_config(config), "hidden_size", "n_embd", "d_model")


def kv_block_bytes(config: JSONObject, number_bytes: int = 2) -> int:
    """Estimate the bytes of the first block of a KV cache for one row, recurrent state included.

    Args:
        number_bytes: bytes of a number.
    """
    text = merged_config(config)
    attention_layers, recurrent_layers = _layer_kinds(text)
    state = next((size for keys in _STATES if (size := _product(text, keys))), 0)
    attention = attention_layers * _kv_numbers_per_token(text) * _KV_BLOCK
    return number_bytes * (attention + recurrent_layers * state)


def _layer_kinds(text: JSONObject) -> tuple[int, int]:
    """Return how many layers have attention and how many a recurrent state.

    If the config does not say, every layer counts as both.
    """
    kinds = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(kinds, list):
        named = [kind for kind in kinds if isinstance(kind, str)]
        attention = sum("attention" in kind and "linear" not in kind for kind in named)
        return attention, sum("linear" in kind or "mamba" in kind for kind in named)
    pattern = text.get("hybrid_override_pattern")
    if isinstance(pattern, (str, list)):
        return pattern.count("*"), pattern.count("M")
    layers = layer_count(text) or 0
    interval = positive_int(text, "full_attention_interval", "attn_layer_period")
    if interval is not None:
        return layers // interval, layers - layers // interval
    return layers, layers


def _product(config: JSONObject, keys: Iterable[str]) -> int:
    return math.prod(positive_int(config, key) or 0 for key in keys)


def _kv_numbers_per_token(text: JSONObject) -> int:
    """Return how many numbers one attention layer keeps of one token."""
    heads = positive_int(text, "num_attention_heads", "n_head", "n_heads") or 0
    latent = positive_int(text, "kv_lora_rank")
    if latent is not None:
        rope = positive_int(text, "qk_rope_head_dim") or 0
        if text.get("model_type") in _EXPANDED:
            nope = positive_int(text, "qk_nope_head_dim") or 0
            return heads * (nope + rope + (positive_int(text, "v_head_dim") or nope))
        return latent + rope + 2 * (positive_int(text, "index_head_dim") or 0)
    width = hidden_size(text) or 0
    size = positive_int(text, "head_dim") or (width // heads if heads else 0)
    kept = positive_int(text, "num_key_value_heads", "num_kv_heads", "n_kv_heads") or heads
    return 2 * kept * size if heads else 0
