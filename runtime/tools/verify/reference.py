"""The model that ours must equal, with every expert in memory or with one."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from predictors.units import MIB
from runtime.engine.one_by_one import OnDemandReader, attach_experts, load_parts
from runtime.store.extents import read_tensor_index
from runtime.store.model_source import is_weights

HEADROOM = 1.1
"""Of the weights' bytes: the largest tensors are there twice while the library joins experts."""
PROCESS_BYTES = 600 * MIB
"""Python, PyTorch and Transformers, and the activations of short prompts."""


def plain_bytes(folder: Path, dtype: str) -> int:
    """Memory that plain Transformers needs for this checkpoint."""
    target = None if dtype == "auto" else getattr(torch, dtype).itemsize
    extents = read_tensor_index(sorted(file for file in folder.iterdir() if is_weights(file.name)))
    weights = sum(
        extent.num_bytes * max(1, target // extent.dtype.itemsize) if target else extent.num_bytes
        for extent in extents.values()
    )
    return int(weights * HEADROOM) + PROCESS_BYTES


def load_lazy(folder: Path, dtype: str) -> PreTrainedModel:
    """The model with its own eager loop, over experts that are read one at a time.

    For models that do not fit in memory. It shares with what it checks where experts lie in the
    files, and nothing that decides which of them are kept, when they come or how they are added up.
    """
    model, layers, store = load_parts(folder, dtype)
    attach_experts(OnDemandReader(store), layers)
    model.set_experts_implementation("eager")
    return model
