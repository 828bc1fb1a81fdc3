"""A checkpoint with the layers of Qwen3-30B-A3B and random weights, for figures of speed.

Speed does not depend on the values where all experts are in memory. The vocabulary is as small a
share of the real one as the layers are, so that embeddings and output take the share of the time
that they take in the whole model; the tokenizer is the reference model's.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3MoeConfig

from benchmarks.config import RandomConfig
from benchmarks.peers.fused import INDEX
from benchmarks.real_size.model import QWEN3_30B_A3B, RandomTensor, make_values
from benchmarks.reports import print_line
from predictors.errors import MoecastError
from runtime.config import ModelConfig
from runtime.store.model_source import resolve

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def scaled_config(num_layers: int, least_tokens: int) -> Qwen3MoeConfig:
    """Returns Qwen3-30B-A3B's configuration with fewer layers and tokens."""
    whole = QWEN3_30B_A3B
    vocabulary = max(least_tokens, whole["vocab_size"] * num_layers // whole["num_hidden_layers"])
    fewer = {"vocab_size": -(-vocabulary // 64) * 64, "num_hidden_layers": num_layers}
    return Qwen3MoeConfig(**{**whole, **fewer, "bos_token_id": 0, "eos_token_id": 0})


def layer_shapes(config: Qwen3MoeConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the name of each tensor within a layer, and its shape."""
    hidden, head = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    width = config.moe_intermediate_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    yield "self_attn.q_norm.weight", (head,)
    yield "self_attn.k_norm.weight", (head,)
    yield "self_attn.q_proj.weight", (queries, hidden)
    yield "self_attn.k_proj.weight", (keys, hidden)
    yield "self_attn.v_proj.weight", (keys, hidden)
    yield "self_attn.o_proj.weight", (hidden, queries)
    yield "mlp.gate.weight", (config.num_experts, hidden)
    for expert in range(config.num_experts):
        yield f"mlp.experts.{expert}.gate_proj.weight", (width, hidden)
        yield f"mlp.experts.{expert}.up_proj.weight", (width, hidden)
        yield f"mlp.experts.{expert}.down_proj.weight", (hidden, width)


def write_checkpoint(
    model: Qwen3MoeConfig,
    folder: Path,
    *,
    seed: int,
    advance: Callable[[int, int], None] = lambda _done, _all: None,
) -> None:
    """Writes configuration and random weights, a file for each layer, into an existing folder.

    Args:
        advance: called with the number of files that are written, and of all files.
    """
    generator = torch.Generator().manual_seed(seed)
    around = (model.vocab_size, model.hidden_size)
    shapes = [
        {"model.embed_tokens.weight": around, "model.norm.weight": (model.hidden_size,)}
        | {"lm_head.weight": around}
    ]
    shapes += [
        {f"model.layers.{layer}.{name}": shape for name, shape in layer_shapes(model)}
        for layer in range(model.num_hidden_layers)
    ]
    weight_map: dict[str, str] = {}
    for number, named in enumerate(shapes):
        file = f"model-{number:05}.safetensors"
        tensors = {
            name: torch.cat([*make_values(RandomTensor(shape, model.dtype), generator)]).view(shape)
            for name, shape in named.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        advance(number + 1, len(shapes))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")
    model.save_pretrained(folder)


def run_random(config: RandomConfig) -> None:
    """Writes the checkpoint.

    Raises:
        MoecastError: the folder exists, or there are no layers.
    """
    if config.num_layers < 1:
        raise MoecastError(f"num_layers={config.num_layers}: must be at least 1")
    if config.output.exists():
        raise MoecastError(f"{config.output} exists; remove it or give another output=PATH")
    reference = resolve(ModelConfig())
    tokens = len(json.loads((reference / "tokenizer.json").read_text())["model"]["vocab"])
    partial = config.output.with_name(f"{config.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_checkpoint(
        scaled_config(config.num_layers, tokens),
        partial,
        seed=config.seed,
        advance=lambda done, number: print_line(f"{done}/{number} files"),
    )
    for name in TOKENIZER_FILES:
        shutil.copy(reference / name, partial / name)
    partial.rename(config.output)
