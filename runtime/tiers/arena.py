"""The last tier: one allocation of fixed size, cut into slots."""

import torch
from torch import Tensor

from runtime.store.layout import ALIGNMENT, SlotLayout


class Arena:
    """Allocated once; a slot's parameters are views of it, made once."""

    def __init__(self, layout: SlotLayout, num_slots: int):
        raw = torch.empty(num_slots * layout.num_bytes + ALIGNMENT, dtype=torch.uint8)
        start = -raw.data_ptr() % ALIGNMENT
        self._slots = raw[start : start + num_slots * layout.num_bytes].view(num_slots, -1)
        self._views = [layout.views(slot) for slot in self._slots]
        self.num_bytes = num_slots * layout.num_bytes

    def slot(self, index: int) -> Tensor:
        """The slot's bytes, uint8 `(layout.num_bytes,)`."""
        return self._slots[index]

    def weights(self, index: int) -> dict[str, Tensor]:
        """The slot as an expert's parameters, without the leading expert dimension."""
        return self._views[index]
