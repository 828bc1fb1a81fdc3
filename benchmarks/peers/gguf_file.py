"""GGUF files of Qwen2-MoE and Qwen3-MoE checkpoints for llama.cpp.

Matrices are in the dtype of the checkpoint; norms, biases and routers in float32, as llama.cpp's
converter writes them. The names of tensors and keys are those of the `gguf` package's own tables.
GGUF has no key for `norm_topk_prob`, which llama.cpp takes as false for `qwen2moe` (see
`benchmarks/environments.py`) and as true for `qwen3moe`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, TokenType
from torch import Tensor

from benchmarks.peers.fused import Checkpoint, fused_tensors
from predictors.errors import MoecastError, unknown

ARCHITECTURES = {"qwen2_moe": MODEL_ARCH.QWEN2MOE, "qwen3_moe": MODEL_ARCH.QWEN3MOE}
PRE_TOKENIZER = "gpt-2"
"""Pre-tokenizer that is nearest to byte-level pieces with single digits. The benchmark sends token
ids, which it does not affect."""


class WrittenTensor(NamedTuple):
    name: str
    data: np.ndarray
    """bfloat16 as 16-bit integers."""
    kind: GGMLQuantizationType


def find_architecture(config: dict[str, Any]) -> MODEL_ARCH:
    """Returns llama.cpp's architecture of a model.

    Raises:
        MoecastError: none that this module can write.
    """
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise MoecastError(unknown("model_type", str(kind), list(ARCHITECTURES)))
    return ARCHITECTURES[kind]


def map_names(architecture: MODEL_ARCH, num_layers: int) -> Callable[[str], str]:
    """Returns the function from names of Transformers to those of llama.cpp."""
    names = gguf.get_tensor_name_map(architecture, num_layers)

    def rename(key: str) -> str:
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise KeyError(f"{key}: no tensor of {MODEL_ARCH_NAMES[architecture]}")
        return name

    return rename


def encode_tensor(name: str, value: Tensor) -> WrittenTensor:
    if value.dtype == torch.bfloat16 and value.ndim > 1 and "ffn_gate_inp" not in name:
        data = value.contiguous().view(torch.int16).numpy()
        return WrittenTensor(name, data, GGMLQuantizationType.BF16)
    return WrittenTensor(name, value.float().contiguous().numpy(), GGMLQuantizationType.F32)


def gguf_tensors(checkpoint: Checkpoint, rename: Callable[[str], str]) -> Iterator[WrittenTensor]:
    """Yields all tensors as llama.cpp names them, gate and up apart."""
    tied = "lm_head.weight" not in set(checkpoint)
    for tensors in fused_tensors(checkpoint):
        for key, value in tensors.items():
            if key.endswith(".experts.gate_up_proj"):
                stem = key.removesuffix("gate_up_proj")
                for part, half in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                    yield encode_tensor(rename(f"{stem}{part}_proj.weight"), half)
            elif key.endswith(".experts.down_proj"):
                yield encode_tensor(rename(f"{key}.weight"), value)
            elif key.endswith(".shared_expert_gate.weight"):
                # [1, D] in Transformers, [D] in llama.cpp.
                yield encode_tensor(rename(key), value.reshape(-1))
            else:
                yield encode_tensor(rename(key), value)
            if tied and key == "model.embed_tokens.weight":
                # `qwen2moe` needs output weights even if they are the embeddings.
                yield encode_tensor(rename("lm_head.weight"), value)


def add_metadata(writer: GGUFWriter, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Adds the sizes of the model, under the keys of its architecture."""
    rope = config.get("rope_parameters") or {"rope_theta": config["rope_theta"]}
    types = gguf.LlamaFileType
    writer.add_name("moecast peer benchmark")
    writer.add_file_type(types.ALL_F32 if dtype == torch.float32 else types.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if head_dim := config.get("head_dim"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    # The Hub's name, and that of configurations which Transformers 5 writes.
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if shared := config.get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)


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


def write_gguf(folder: Path, output: Path, dtype: torch.dtype = torch.float32) -> None:
    """Converts a checkpoint: all offsets first, then all values.

    Raises:
        MoecastError: a model of another kind.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture = find_architecture(config)
    writer = GGUFWriter(output, MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, config, dtype)
    add_tokenizer(writer, folder, config)
    checkpoint = Checkpoint(folder, dtype)
    rename = map_names(architecture, config["num_hidden_layers"])
    for name, data, kind in gguf_tensors(checkpoint, rename):
        writer.add_tensor_info(name, data.shape, data.dtype, data.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in gguf_tensors(checkpoint, rename):
        writer.write_tensor_data(tensor.data)
    writer.close()
