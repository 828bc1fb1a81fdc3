"""The reference model of a verification, and the prompts for both sides."""

import json
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from predictors.errors import MoecastError
from predictors.units import MIB
from runtime.hf.layers import attach_experts
from runtime.hf.loading import load_stripped
from runtime.store.model_source import is_weights
from runtime.store.on_demand import OnDemandReader
from runtime.store.tensor_index import read_tensor_index

HEADROOM = 1.1
"""Factor on the weights' bytes: Transformers holds tensors twice while it fuses experts."""
PROCESS_BYTES = 600 * MIB
"""Python, PyTorch and Transformers, and the activations of short prompts."""


def plain_bytes(folder: Path, dtype: str) -> int:
    """Estimate the memory that plain Transformers needs for this checkpoint."""
    target = None if dtype == "auto" else getattr(torch, dtype).itemsize
    extents = read_tensor_index(sorted(file for file in folder.iterdir() if is_weights(file.name)))
    weights = sum(
        extent.num_bytes * max(1, target // extent.dtype.itemsize) if target else extent.num_bytes
        for extent in extents.values()
    )
    return int(weights * HEADROOM) + PROCESS_BYTES


def load_lazy(folder: Path, dtype: str) -> PreTrainedModel:
    """Load the model with its own eager loop over experts that are read one at a time.

    For models that do not fit in memory. It shares the index of experts in the files with the
    engine, but neither cache, transfers nor the order of summation.
    """
    stripped = load_stripped(folder, dtype)
    attach_experts(stripped.layers, OnDemandReader(stripped.open_store()))
    stripped.model.set_experts_implementation("eager")
    return stripped.model


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "sentencepiece.bpe.model",
    "spiece.model",
)
RANDOM_LENGTHS = (7, 16, 33)
"""Tokens of the random prompts: below, at and above the block sizes of kernels."""
FIRST_TOKEN = 4
"""First random id: special tokens come before it."""


def token_prompts(folder: Path, prompts: list[str], *, seed: int) -> tuple[list[list[int]], str]:
    """Tokenize the prompts, or draw random ones for a model without a tokenizer.

    Returns:
        Token ids, and their description.

    Raises:
        MoecastError: a prompt has no tokens.
    """
    if any((folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = [list(tokenizer(prompt)["input_ids"]) for prompt in prompts]
        for prompt, ids in zip(prompts, tokens, strict=True):
            if not ids:
                raise MoecastError(f"prompts: {prompt!r} has no tokens")
        return tokens, f"{len(tokens)} prompts as text"
    vocabulary = vocabulary_size(json.loads((folder / "config.json").read_text()))
    random = Random(seed)
    tokens = [
        [random.randrange(FIRST_TOKEN, vocabulary) for _ in range(length)]
        for length in RANDOM_LENGTHS
    ]
    return (
        tokens,
        f"{len(tokens)} prompts of random tokens, seed {seed} (the model has no tokenizer)",
    )


def vocabulary_size(config: dict[str, Any]) -> int:
    """Read the vocabulary size from a `config.json`.

    Raises:
        MoecastError: it has none.
    """
    for part in (config, config.get("text_config"), config.get("llm_config")):
        if isinstance(part, dict) and isinstance(part.get("vocab_size"), int):
            return part["vocab_size"]
    raise MoecastError("config.json has no vocab_size, and the model has no tokenizer")
