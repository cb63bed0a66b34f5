"""Reduced values of config fields, by name."""

from __future__ import annotations

from typing import Any

# Ids from TEXT_VOCAB on are special tokens or unused: ids below it are never placeholders of images.
TEXT_VOCAB = 128
VOCAB = 144


def _each(value: Any, names: str) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


# Reduced value of each field. A smaller default stays.
SIZES: dict[str, int] = {
    **_each(
        VOCAB,
        "vocab_size decoder_vocab_size vocab_size_per_layer_input audio_vocab_size pronunciation_vocab_size"
        " shape_vocab_size encoder_hash_byte_group_vocab ngram_vocab_size_base vocab_offset unpadded_vocab_size",
    ),
    # RoBERTa counts positions from the id of its padding on.
    **_each(
        512,
        "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions"
        " max_source_positions model_max_length original_max_position_embeddings position_bias_max_distance"
        " max_inference_chunksize",
    ),
    **_each(
        96,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim dim_ff dff d_inner ffn_hidden_size d_ff"
        " feed_forward_size intermediate_size_mlp dense_intermediate_size shared_intermediate_size mlp_dim"
        " prefix_dense_intermediate_size prompt_mid_dim",
    ),
    **_each(
        64,
        "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size output_embedding_size"
        " word_embed_proj_dim backbone_hidden_size hidden_size_global lru_width attention_hidden_size input_size"
        " out_hidden_size adapter_out_dim vision_output_dim projector_input_dim projector_output_dim image_size"
        " crop_size mamba_d_ssm ple_embed_dim router_hidden_size downsample_hidden_size adapter_in_dim"
        " adapter_input_size pronunciation_embed_dim"
        " shape_embed_dim output_channels base_channels nemo_conv_channels ext_pw_out_channel"
        " depthwise_separable_out_channel",
    ),
    **_each(
        48,
        "moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_experts_intermediate_size"
        " moe_shared_expert_intermediate_size",
    ),
    **_each(32, "q_lora_rank rel_extent"),
    **_each(24, "qk_head_dim"),
    **_each(
        16,
        "head_dim dim_head d_head attention_head_size kv_channels swa_head_dim index_head_dim indexer_head_dim"
        " linear_head_dim linear_key_head_dim linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim d_kv"
        " hidden_size_per_layer_input laurel_rank adapter_rank gated_norm_rank o_lora_rank kv_lora_rank hc_lowrank"
        " qk_nope_head_dim block_multiple_of",
    ),
    # With few heads an index may score many keys as equal, and would then choose among equals.
    **_each(16, "index_n_heads"),
    **_each(12, "v_head_dim"),
    **_each(
        8,
        "qk_rope_head_dim rotary_dim state_size ssm_state_size mamba_d_state chunk_size mamba_chunk_size d_rel"
        " prompt_length",
    ),
    **_each(
        4,
        "num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads decoder_attention_heads"
        " num_decoder_attention_heads num_encoder_attention_heads linear_num_heads linear_num_value_heads"
        " mamba_n_heads mamba_num_heads n_mamba_heads swa_num_attention_heads num_query_groups"
        " conf_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts"
        " time_step_rank mamba_dt_rank index_block_size segment_types prompt_types",
    ),
    **_each(
        2,
        "num_key_value_heads kv_n_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"
        " n_groups n_group num_expert_group o_groups heads_per_ngram num_kv_shared_layers index_topk_blocks"
        " num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts zero_expert_num",
    ),
    **_each(
        1,
        "topk_group num_dense_layers n_shared_experts num_shared_experts moe_num_shared_experts"
        " num_nextn_predict_layers max_window_layers moe_layer_start_index num_codebooks expand mamba_expand",
    ),
}
WINDOWS = _each(
    None,
    "sliding_window sliding_window_size attention_chunk_size attention_window_size local_attention window_size"
    " local_attention_window_len keep_window_size index_topk lsh_attn_chunk_length local_attn_chunk_length",
)
LAYER_COUNTS = _each(
    None,
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers"
    " num_encoder_layers depth num_blocks conf_num_hidden_layers num_layers_per_stack num_global_layers",
)
# Fields that are set to these values, which may differ from the defaults.
SWITCHES: dict[str, Any] = {
    "is_decoder": True,
    "use_cache": True,
    "use_sliding_window": True,
    "first_k_dense_replace": 1,
    "tie_word_embeddings": False,
    **_each(None, "eos_token_id forced_eos_token_id forced_bos_token_id suppress_tokens begin_suppress_tokens"),
    "axial_pos_embds_dim": (16, 48),
    "axial_pos_shape": (16, 16),
}
# Fields with the default None: the model requires a number, or a part would be disabled.
FILLED: dict[str, Any] = {
    "head_dim": 16,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "attn_layer_indices": [1],
    "full_attn_idxs": [1],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "default_language": "en_XX",
}
NO_DROPOUT = ("dropout", "pdrop", "layerdrop", "dropout_rate", "dropout_p", "dropout_prob", "jitter_noise")

# Exceptions by config class. A list is a pattern that is repeated over the layers.
OVERRIDES: dict[str, dict[str, Any]] = {
    # The defaults have one kind of layer, or none.
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"]},
    # The model requires fields that its default config lacks.
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": _each({"rope_type": "default", "rope_theta": 10000.0}, "sliding_attention full_attention"),
    },
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    # Sizes that are not fields of the class: it accepts them, and moves them into the layers.
    "Gemma4TextConfig": {"global_head_dim": 32},
    "Gemma4UnifiedTextConfig": {"global_head_dim": 32},
    "Dots3NoteTextConfig": {
        "sliding_window": 512,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 12,
    },
    # Two classes of this family round this size differently when it is small.
    "xLSTMConfig": {"qk_dim_factor": 1.0},
}
