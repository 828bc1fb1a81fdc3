"""A model whose experts are read when they are asked for, by whoever asks: no budget, no thread."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from runtime.engine.loading import load_stripped
from runtime.hf.adapters.base import ExpertSource, LayerExperts
from runtime.hf.layers import MoeLayer, moe_layers
from runtime.store.base import ExpertStore, max_slot_bytes
from runtime.store.checkpoint import CheckpointStore
from runtime.store.layout import ALIGNMENT


class OnDemandReader:
    """Reads an expert when it is asked for: no arena, no thread, no policy.

    With `keep_bytes`, the first experts that fit stay in memory; the others are never kept.
    """

    def __init__(self, store: ExpertStore, *, keep_bytes: int = 0):
        self._store = store
        self._size = max_slot_bytes(store)
        # Two, so that an expert is still there while the next is being read.
        self._slots = [allocate_aligned(self._size), allocate_aligned(self._size)]
        self._turn = 0
        self._room = keep_bytes // self._size
        self._kept: dict[tuple[int, int], Tensor] = {}

    def hold(self, layer: int, expert: int) -> dict[str, Tensor]:
        """The expert's parameters, valid until the next but one is asked for."""
        layout = self._store.layouts[layer]
        slot = self._kept.get((layer, expert))
        if slot is None:
            slot = self._free_slot(layer, expert)
            self._store.read(layer, expert, range(len(layout.chunk_bytes)), slot)
        return layout.weights(slot)

    def _free_slot(self, layer: int, expert: int) -> Tensor:
        if len(self._kept) < self._room:
            return self._kept.setdefault((layer, expert), allocate_aligned(self._size))
        self._turn = 1 - self._turn
        return self._slots[self._turn]

    def ready(self, layer: int, wanted: list[int]) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The wanted experts, one after another."""
        for expert in wanted:
            yield expert, self.hold(layer, expert)


def allocate_aligned(num_bytes: int) -> Tensor:
    """Uninitialised bytes at an address that kernels like."""
    raw = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + num_bytes]


def load_parts(folder: Path, dtype: str) -> tuple[PreTrainedModel, list[MoeLayer], CheckpointStore]:
    """The model on the CPU without its experts, its layers with experts, and where these are."""
    model, banks = load_stripped(folder, dtype, torch.device("cpu"))
    layers = moe_layers(model)
    return model, layers, CheckpointStore(model, [banks[layer.name] for layer in layers])


def attach_experts(source: ExpertSource, layers: Sequence[MoeLayer]) -> None:
    """Lets the layers compute with the experts of `source`."""
    for layer in layers:
        layer.kind.attach(layer.experts, LayerExperts(source, layer.index))
