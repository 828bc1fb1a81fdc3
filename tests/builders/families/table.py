"""Every Mixture-of-Experts family of Transformers: how a tiny one is made, or why none can be."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

PER_EXPERT = "one tensor per expert"
FUSED = "experts fused"


@dataclass(frozen=True)
class Family:
    """One model folder of Transformers that has routed experts."""

    name: str
    model_type: str = ""
    """Model type, if it is not the folder's name."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its tiny configuration in addition to the common ones."""
    served: str = "interface"
    """How moecast reaches its experts: a name in `runtime.hf.layers.ADAPTERS`."""
    layout: str = PER_EXPERT
    """How its checkpoints hold experts."""
    generates: bool = True
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Changes to its generation configuration, to save time."""
    always_same: str = ""
    """Why its tokens all go to the same experts."""
    refused: str = ""
    """Why it is not served."""

    def changed(self, **changes: Any) -> "Family":
        """Return the family with other fields of its tiny configuration."""
        return replace(self, changes={**self.changes, **changes})


def multimodal_rope(*section: int) -> dict[str, Any]:
    """Positions in time, height and width, each with a section of the rotated dimensions."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(section)}
    return {"rope_parameters": rope}


SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
LINEAR = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
INDEXED = {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}
ALL_HEADS = {"num_key_value_heads": 4}
GEMMA = {"global_head_dim": 8}
NLLB_SIZES = {"layers": 2, "ffn_dim": 48, "attention_heads": 4, "sparse_step": 2}
COMMON = (
    "afmoe", "axk1", "axk2", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1",
    "ernie4_5_moe", "exaone_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
    "hunyuan_v1_moe", "hy_v3", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax",
    "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe", "solar_open",
)  # fmt: skip
"""They need no more than the common sizes."""
COMMON_FUSED = (
    "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoeshared", "hy_v4", "mistral4",
    "qwen3_vl_moe",
)  # fmt: skip

ROWS = (
    *map(Family, COMMON),
    *(Family(name, layout=FUSED) for name in COMMON_FUSED),
    Family("aria", layout=FUSED, changes={
        "vision_config": {"model_type": "idefics3_vision", "patch_size": 14},
    }),
    Family("bailing_hybrid", changes=LINEAR),
    Family("beam", changes=SPARSE),
    Family("dbrx", served="stacked", layout=FUSED, changes={
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2},
    }),
    Family("deepseek_ocr2", changes={"text_config": SPARSE | ALL_HEADS}),
    Family("deepseek_v4", changes={
        "num_key_value_heads": 1, "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "o_groups": 2, "o_lora_rank": 16,
    }),
    Family("diffusion_gemma", layout=FUSED, generation={"max_denoising_steps": 2}, changes={
        "text_config": GEMMA, "vision_config": {"model_type": "gemma4_vision"}, "canvas_length": 16,
    }),
    Family("doge", refused="its experts are rows of an embedding, not networks"),
    Family("dots3_note", changes={
        "text_config": {
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16,
            "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8,
            "swa_v_head_dim": 8,
        },
        "vision_config": {
            "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
            "num_local_experts": 4, "moe_intermediate_size": 8,
        },
    }),
    Family("ernie4_5_vl_moe", changes={
        "text_config": {"moe_intermediate_size": [16, 8], **multimodal_rope(1, 1, 2)},
    }),
    Family("flint", changes={"num_hidden_layers": 4}),
    Family("gemma4", layout=FUSED, changes={
        "text_config": GEMMA | {"enable_moe_block": True}, "audio_config": None,
    }),
    Family("glm4v_moe", changes={"text_config": multimodal_rope(1, 1, 0)}),
    Family("glm5_next", changes={
        "text_config": SPARSE | INDEXED | {"qk_rope_head_dim": 0, "index_kpool": 4},
    }),
    Family("granitemoehybrid", layout=FUSED, changes={"mamba_n_heads": 8, **LINEAR}),
    Family("inkling", layout=FUSED, model_type="inkling_mm_model", changes={
        "text_config": SPARSE,
        "vision_config": {"patch_size": 2, "num_hidden_layers": 3},
        "audio_config": {"n_mel_bins": 4, "mel_vocab_size": 8},
    }),
    Family("inkling2", layout=FUSED, changes={"text_config": {"unpadded_vocab_size": 90}}),
    Family("jamba", changes={
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    }),
    Family("jetmoe", served="parallel", layout=FUSED),
    Family("kimi_linear", changes=LINEAR),
    Family("lfm2_moe", changes={"layer_types": ["conv", "full_attention", "conv"]}),
    Family("llama4", served="dense", layout=FUSED, changes={
        "text_config": {"moe_layers": [1, 2], "intermediate_size_mlp": 48},
    }),
    Family("longcat_flash", served="loop", changes={"num_layers": 2, "zero_expert_num": 4}),
    Family("minimax_m3_vl", changes={
        "text_config": SPARSE | {
            "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
            "dense_intermediate_size": 48, "index_block_size": 4, "index_topk_blocks": 2,
            "rotary_dim": 4,
        },
        "projector_hidden_size": 32,
    }),
    Family("mistral_large4", changes={"vision_config": {"model_type": "pixtral"}}),
    Family("muse_spark", layout=FUSED, changes={
        "text_config": {"moe_hidden_size": 24},
        "vision_config": {"pos_emb_height": 4, "pos_emb_width": 4},
        "out_hidden_size": 32, "projector_hidden_size": 32,
        "audio_config": {"patch_sizes": (16,), "hidden_sizes": (16,), "depths": (1,)},
    }),
    Family("nemotron_h", changes={
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 8,
        "chunk_size": 8, "moe_latent_size": 24, "moe_shared_expert_intermediate_size": 16,
    }),
    Family(
        "nllb_moe", model_type="nllb-moe", served="members",
        always_same="Transformers 5.23 sends every token to its experts 0 and 1",
        changes={
            f"{part}_{size}": number for part in ("encoder", "decoder")
            for size, number in NLLB_SIZES.items()
        },
    ),
    Family("openai_privacy_filter", generates=False, layout=FUSED),
    Family("qwen3_5_moe", changes={"text_config": LINEAR}),
    Family("qwen3_next", changes=LINEAR),
    Family("qwen3_omni_moe", model_type="qwen3_omni_moe_thinker", changes={
        "vision_start_token_id": 90,
    }),
    Family("qwen4_exp", changes={
        "text_config": INDEXED | {
            "eos_token_id": 95, "hc_lowrank": 8, "ple_layer_ids": [1], "heads_per_ngram": 2,
            "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8,
            "split_ngram_parts": 1, "indexer_n_heads": 2, "indexer_kv_heads": 1,
            "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2,
        },
    }),
    Family("step3p7", served="loop", layout=FUSED, changes={
        "text_config": SPARSE | {"share_expert_dim": 16},
    }),
    Family("switch_transformers", served="members", changes={
        "num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1, "d_kv": 8, "d_ff": 48, "num_heads": 4,
    }),
    Family("unlimited_ocr", changes={"text_config": ALL_HEADS}),
    Family("vitpose_backbone", refused="a vision backbone; every expert runs on every image"),
    Family("zaya", layout=FUSED, changes={"num_experts_per_tok": 1, "router_hidden_size": 16}),
)  # fmt: skip
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {row.name: row for row in sorted(ROWS, key=lambda row: row.name)}
)
