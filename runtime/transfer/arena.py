"""The memory of one tier: one allocation of fixed size, divided into slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.store.base import ExpertLayout


class Arena:
    """A fixed allocation of slots; views of parameters are made once per slot.

    Args:
        layouts: of each layer; a slot holds the largest.
        pinned: allocate pinned memory, which a device copies without the CPU.
    """

    def __init__(
        self,
        layouts: Sequence[ExpertLayout],
        num_slots: int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ):
        size = max(layout.num_bytes for layout in layouts)
        alignment = max(layout.alignment for layout in layouts)
        raw = torch.empty(
            num_slots * size + alignment, dtype=torch.uint8, device=device, pin_memory=pinned
        )
        start = -raw.data_ptr() % alignment
        self._slots = raw[start : start + num_slots * size].view(num_slots, size)
        self._layouts = layouts
        self._weights: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.num_slots = num_slots
        self.num_bytes = num_slots * size

    def slot(self, index: int) -> Tensor:
        """The slot's bytes, uint8."""
        return self._slots[index]

    def chunk_ranges(self, layer: int) -> Sequence[Sequence[tuple[int, int]]]:
        """The parts of a slot that each chunk of the layer's experts takes."""
        return self._layouts[layer].chunk_ranges

    def weights(self, layer: int, index: int) -> dict[str, Tensor]:
        """The slot as parameters of one of the layer's experts, without the expert dimension."""
        layout = self._layouts[layer]
        if not layout.views_are_weights:
            return layout.weights(self._slots[index])
        known = self._weights.get((layer, index))
        if known is None:
            known = self._weights[layer, index] = layout.weights(self._slots[index])
        return known
