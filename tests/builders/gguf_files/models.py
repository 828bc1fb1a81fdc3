"""Tiny models of the architectures of GGUF files, each with every property that its metadata say.

`make headers` lets llama.cpp's converter write files of them, of which it keeps the headers.
"""

import json
from pathlib import Path
from typing import Any

COMMON = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32,
    "intermediate_size": 64, "max_position_embeddings": 256, "bos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
    # With these, the range that YaRN scales ends at a whole number, to which llama.cpp rounds it
    # and gpt-oss does not.
    "rope_theta": 10765.7, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SCALES = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
}  # fmt: skip
DEEP = {
    "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 12,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 4, "head_dim": 32, "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
SLIDING = {"num_hidden_layers": 4, "head_dim": 16, "num_shared_experts": 1, "sliding_window": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "afmoe": ("Afmoe", EXPERTS | SLIDING | {
        "num_dense_layers": 1, "route_scale": 2.5, "route_norm": True, "score_func": "sigmoid",
        "mup_enabled": True,
    }),
    "deepseek2": ("DeepseekV2", DEEP | LATENT | {
        "norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    }),
    "deepseek2-v3": ("DeepseekV3", DEEP | LATENT | {
        "n_group": 2, "topk_group": 1,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    }),
    "dots1": ("Dots1", DEEP | {"num_key_value_heads": 4, "head_dim": 16}),
    "ernie4_5-moe": ("Ernie4_5_Moe", {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1, "num_hidden_layers": 3, "head_dim": 16,
        # The converter takes the shared experts' width for this, divided by two heads.
        "intermediate_size": 128,
    }),
    "exaone-moe": ("ExaoneMoe", EXPERTS | SLIDING | {
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    }),
    "glm4moe": ("Glm4Moe", DEEP | {
        "head_dim": 16, "use_qk_norm": True, "attention_bias": True, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        },
    }),
    "gpt-oss": ("GptOss", LOCAL | {"head_dim": 16, "sliding_window": 8, "rope_parameters": YARN}),
    "granitemoe": ("GraniteMoe", {**LOCAL, **SCALES, "tie_word_embeddings": True}),
    "granitemoe-shared": ("GraniteMoeShared", {**LOCAL, **SCALES, "shared_intermediate_size": 64}),
    "lfm2moe": ("Lfm2Moe", EXPERTS | {
        "num_hidden_layers": 4, "num_dense_layers": 1, "tie_word_embeddings": True,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
    }),
    "llama": ("Mixtral", {**LOCAL, "rope_parameters": LLAMA3}),
    "llama4": ("Llama4", {
        "num_local_experts": 4, "num_experts_per_tok": 1, "head_dim": 16, "intermediate_size": 32,
        "intermediate_size_mlp": 64, "num_hidden_layers": 4, "interleave_moe_layer_step": 2,
        "rope_parameters": LLAMA3,
    }),
    "minimax-m2": (
        "MiniMaxM2", LOCAL | {"head_dim": 32, "rotary_dim": 16, "scoring_func": "sigmoid"},
    ),
    "olmoe": ("Olmoe", {**EXPERTS, "num_key_value_heads": 4}),
    "qwen2moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen35moe": ("Qwen3_5Moe", {**EXPERTS, **LINEAR}),
    "qwen3moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 32, "norm_topk_prob": True}),
    "qwen3next": ("Qwen3Next", {**EXPERTS, **LINEAR}),
}  # fmt: skip
"""Models by name: Transformers' name of the class, and its configuration."""
TEXT_CONFIGS = {"Llama4": "Llama4TextConfig", "Qwen3_5Moe": "Qwen3_5MoeTextConfig"}
LEFT_OUT = ("scoring_func", "score_func", "route_norm")
"""What published configurations have and Transformers' classes have not."""


def make_model(name: str, **changes: Any) -> Any:
    """Return a random model; `changes` replace fields of its configuration."""
    import transformers

    kind, values = MODELS[name]
    config_class = getattr(transformers, TEXT_CONFIGS.get(kind, f"{kind}Config"))
    return getattr(transformers, f"{kind}ForCausalLM")(config_class(**COMMON | values | changes))


def save(name: str, folder: Path, vocab_size: int) -> None:
    """Save a random model in the Hub's layout."""
    make_model(name, vocab_size=vocab_size).save_pretrained(folder)
    _, values = MODELS[name]
    file = folder / "config.json"
    content = json.loads(file.read_text())
    content |= {key: values[key] for key in LEFT_OUT if key in values}
    file.write_text(json.dumps(content))
