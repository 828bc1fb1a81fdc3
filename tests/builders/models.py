"""Tiny random Mixture-of-Experts models in the Hub's layout, made on the spot."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2MoeConfig, Qwen2MoeForCausalLM

from tests.builders.saved import saved_once

TOKENS = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(3))
"""Two prompts of a tiny model."""
GREEDY = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}


@saved_once
def tiny_qwen2_moe(
    folder: Path,
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    top_k: int = 2,
    hidden_size: int = 32,
    expert_width: int = 16,
    vocab_size: int = 64,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Path:
    """Saves a random Qwen2-MoE; returns its folder."""
    torch.manual_seed(seed)
    config = Qwen2MoeConfig(
        num_hidden_layers=num_layers, num_experts=num_experts, num_experts_per_tok=top_k,
        hidden_size=hidden_size, moe_intermediate_size=expert_width, vocab_size=vocab_size,
        num_attention_heads=4, num_key_value_heads=2, shared_expert_intermediate_size=32,
        decoder_sparse_step=1, initializer_range=0.2, bos_token_id=0, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    model = Qwen2MoeForCausalLM(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder, max_shard_size="100KB")
    return folder


def changed(folder: Path, target: Path, file: str, **fields: Any) -> Path:
    """Links the model with one JSON file changed."""
    target.mkdir()
    for path in folder.iterdir():
        if path.name != file:
            (target / path.name).symlink_to(path)
    known = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (target / file).write_text(json.dumps({**known, **fields}))
    return target


def set_fields(folder: Path, file: str = "config.json", **fields: Any) -> Path:
    """Changes fields of a JSON file of a model where it lies."""
    (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | fields))
    return folder


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of all files in a folder."""
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def plain_eager(folder: Path, *, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    """The reference for exactness: Transformers' own eager experts, weights copied."""
    options = {"dtype": dtype, "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()
