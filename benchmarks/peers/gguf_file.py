"""GGUF files of Qwen2-MoE checkpoints for llama.cpp, every tensor in float32.

Reads the folder that `fused.py` writes. The names of tensors and keys are those of the `gguf`
package's own tables for the architecture `qwen2moe`. GGUF has no key for `norm_topk_prob`, which
llama.cpp takes as false for this architecture (see `benchmarks/environments.py`).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFWriter, TokenType

from benchmarks.peers.fused import Checkpoint

ARCHITECTURE = MODEL_ARCH.QWEN2MOE
PRE_TOKENIZER = "gpt-2"
"""Pre-tokenizer that is nearest to byte-level pieces with single digits. The benchmark sends token
ids, which it does not affect."""


def gguf_tensors(checkpoint: Checkpoint, num_layers: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yields llama.cpp's names and values, gate and up apart."""
    names = gguf.get_tensor_name_map(ARCHITECTURE, num_layers)

    def renamed(key: str) -> str:
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise KeyError(f"{key}: no tensor of {MODEL_ARCH_NAMES[ARCHITECTURE]}")
        return name

    tied = "lm_head.weight" not in set(checkpoint)
    for key in checkpoint:
        value = checkpoint[key].numpy()
        if key.endswith(".experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True):
                yield renamed(f"{stem}{part}_proj.weight"), np.ascontiguousarray(half)
        elif key.endswith(".experts.down_proj"):
            yield renamed(f"{key}.weight"), value
        elif key.endswith(".shared_expert_gate.weight"):
            # [1, D] in Transformers, [D] in llama.cpp.
            yield renamed(key), value.reshape(-1)
        else:
            yield renamed(key), value
        if tied and key == "model.embed_tokens.weight":
            # This architecture needs output weights even if they are the embeddings.
            yield renamed("lm_head.weight"), value


def add_metadata(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Adds the sizes of the model, under the keys of its architecture."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    writer.add_name("moecast peer benchmark")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def add_tokenizer(writer: GGUFWriter, folder: Path, config: dict[str, Any]) -> None:
    """Byte-level BPE: pieces by id, merges by rank."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    pieces = {number: piece for piece, number in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    size = config["vocab_size"]
    tokens = [special.get(i, pieces.get(i, f"[unused{i}]")) for i in range(size)]
    kinds = [
        TokenType.CONTROL
        if number in special
        else TokenType.NORMAL
        if number in pieces
        else TokenType.UNUSED
        for number in range(size)
    ]
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def write_gguf(folder: Path, output: Path) -> None:
    """Converts a folder of fused tensors: all offsets first, then all values."""
    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(output, MODEL_ARCH_NAMES[ARCHITECTURE])
    add_metadata(writer, config)
    add_tokenizer(writer, folder, config)
    checkpoint, num_layers = Checkpoint(folder), config["num_hidden_layers"]
    for name, value in gguf_tensors(checkpoint, num_layers):
        writer.add_tensor_info(name, value.shape, value.dtype, value.nbytes)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, value in gguf_tensors(checkpoint, num_layers):
        writer.write_tensor_data(value)
    writer.close()
