"""The architectures of GGUF files that are served, as a table.

What a file states is in its metadata, whose keys have the same meaning in every architecture
(`runtime.hf.gguf_config`), and its tensors have names that gguf's own tables map to a model's. Here
is what differs: the model's type in Transformers, what llama.cpp takes for granted, and what its
converter does to tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NORMALISED = {"norm_topk_prob": True}
LLAMA_ROWS = {"self_attn.q_proj.weight": "split_pairs", "self_attn.k_proj.weight": "split_pairs"}
"""Conversions of Llama's family, which stores a head's rows in the pairs that rotate together."""
LINEAR_ATTENTION = {
    "linear_attn.norm.weight": "",
    "norm.weight": "subtract_one",
    "linear_attn.A_log": "log_negative",
}
"""Qwen3-Next's norms are stored as what they multiply by, and `-exp(A_log)` as what is used."""


@dataclass(frozen=True)
class Architecture:
    """Rules by which files of one of llama.cpp's architectures become a model of Transformers."""

    models: str
    """The models' names, for people."""
    model_type: str
    """Transformers' name of the configuration."""
    gating: str = "softmax"
    """Function of the router's logits; a file that states another is refused."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the configuration where the metadata state none."""
    ends: tuple[str, ...] = ()
    """Texts of tokens that end an answer, beside those that the metadata name."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """By key of the metadata: what the model always computes; another value is refused."""
    window_step: int = 0
    """With a sliding window: every so many layers one has none, where the metadata state none."""
    linear: str = ""
    """Transformers' name of layers without attention: those that have no `attn_q` here."""
    undo: Mapping[str, str] = field(default_factory=dict)
    """By end of a parameter's name: the function of `runtime.store.gguf.rows` that makes it of
    what is stored; the first that fits, empty for none."""
    variant: "tuple[str, int, Architecture] | None" = None
    """A key and its value of files that are another model."""


MLA = {"self_attn.kv_b_proj.weight": "join_latent"}
"""Keys' and values' parts of a head's matrix are stored apart, keys transposed."""

ARCHITECTURES: Mapping[str, Architecture] = {
    "afmoe": Architecture(
        "Trinity",
        "afmoe",
        gating="sigmoid",
        values={"mup_enabled": True},
        fixed={"expert_weights_norm": True},
        window_step=4,
    ),
    "deepseek2": Architecture(
        "DeepSeek-V2, -V3 and -R1, Moonlight",
        "deepseek_v2",
        values={"topk_method": "group_limited_greedy"},
        fixed={"expert_weights_norm": False},
        undo=MLA,
        variant=(
            "expert_gating_func",
            2,
            Architecture("DeepSeek-V3", "deepseek_v3", gating="sigmoid", undo=MLA),
        ),
    ),
    "dots1": Architecture("dots.llm1", "dots1", gating="sigmoid"),
    "ernie4_5-moe": Architecture("ERNIE-4.5", "ernie4_5_moe", values={"moe_layer_end_index": -1}),
    "exaone-moe": Architecture("K-EXAONE", "exaone_moe", gating="sigmoid", window_step=4),
    "glm4moe": Architecture("GLM-4.5 to -4.7", "glm4_moe", gating="sigmoid"),
    "gpt-oss": Architecture(
        "gpt-oss",
        "gpt_oss",
        gating="softmax_weight",
        values={"rope_parameters": {"truncate": False}},
        ends=("<|endoftext|>", "<|call|>"),
        window_step=2,
    ),
    "granitemoe": Architecture(
        "Granite 3 MoE",
        "granitemoeshared",
        undo={**LLAMA_ROWS, "shared_mlp.input_linear.weight": "join_rows"},
    ),
    "lfm2moe": Architecture(
        "LFM2-MoE", "lfm2_moe", gating="sigmoid", values=NORMALISED, linear="conv"
    ),
    "llama": Architecture("Mixtral", "mixtral", undo=LLAMA_ROWS),
    "llama4": Architecture(
        "Llama 4",
        "llama4_text",
        gating="sigmoid",
        values={"use_qk_norm": True},
        variant=(
            "expert_count",
            128,
            Architecture("Llama 4", "llama4_text", gating="sigmoid", values={"use_qk_norm": False}),
        ),
    ),
    "minimax-m2": Architecture("MiniMax-M2", "minimax_m2", gating="sigmoid"),
    "olmoe": Architecture("OLMoE", "olmoe"),
    "qwen2moe": Architecture("Qwen1.5-MoE, Qwen2-MoE", "qwen2_moe"),
    "qwen35moe": Architecture(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        values={"rope_parameters": {"mrope_interleaved": True}},
        linear="linear_attention",
        undo={
            **LINEAR_ATTENTION,
            "linear_attn.A_log": "log_negative_of_groups",
            "linear_attn.dt_bias": "group_rows",
            "linear_attn.in_proj_a.weight": "group_rows",
            "linear_attn.in_proj_b.weight": "group_rows",
            "linear_attn.in_proj_z.weight": "group_rows",
            "linear_attn.in_proj_qkv.weight": "group_value_rows",
            "linear_attn.conv1d.weight": "group_value_rows",
            "linear_attn.out_proj.weight": "group_columns",
        },
    ),
    "qwen3moe": Architecture("Qwen3-MoE", "qwen3_moe", values=NORMALISED),
    "qwen3next": Architecture(
        "Qwen3-Next",
        "qwen3_next",
        values=NORMALISED,
        linear="linear_attention",
        undo={**LINEAR_ATTENTION, "linear_attn.in_proj_qkvz.weight": "join_key_heads"},
    ),
}
