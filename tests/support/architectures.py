"""A tiny model of every architecture of mlx-lm, made in code.

Its config is made of the fields of the module's `ModelArgs`: `SIZES` has values for those that
several modules have, and `OWN` for those that a module has in a way of its own.
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.models

from tests.support.tiny import (
    VOCABULARY,
    WINDOW,
    find_end_tokens,
    make_tokenizer,
    make_weights,
    write_folder,
)

_EMBEDDINGS = tuple(
    f"{name}.weight" for name in ("embed_tokens", "embeddings", "embedding", "embed", "wte")
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "hidden_dim", "n_embd", "d_model", "model_dim"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("num_transformer_layers",), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    "num_attention_groups": 2,
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "n_inner", "block_dim"), 128),
    **dict.fromkeys(("intermediate_size_mlp", "ff_intermediate_size"), 128),
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "block_size"), 4096),
    "model_max_length": 4096,
    **dict.fromkeys(("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "post_norm_eps"), 1e-5),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "rope_local_base_freq"), 10000.0),
    "swa_rope_theta": 10000.0,
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias"), False),
    **dict.fromkeys(("conv_bias", "use_conv_bias", "use_qk_norm", "norm_topk_prob"), True),
    "tie_word_embeddings": False,
    # Experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    "moe_num_experts": 4,
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "num_experts_per_token", "moe_k"), 2),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "moe_layer_freq"), 1),
    "routed_scaling_factor": 1.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    # Latent attention, and indices of tokens.
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 16),
    **dict.fromkeys(("index_head_dim",), 16),
    "index_n_heads": 2,
    "index_topk": 8,
    # Recurrent layers.
    **dict.fromkeys(("conv_kernel", "conv_L_cache", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("mamba_d_conv", "conv1d_width", "conv_window", "short_conv_kernel_size"), 4),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 16),
    "time_step_rank": 4,
    "time_step_limit": [0.0, 100.0],
    "mamba_expand": 2,
    **dict.fromkeys(("mamba_num_heads", "mamba_n_heads"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    "mamba_d_ssm": 128,
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "partial_rotary_factor": 0.5,
    **dict.fromkeys(("layer_group_size", "full_attention_interval"), 2),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), 1.0),
    "attention_multiplier": 0.25,
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 8),
    "decay_low_rank_dim": 8,
    # Layers of several kinds.
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window_pattern": 2,
    "group_norm_size": 1,
    # Multipliers, and what is rarely anything else.
    **dict.fromkeys(("scale_depth", "scale_emb"), 1.0),
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap"), 30.0),
    "dim_model_base": 64,
    "rope_scaling": None,
}

UNUSABLE = {
    "bitnet": "its kernel is for Metal alone",
    "muse_spark": "its kernel is for Metal and CUDA alone",
    "olmo": "mlx-lm's module needs the package ai2-olmo",
    "phi3small": "it adds its mask as numbers, so its text depends on the slices of a prompt",
    "prism_hadamard_qwen35": "it is qwen3_5 with weights of 2 bits, packed by another program",
}
"""Architectures that cannot be made here, and why."""

TEXT = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "kimi_k25": "deepseek_v3",
    "lfm2-vl": "lfm2",
    "mistral3": "ministral3",
    "pixtral": "llama",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "qwen2_vl": "qwen2",
    "qwen3_5_moe": "qwen3_5",
}
YARN = {
    "type": "yarn",
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
KINDS = {"sliding_attention": PLAIN, "full_attention": PLAIN}
_LINEAR = {
    "kda_layers": [1],
    "full_attn_layers": [2],
    "num_heads": 4,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
}
OWN: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 1, "num_layers": 3},
    "apertus": {"post_norm": True, "qk_norm": True},
    "baichuan_m1": {
        "sliding_window_layers": [0],
        "num_swa_attention_heads": 4,
        "num_swa_key_value_heads": 2,
        "conv_window": 2,
    },
    "bailing_moe_linear": {"topk_group": 1},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    },
    "deepseek_v2": {"rope_scaling": YARN},
    "exaone4": {"sliding_window_pattern": "LG", "rope_scaling": None},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "gear": {
        "layer_types": ["conv_mixer", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
    },
    "gemma3n": {
        "num_kv_shared_layers": 1,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "hidden_size_per_layer_input": 16,
        "altup_num_inputs": 2,
        "altup_coef_clip": 120.0,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 16,
        "global_head_dim": 32,
    },
    "glm_moe_dsa": {"rope_parameters": PLAIN},
    "gpt_neox": {"rotary_pct": 0.5},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hunyuan": {
        "use_mixed_mlp_moe": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "rope_scaling": {"alpha": 1.0, "type": "dynamic", "factor": 1.0},
    },
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
    },
    "kimi_k3": {"linear_attn_config": _LINEAR, "hidden_act": "situ"},
    "kimi_linear": {"linear_attn_config": _LINEAR},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "block_ff_dim": 128,
        "block_dim": 64,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "use_expert_bias": True},
    "llama4": {
        "attention_chunk_size": WINDOW,
        "interleave_moe_layer_step": 2,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 1,
    },
    "llama4_text": {"no_rope_layers": [1, 0]},
    "longcat_flash": {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "longcat_flash_ngram": {
        "zero_expert_num": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "ngram_vocab_size_ratio": 3,
    },
    "mellum": {"rope_parameters": KINDS},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "minimax_m3_vl": {
        "moe_layer_freq": [0, 1],
        "sparse_attention_config": {
            "sparse_num_index_heads": 2,
            "sparse_index_dim": 16,
            "sparse_block_size": 4,
            "sparse_topk_blocks": 2,
            "sparse_local_block": 1,
        },
        "layer_types": None,
        "dense_intermediate_size": 128,
    },
    "minicpm3": {"rope_scaling": {"original_max_position_embeddings": 4096}},
    "ministral3": {"rope_parameters": YARN},
    "mistral4": {"rope_parameters": YARN},
    "muse_spark": {
        "rope_parameters": PLAIN,
        "layer_rope_theta": [10000.0, 0.0],
        "num_shared_experts": 0,
        "output_multiplier": 1.0,
        "moe_hidden_size": 64,
    },
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        ]
    },
    "nemotron_h": {
        "layer_types": None,
        "hybrid_override_pattern": ["M", "-", "*", "E"],
        "moe_shared_expert_intermediate_size": 64,
    },
    "olmo_hybrid": {
        "linear_allow_neg_eigval": True,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "openelm": {
        "ffn_dim_divisor": 16,
        "num_query_heads": [4, 4],
        "num_kv_heads": [2, 2],
        "ffn_multipliers": [1.0, 2.0],
    },
    "phi3small": {"dense_attention_every_n_layers": 2, "gegelu_limit": 20.0},
    "phixtral": {"num_vocab": VOCABULARY, "rotary_dim": 8},
    "plamo": {"n_shared_head": 2},
    "plamo2": {"hidden_size_per_head": 16, "full_attention_idx": [1]},
    "qwen": {"kv_channels": 16},
    "spark2_5": {"rope_parameters": KINDS},
    "stablelm": {"use_qkv_bias": True},
    "qwen3_5": {"num_experts": 0},
    "qwen3_5_moe": {"num_experts": 4},
    "step3p5": {"moe_top_k": 2, "share_expert_dim": 64},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
}


def list_architectures() -> list[str]:
    """The modules of mlx-lm that have a model and can be used here."""
    [folder] = mlx_lm.models.__path__
    return sorted(
        file.stem
        for file in Path(folder).glob("*.py")
        if file.stem not in UNUSABLE and "\nclass Model(" in file.read_text(encoding="utf-8")
    )


def write_architecture(folder: Path, name: str, **overrides: Any) -> Path:
    """Write a model and its tokenizer into `folder` and return it. `overrides` change the config
    (of the text model, where one is nested)."""
    config = make_config(name)
    config.get("text_config", config).update(overrides)
    tokenizer = make_tokenizer()
    config["eos_token_id"] = find_end_tokens(tokenizer)
    return write_folder(folder, config, _make_weights(config), tokenizer)


def make_model(name: str, **overrides: Any) -> Any:
    """The same model in memory alone."""
    config = make_config(name)
    config.get("text_config", config).update(overrides)
    module = import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.load_weights([*_make_weights(config).items()])
    return model.eval()


def _make_weights(config: dict[str, Any]) -> dict[str, mx.array]:
    # Embeddings are small, or a model that has no head of its own says one token for ever.
    return {
        part: array * 0.1 if part.endswith(_EMBEDDINGS) else array
        for part, array in make_weights(config).items()
    }


def make_config(name: str) -> dict[str, Any]:
    module = import_module(f"mlx_lm.models.{name}")
    config = _fill(module.ModelArgs) | {"model_type": name}
    own = OWN.get(name, {})
    if "text_config" not in _list_fields(module.ModelArgs):
        return config | own
    if name in TEXT:
        text = make_config(TEXT[name])
        text = text.get("text_config", text)
    else:
        kinds = ("TextArgs", "TextConfig", "TextModelArgs")
        kind = next(getattr(module, kind) for kind in kinds if hasattr(module, kind))
        text = _fill(kind) | {"model_type": name}
    return config | {"text_config": text | own}


def _fill(arguments: type) -> dict[str, Any]:
    return {name: SIZES[name] for name in _list_fields(arguments) if name in SIZES}


def _list_fields(arguments: type) -> list[str]:
    return [field.name for field in dataclasses.fields(arguments)]
