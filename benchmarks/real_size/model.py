"""Writes a model of real size with random weights: packed int4 experts, everything else in bf16.

No checkpoint of the experts ever exists. Random integers are written as records of the packed
store, whose scales keep the variance of the activations, at the speed of the disk.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from predictors.errors import MoecastError
from predictors.files import sync_folder, write_atomic
from predictors.origin import package_version
from predictors.spec import config_hash
from runtime.commands.pack import choose_coding, find_unquantised
from runtime.config import BUILTIN_MODELS, ModelConfig, Quantise
from runtime.hf.loading import build_skeleton
from runtime.hf.strip import TAKEN
from runtime.store.base import as_memoryview
from runtime.store.checkpoint import assume_layout
from runtime.store.layout import ExpertLayout, Part, build_packed_layout
from runtime.store.model_check import CONFIG, read_json_object
from runtime.store.model_source import (
    WITHOUT_EXPERTS,
    describe_without_experts,
    has_no_experts,
    read_without_experts,
)
from runtime.store.packed.manifest import describe_contents
from runtime.store.packed.writer import Advance, write_store
from runtime.store.rewritten import write_tensors

DTYPE = "bfloat16"
MODEL_TYPE = "qwen3_moe"
WEIGHTS = "model.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": MODEL_TYPE,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "torch_dtype": DTYPE,
    "use_cache": True,
    "vocab_size": 151936,
}
"""config.json of Qwen/Qwen3-30B-A3B, without the ids of special tokens."""
PIECE = 1 << 22
"""Random numbers that are made at once."""
MEAN, VARIANCE = 7.5, (16**2 - 1) / 12
"""Mean and variance of 0..15, all equally likely."""
NUMBER_BYTES = 4
"""Scale and minimum of a block of Q4_1, float16."""


@dataclass(frozen=True, kw_only=True)
class RandomModel:
    """A model without its experts, and the packed store of these."""

    folder: Path
    store: Path


@dataclass(frozen=True)
class RandomTensor:
    """A tensor that is written before its values are known."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_shape(path: Path | None, *, top_k: int | None) -> dict[str, Any]:
    """Return the configuration of the model to make.

    Args:
        path: config.json of a Qwen3-MoE model; None: Qwen3-30B-A3B.
        top_k: experts per token in place of its own.

    Raises:
        MoecastError: no such file, or another kind of model.
    """
    if path is not None and not path.is_file():
        raise MoecastError(f"shape={path}: no such file; give the config.json of a Qwen3-MoE model")
    config = dict(QWEN3_30B_A3B) if path is None else read_json_object(path)
    if config.get("model_type") != MODEL_TYPE:
        raise MoecastError(
            f"shape={path}: model_type is {config.get('model_type')!r}, expected {MODEL_TYPE}: its "
            "dense weights have the names of the modules"
        )
    return config if top_k is None else {**config, "num_experts_per_tok": top_k}


def write_random_model(
    config: Mapping[str, Any], folder: Path, *, seed: int, advance: Advance = lambda _: None
) -> RandomModel:
    """Write the model, continue an interrupted run, or verify what is there.

    The same configuration and seed give the same bytes, on processors whose kernels take the same
    order of int4 weights.

    Args:
        advance: called with the number of experts done since the last call.

    Raises:
        MoecastError: no room, or something else stands there.
    """
    origin = {
        "model_id": f"random-{MODEL_TYPE}",
        "revision": sha256(json.dumps([config, seed], sort_keys=True).encode()).hexdigest(),
        "config_hash": config_hash(config),
    }
    model = RandomModel(folder=folder / "model", store=folder / "experts")
    if not model.folder.exists():
        write_dense_part(config, model.folder, origin=origin, seed=seed)
    if not has_no_experts(model.folder) or read_without_experts(model.folder)["origin"] != origin:
        raise MoecastError(
            f"{model.folder} is another model; remove {folder} or choose another work=FOLDER"
        )
    skeleton = build_skeleton(model.folder, dtype=DTYPE)
    coding = choose_coding(Quantise.Q4_1)
    layouts = [
        build_packed_layout(assume_layout(vars(layer.experts)[TAKEN]), coding=coding)
        for layer in skeleton.layers
    ]
    if left := find_unquantised(layouts, coding):
        raise MoecastError(f"shape: blocks of {coding.block} do not divide {', '.join(left)}")
    contents = describe_contents(
        layouts,
        [layer.num_experts for layer in skeleton.layers],
        spec=skeleton.spec(model.folder, ModelConfig(id=str(model.folder), dtype=DTYPE)),
        # There never was a checkpoint to take samples of.
        fingerprint=origin["revision"],
        tool=package_version("moecast") or "not installed",
    )
    templates = [make_template(layout) for layout in layouts]

    def fill(layer: int, expert: int, record: Tensor) -> None:
        record.copy_(templates[layer])
        fill_integers(layouts[layer], record, np.random.SeedSequence([seed, layer, expert]))

    write_store(fill, contents, model.store, advance=advance)
    return model


