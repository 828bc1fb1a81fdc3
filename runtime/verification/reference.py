"""The model that ours must equal, with every expert in memory or with one."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.hf.adapters.served import Served
from runtime.hf.layers import moe_layers
from runtime.loading import load_stripped
from runtime.models import is_weights
from runtime.store.base import Store, slot_bytes
from runtime.store.checkpoint import CheckpointStore
from runtime.store.extents import read_extents
from runtime.store.layout import ALIGNMENT

HEADROOM = 1.1
"""Of the weights' bytes: the largest tensors are there twice while the library joins experts."""
PROCESS_BYTES = 600 * 2**20
"""Python, PyTorch and Transformers, and the activations of short prompts."""


def plain_bytes(folder: Path, dtype: str) -> int:
    """Memory that plain Transformers needs for this checkpoint."""
    target = None if dtype == "auto" else getattr(torch, dtype).itemsize
    extents = read_extents(sorted(file for file in folder.iterdir() if is_weights(file.name)))
    weights = sum(
        extent.num_bytes * max(1, target // extent.dtype.itemsize) if target else extent.num_bytes
        for extent in extents.values()
    )
    return int(weights * HEADROOM) + PROCESS_BYTES


class OneByOne:
    """Reads an expert when it is asked for, and keeps none: no arena, no thread, no policy."""

    def __init__(self, store: Store):
        self._store = store
        # Two, so that an expert is still there while the next is being read.
        size = slot_bytes(store)
        self._slots = [aligned(size), aligned(size)]
        self._turn = 0

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        """The expert's parameters, valid until the next but one is asked for."""
        self._turn = 1 - self._turn
        slot = self._slots[self._turn]
        layout = self._store.layouts[layer]
        self._store.read(layer, expert, range(len(layout.chunk_bytes)), slot)
        return layout.weights(slot)

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, one after another."""
        for expert in wanted:
            yield expert, self.hold(layer, expert)


def aligned(num_bytes: int) -> Tensor:
    """Uninitialised bytes at an address that kernels like."""
    raw = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + num_bytes]


def load_lazy(folder: Path, dtype: str) -> PreTrainedModel:
    """The model with its own eager loop, over experts that are read one at a time.

    For models that do not fit in memory. It shares with what it checks where experts lie in the
    files, and nothing that decides which of them are kept, when they come or how they are added up.
    """
    model, banks = load_stripped(folder, dtype, torch.device("cpu"))
    layers = moe_layers(model)
    source = OneByOne(CheckpointStore(model, [banks[layer.name] for layer in layers]))
    for layer in layers:
        layer.kind.attach(layer.experts, Served(source, layer.index))
    model.set_experts_implementation("eager")
    return model
