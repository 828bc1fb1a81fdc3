"""The reference model of a verification, and the prompts for both sides."""

from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedModel

from predictors.errors import MoecastError
from predictors.units import MIB
from runtime.config import ModelConfig, StoreConfig, VerifyModelConfig, VerifyReference
from runtime.engine.devices import primary_device
from runtime.engine.memory import available_memory_bytes
from runtime.hf.decode_step import apply_decode_threads
from runtime.hf.layers import find_moe_layers, find_top_k
from runtime.hf.loading import load_configured, load_plain, read_config, refuse_plain
from runtime.hf.tokens import load_tokenizer
from runtime.store.base import max_slot_bytes
from runtime.store.gguf.header import is_gguf
from runtime.store.integer_scheme import find_scheme
from runtime.store.model_check import has_tokenizer, list_weight_files, read_config_file
from runtime.store.model_source import resolve
from runtime.store.packed.store import open_store
from runtime.store.tensor_index import read_tensor_index

HEADROOM = 1.1
"""Factor on the weights' bytes: Transformers holds tensors twice while it fuses experts."""
PROCESS_BYTES = 600 * MIB
"""Python, PyTorch and Transformers, and the activations of short prompts."""


def plain_bytes(folder: Path, dtype: str) -> int:
    """Estimate the memory that plain Transformers needs for this checkpoint.

    Raises:
        CheckpointError: plain Transformers is no reference for it.
    """
    refuse_plain(folder)
    target = None if dtype == "auto" else getattr(torch, dtype).itemsize
    extents = read_tensor_index(list_weight_files(folder))
    weights = sum(
        extent.num_bytes * max(1, target // extent.dtype.itemsize) if target else extent.num_bytes
        for extent in extents.values()
    )
    return int(weights * HEADROOM) + PROCESS_BYTES


def require_memory(folder: Path, dtype: str, *, otherwise: str) -> None:
    """Refuse to load plain Transformers if it does not fit in memory.

    Raises:
        MoecastError: the message names needed and available bytes, and `otherwise` the way out.
    """
    needed, available = plain_bytes(folder, dtype), available_memory_bytes()
    if needed > available:
        raise MoecastError(
            f"plain Transformers needs {needed} bytes for all experts of {folder}, {available} are "
            f"available; {otherwise}"
        )


def load_plain_model(config: ModelConfig, device: torch.device) -> PreTrainedModel:
    """Load the model with Transformers, all experts in memory."""
    folder = resolve(config)
    model = load_plain(folder, dtype=config.dtype, decode_kernels=config.decode_kernels).to(device)
    layers = find_moe_layers(model)
    find_top_k(model, layers)
    experts = layers[0]
    num_bytes = sum(weight.nbytes for weight in experts.experts.parameters())
    apply_decode_threads(
        model, config.decode_threads, expert_bytes=num_bytes // experts.num_experts
    )
    return model


def load_lazy(config: ModelConfig) -> PreTrainedModel:
    """Load the model with its own eager loop over experts that are read one at a time.

    For models that do not fit in memory. It shares the index of experts in the files with the
    engine, but neither cache, transfers nor the order of summation.
    """
    stripped = load_configured(config)
    model = stripped.read_on_demand(stripped.open_store(decodes=True), config)
    model.set_experts_implementation("eager")
    return model


def load_stored(config: VerifyModelConfig) -> PreTrainedModel:
    """Load the model with the experts of a store or checkpoint, and the same kernels for integers.

    It shares neither cache nor transfers with the engine. All experts are in memory, or, with
    `reference=lazy`, none.
    """
    device = primary_device(config)
    stripped = load_configured(config.model, device)
    store = stripped.open_experts(
        config.store, stripped.spec(stripped.folder, config.model), [device]
    )
    is_lazy = config.reference is VerifyReference.LAZY
    keep_bytes = 0 if is_lazy else store.num_layers * store.num_experts * max_slot_bytes(store)
    return stripped.read_on_demand(store, config.model, keep_bytes=keep_bytes)


def has_integer_weights(folder: Path) -> bool:
    """Return whether the checkpoint has packed integers (GPTQ, AWQ, compressed-tensors)."""
    quantised = read_config_file(folder).get("quantization_config")
    return find_scheme(folder, quantised) is not None


def is_quantised(folder: Path, store: StoreConfig) -> bool:
    """Return whether experts are integers in memory: from a packed store, or the checkpoint's."""
    if is_gguf(folder):
        return True
    if store.path is None:
        return has_integer_weights(folder)
    packed = open_store(store.path, None)
    packed.close()
    return packed.is_quantised


RANDOM_LENGTHS = (7, 16, 33)
"""Tokens of the random prompts: below, at and above the block sizes of kernels."""
FIRST_TOKEN = 4
"""First random id: special tokens come before it."""


def token_prompts(folder: Path, prompts: list[str], *, seed: int) -> tuple[list[list[int]], str]:
    """Tokenize the prompts, or draw random ones for a model without a tokenizer.

    Returns:
        Token ids, and their description.

    Raises:
        MoecastError: a prompt has no tokens, or the model names no vocabulary size.
    """
    if has_tokenizer(folder):
        tokenizer = load_tokenizer(folder)
        tokens = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        for prompt, ids in zip(prompts, tokens, strict=True):
            if not ids:
                raise MoecastError(f"prompts: {prompt!r} has no tokens")
        return tokens, f"{len(tokens)} prompts as text"
    config = read_config(folder).to_dict()
    parts = (config, config.get("text_config") or {}, config.get("llm_config") or {})
    size = next((part["vocab_size"] for part in parts if part.get("vocab_size")), None)
    if size is None:
        raise MoecastError("config.json has no vocab_size, and the model has no tokenizer")
    random = Random(seed)
    tokens = [
        [random.randrange(FIRST_TOKEN, size) for _ in range(length)] for length in RANDOM_LENGTHS
    ]
    return (
        tokens,
        f"{len(tokens)} prompts of random tokens, seed {seed} (the model has no tokenizer)",
    )
