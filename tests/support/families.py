"""The configs of tiny models, by family: each is one of mlx-lm's own model classes, chosen for what
its cache does: the plain ones, sliding windows a test can cross, recurrent state, and one that no
batch can hold."""

from __future__ import annotations

from typing import Any

import msgspec

VOCABULARY = 512
WINDOW = 16
"""Tokens that a sliding window, or a chunk of attention, spans: a short prompt crosses it."""


class Family(msgspec.Struct, frozen=True):
    """One kind of model: its config.json and what each layer's cache is."""

    config: dict[str, Any]
    caches: tuple[str, ...]
    batchable: bool = True
    """False where the caches of two requests cannot be merged into one batch."""
    vocabulary: int = VOCABULARY


_SIZE = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}

FAMILIES: dict[str, Family] = {
    "qwen3": Family(
        {"model_type": "qwen3", **_SIZE},
        caches=("KVCache", "KVCache"),
    ),
    "qwen3-46m": Family(
        {
            "model_type": "qwen3",
            **_SIZE,
            "hidden_size": 512,
            "intermediate_size": 1792,
            "num_hidden_layers": 12,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        caches=("KVCache",) * 12,
        vocabulary=4096,
    ),
    "llama": Family(
        {"model_type": "llama", **_SIZE},
        caches=("KVCache", "KVCache"),
    ),
    "gemma3_text": Family(
        {
            "model_type": "gemma3_text",
            **_SIZE,
            "num_hidden_layers": 3,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "sliding_window_pattern": 3,
        },
        caches=("RotatingKVCache", "RotatingKVCache", "KVCache"),
    ),
    "gpt_oss": Family(
        {
            "model_type": "gpt_oss",
            **_SIZE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        caches=("RotatingKVCache", "KVCache"),
    ),
    "olmo3": Family(
        {
            "model_type": "olmo3",
            **_SIZE,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        caches=("RotatingKVCache", "KVCache"),
    ),
    "qwen3_moe": Family(
        {"model_type": "qwen3_moe", **_SIZE, **_EXPERTS},
        caches=("KVCache", "KVCache"),
    ),
    "qwen3_next": Family(
        {
            "model_type": "qwen3_next",
            **_SIZE,
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.5,
            "full_attention_interval": 2,
        },
        caches=("ArraysCache", "KVCache"),
    ),
    "lfm2": Family(
        {
            "model_type": "lfm2",
            **_SIZE,
            "norm_eps": 1e-5,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 64,
            "block_ff_dim": 128,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention"],
        },
        caches=("ArraysCache", "KVCache"),
    ),
    "granitemoehybrid": Family(
        {
            "model_type": "granitemoehybrid",
            **_SIZE,
            "attention_bias": False,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 0.25,
            "logits_scaling": 1.0,
            "residual_multiplier": 1.0,
            "layer_types": ["mamba", "attention"],
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_proj_bias": False,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_n_groups": 1,
            "mamba_conv_bias": True,
        },
        caches=("ArraysCache", "KVCache"),
    ),
    "falcon_h1": Family(
        {
            "model_type": "falcon_h1",
            **_SIZE,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
        },
        caches=("CacheList", "CacheList"),
    ),
    "mamba": Family(
        {
            "model_type": "mamba",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "state_size": 16,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "time_step_rank": 4,
            "tie_word_embeddings": False,
        },
        caches=("ArraysCache", "ArraysCache"),
    ),
    "mamba2": Family(
        {
            "model_type": "mamba2",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_heads": 8,
            "head_dim": 16,
            "state_size": 16,
            "n_groups": 1,
            "conv_kernel": 4,
            "use_bias": False,
            "use_conv_bias": True,
            "layer_norm_epsilon": 1e-5,
            "time_step_rank": 4,
            "time_step_limit": [0.0, 100.0],
            "tie_word_embeddings": False,
        },
        caches=("ArraysCache", "ArraysCache"),
    ),
    "llama4": Family(
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                **_SIZE,
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 128,
                "interleave_moe_layer_step": 2,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "attention_bias": False,
                "attention_chunk_size": WINDOW,
                "rope_scaling": None,
                "use_qk_norm": True,
            },
        },
        caches=("ChunkedKVCache", "ChunkedKVCache", "ChunkedKVCache", "KVCache"),
        batchable=False,
    ),
}
"""Every family by name: what `write_model` makes, and what tests run through."""

_LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 16),
}
_INDEXED = {
    **_SIZE,
    **_LATENT,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
}

RARE: dict[str, Family] = {
    "deepseek_v41": Family(
        {
            "model_type": "deepseek_v41",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "head_dim": 32,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 16,
            "o_groups": 2,
            "o_lora_rank": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "compress_ratios": [0, 4, 1, 4],
            "kv_source_layer_ids": [1, 2, 3],
            "index_source_layer_ids": [1, 2, 3],
            "index_n_heads": 2,
            "index_head_dim": 32,
            "index_topk": 8,
            "hc_mult": 2,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 4096,
        },
        caches=("LayerCache",) * 4,
        batchable=False,
    ),
    "deepseek_v32": Family(
        {"model_type": "deepseek_v32", **_INDEXED},
        caches=("CacheList", "CacheList"),
    ),
    "glm_moe_dsa": Family(
        {
            "model_type": "glm_moe_dsa",
            **_INDEXED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "norm_topk_prob": True,
            "moe_layer_freq": 1,
            "attention_bias": False,
        },
        caches=("CacheList", "CacheList"),
    ),
    "longcat_flash": Family(
        {
            "model_type": "longcat_flash",
            "attention_method": "MLA",
            "zero_expert_type": "identity",
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "moe_topk": 2,
            "expert_ffn_hidden_size": 64,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "num_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 4096,
            **_LATENT,
            "rope_theta": 10000.0,
            "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True,
            "attention_bias": False,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        caches=("CacheList", "CacheList"),
    ),
    "minimax_m3_vl": Family(
        {
            "model_type": "minimax_m3_vl",
            "text_config": {
                **_SIZE,
                "model_type": "minimax_m3_vl",
                "head_dim": 32,
                "dense_intermediate_size": 128,
                "shared_intermediate_size": 64,
                "intermediate_size": 64,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "moe_layer_freq": [0, 1],
                "rotary_dim": 16,
                "routed_scaling_factor": 1.0,
                "sparse_attention_config": {
                    "sparse_num_index_heads": 2,
                    "sparse_index_dim": 16,
                    "sparse_block_size": 4,
                    "sparse_topk_blocks": 2,
                    "sparse_local_block": 1,
                },
            },
        },
        caches=("CacheList", "CacheList"),
    ),
    "nemotron-nas": Family(
        {
            "model_type": "nemotron-nas",
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "rms_norm_eps": 1e-5,
            "block_configs": [
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
                {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}},
                {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            ],
            "max_position_embeddings": 4096,
        },
        caches=("KVCache",) * 3,
    ),
}
"""Families for whose kinds of KV caches there are tests of their own."""