def make_template(layout: ExpertLayout) -> Tensor:
    """Make a record whose scales keep the variance of random activations, all integers zero."""
    record = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    for part in layout.parts:
        scale = (VARIANCE * layout.shapes[part.parameter][-1]) ** -0.5
        numbers = torch.tensor([scale, -MEAN * scale]).half()
        view_blocks(part, record)[:, :NUMBER_BYTES] = numbers.view(torch.uint8)
    return record


def view_blocks(part: Part, record: Tensor) -> Tensor:
    """Return the blocks of Q4_1: scale, minimum, and integers, two to a byte."""
    block_bytes = part.coding.num_bytes(part.coding.block, torch.bfloat16)
    return record[part.offset : part.end].view(-1, block_bytes)


def fill_integers(layout: ExpertLayout, record: Tensor, seed: np.random.SeedSequence) -> None:
    """Replace the record's integers by random ones, 0 to 15."""
    generator = np.random.SFC64(seed)
    for part in layout.parts:
        place = view_blocks(part, record)[:, NUMBER_BYTES:]
        words = generator.random_raw(-(-place.numel() // 8))
        place.copy_(torch.from_numpy(words.view(np.uint8))[: place.numel()].view(place.shape))


def write_dense_part(
    config: Mapping[str, Any], folder: Path, *, origin: Mapping[str, str], seed: int
) -> None:
    """Write everything but the experts, atomically: configuration, tokenizer, random weights.

    The tokenizer is the reference model's: only the number of tokens matters.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    settings = {"do_sample": False, "transformers_version": transformers.__version__}
    for name, document in ((CONFIG, config), ("generation_config.json", settings)):
        write_atomic(partial / name, json.dumps(document, indent=1).encode())
    for name in TOKENIZER:
        shutil.copyfile(BUILTIN_MODELS / "qwen2_moe_tiny" / name, partial / name)
    model = build_skeleton(partial, dtype=DTYPE).model
    tensors = {
        name: RandomTensor(tuple(parameter.shape), parameter.dtype)
        for name, parameter in model.named_parameters()
    }
    generator = torch.Generator().manual_seed(seed)
    pieces = (
        as_memoryview(piece)
        for tensor in tensors.values()
        for piece in make_values(tensor, generator)
    )
    write_tensors(partial / WEIGHTS, tensors, pieces)
    record = describe_without_experts(partial, fingerprint=origin["revision"], origin=origin)
    write_atomic(partial / WITHOUT_EXPERTS, json.dumps(record, indent=1).encode())
    partial.replace(folder)
    sync_folder(folder.parent)


def make_values(tensor: RandomTensor, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield a tensor's values in pieces: vectors scale and are 1, matrices keep the variance."""
    num_values = math.prod(tensor.shape)
    for start in range(0, num_values, PIECE):
        piece = torch.ones(min(PIECE, num_values - start))
        if len(tensor.shape) > 1:
            piece.normal_(std=tensor.shape[-1] ** -0.5, generator=generator)
        yield piece.to(tensor.dtype)
