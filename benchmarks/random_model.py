"""A checkpoint with the layers of Qwen3-30B-A3B and random weights, for figures of speed.

Speed does not depend on the values where all experts are in memory. The vocabulary is as small a
share of the real one as the layers are, so that embeddings and output take the share of the time
that they take in the whole model; the tokenizer is the reference model's.

Where not all are, speed depends on which are chosen. With `routing=LOG` the weights are such that
any program's greedy decoding repeats the log: token n of the log has an id of its own, its
embedding is large beside what layers add to it, routers map it to the experts that the log names,
and the output layer maps it to the id of token n + 1. States of one token are nearly the same in
all layers, so that forecasts from an earlier layer would always be right: such a model compares
systems that forecast nothing.

Shape suffixes: N tokens of the log, L layers, K experts of a token, E experts, D hidden size.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3MoeConfig

from benchmarks.config import RandomConfig
from benchmarks.peers.fused import INDEX
from benchmarks.real_size.model import QWEN3_30B_A3B, RandomTensor, make_values
from benchmarks.reports import print_line
from predictors.config import require_at_least
from predictors.errors import MoecastError
from runtime.config import ModelConfig
from runtime.hf.forced_routing import require_fit
from runtime.sim.routing_log import read_routing_log
from runtime.store.model_source import resolve

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
ROUTED = "routed_tokens.json"
"""Ids of the log's tokens, in a checkpoint that repeats one."""
FIRST_TOKEN = 16
"""Id of a log's first token; special tokens come before it."""
EMBEDDING_SCALE = 32.0
"""Standard deviation of embeddings; what a layer adds has about 1."""
ROUTER_MARGIN = 4.0
"""A chosen expert's logit above the others'."""


def scaled_config(
    num_layers: int, least_tokens: int, *, top_k: int | None = None
) -> Qwen3MoeConfig:
    """Returns Qwen3-30B-A3B's configuration with fewer layers and tokens."""
    whole = dict(QWEN3_30B_A3B)
    if top_k is not None:
        whole["num_experts_per_tok"] = top_k
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


def repeat_log(
    experts_NLK: NDArray, model: Qwen3MoeConfig, generator: torch.Generator
) -> dict[str, Tensor]:
    """Returns the embeddings, routers and output of a model that repeats a log."""
    num_tokens = len(experts_NLK)
    ids_N = torch.arange(FIRST_TOKEN, FIRST_TOKEN + num_tokens)
    around = (model.vocab_size, model.hidden_size)
    embeddings = torch.empty(around).normal_(std=EMBEDDING_SCALE, generator=generator)
    normed_ND = embeddings[ids_N] / EMBEDDING_SCALE
    output = torch.empty(around).normal_(std=model.hidden_size**-0.5, generator=generator)
    output[ids_N.roll(-1)] = normed_ND
    # Rows that map each token's state to its experts, exactly: there are fewer tokens than sizes.
    inverse_DN = torch.linalg.pinv(normed_ND)
    tensors = {"model.embed_tokens.weight": embeddings, "lm_head.weight": output}
    for layer in range(model.num_hidden_layers):
        logits_NE = torch.zeros(num_tokens, model.num_experts)
        logits_NE.scatter_(1, torch.from_numpy(experts_NLK[:, layer]), ROUTER_MARGIN)
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = (inverse_DN @ logits_NE).T
    return {name: value.to(model.dtype).contiguous() for name, value in tensors.items()}


def choose_layers(experts_NLK: NDArray, num_layers: int) -> NDArray:
    """Returns the log of as many consecutive layers, from the middle of the model.

    Raises:
        MoecastError: the log has too few.
    """
    require_fit(experts_NLK, num_layers=num_layers, num_experts=QWEN3_30B_A3B["num_experts"])
    first = (experts_NLK.shape[1] - num_layers) // 2
    return experts_NLK[:, first : first + num_layers]


def write_checkpoint(
    model: Qwen3MoeConfig,
    folder: Path,
    *,
    seed: int,
    experts_NLK: NDArray | None = None,
    quiet: bool = False,
) -> None:
    """Writes configuration and random weights, a file for each layer, into a new folder.

    Args:
        experts_NLK: of a log that greedy decoding repeats.
        quiet: write no line for each file.
    """
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    own = {} if experts_NLK is None else repeat_log(experts_NLK, model, generator)
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
            name: own[name]
            if name in own
            else torch.cat([*make_values(RandomTensor(shape, model.dtype), generator)]).view(shape)
            for name, shape in named.items()
        }
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        if not quiet:
            print_line(f"{number + 1}/{len(shapes)} files")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}) + "\n")
    if experts_NLK is not None:
        ids = [*range(FIRST_TOKEN, FIRST_TOKEN + len(experts_NLK))]
        (folder / ROUTED).write_text(json.dumps(ids) + "\n")
    model.save_pretrained(folder)


def run_random(config: RandomConfig) -> None:
    """Writes the checkpoint.

    Raises:
        MoecastError: the folder exists, there are no layers, or the log does not fit.
    """
    require_at_least(config, num_layers=1)
    if config.output.exists():
        raise MoecastError(f"{config.output} exists; remove it or give another output=PATH")
    reference = resolve(ModelConfig())
    tokens = len(json.loads((reference / "tokenizer.json").read_text())["model"]["vocab"])
    experts_NLK = top_k = None
    if config.routing is not None:
        experts_NLK = choose_layers(read_routing_log(config.routing).experts_NLK, config.num_layers)
        top_k = experts_NLK.shape[2]
    partial = config.output.with_name(f"{config.output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    write_checkpoint(
        scaled_config(config.num_layers, tokens, top_k=top_k),
        partial,
        seed=config.seed,
        experts_NLK=experts_NLK,
    )
    for name in TOKENIZER_FILES:
        shutil.copy(reference / name, partial / name)
    partial.rename(config.output)
