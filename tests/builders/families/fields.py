"""Tiny values for the fields of configurations, by the names that many families share."""

from collections.abc import Mapping
from typing import Any


def by_value(names: Mapping[int, str]) -> dict[str, int]:
    """The value of each of the names, which spaces separate."""
    return {name: value for value, several in names.items() for name in several.split()}


SIZES = {
    3: "num_hidden_layers num_layers", 32: "hidden_size d_model",
    48: "intermediate_size ffn_hidden_size", 96: "vocab_size vocab_size_per_layer_input",
    256: "max_position_embeddings", 8: "hidden_size_per_layer_input",
}  # fmt: skip
ATTENTION = {
    2: "num_key_value_heads swa_num_key_value_heads linear_num_key_heads index_n_heads",
    4: "num_attention_heads swa_num_attention_heads linear_num_value_heads linear_num_heads",
    8: "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim swa_head_dim sliding_window "
    "linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state index_topk",
    16: "q_lora_rank kv_lora_rank index_head_dim",
}
EXPERTS = {
    1: "n_shared_experts num_shared_experts moe_num_shared_experts topk_group "
    "first_k_dense_replace num_dense_layers",
    2: "num_experts_per_tok moe_topk moe_k top_k_experts n_group",
    8: "num_experts num_local_experts n_routed_experts moe_num_experts",
    16: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
    "expert_ffn_hidden_size shared_experts_intermediate_size",
}
TEXT: dict[str, Any] = {
    **by_value(SIZES), **by_value(ATTENTION), **by_value(EXPERTS),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None, "initializer_range": 0.2,
}  # fmt: skip
"""Fields of the part that has the experts."""

OTHERS = {
    1: "num_hidden_layers num_layers encoder_layers depth",
    2: "num_attention_heads num_key_value_heads encoder_attention_heads num_heads",
    8: "head_dim downsample_hidden_size",
    16: "hidden_size d_model embed_dim intermediate_size encoder_ffn_dim num_position_embeddings "
    "position_embedding_size output_channels mlp_dim projection_intermediate_size "
    "projection_hidden_dim vision_output_dim projector_input_dim projector_output_dim "
    "adapter_in_dim adapter_input_size num_mel_bins feature_size",
    28: "image_size",
    32: "out_hidden_size output_dim projection_dim text_hidden_size adapter_out_dim",
}
OTHER: dict[str, Any] = {
    **by_value(OTHERS), "downsample_channels": [16, 16],
    "deepstack_visual_indexes": (0,), "global_attn_indexes": (0,),
}  # fmt: skip
"""Fields of vision, audio and other parts, which no test runs."""
