"""A source of experts without arena, threads and policy: it reads each request."""

from collections.abc import Iterator

from torch import Tensor

from runtime.store.base import ExpertStore, allocate_aligned, max_slot_bytes
from runtime.store.files import ALIGNMENT
from runtime.store.ggml.matrix import ExpertWeights


class OnDemandReader:
    """Reads each expert when it is requested, on the thread that requests it.

    With `keep_bytes`, the first experts that fit stay in memory; the others are never kept.
    """

    def __init__(self, store: ExpertStore, *, keep_bytes: int = 0):
        self._store = store
        self._slot_bytes = max_slot_bytes(store)
        # Two, so that an expert stays valid while the next is being read.
        self._slots = [allocate_aligned(self._slot_bytes, ALIGNMENT) for _ in range(2)]
        self._current = 0
        self._max_kept = keep_bytes // self._slot_bytes
        self._kept: dict[tuple[int, int], Tensor] = {}

    def pin(self, layer: int, expert: int) -> ExpertWeights:
        """Return the expert's parameters, valid until the next but one is requested."""
        layout = self._store.layouts[layer]
        slot = self._kept.get((layer, expert))
        if slot is None:
            is_kept = len(self._kept) < self._max_kept
            if is_kept:
                slot = allocate_aligned(self._slot_bytes, ALIGNMENT)
            else:
                self._current = 1 - self._current
                slot = self._slots[self._current]
            self._store.read(layer, expert, range(len(layout.chunk_bytes)), slot)
            if is_kept:
                self._kept[layer, expert] = slot
        return layout.weights(slot)

    def ready(self, layer: int, wanted: list[int]) -> Iterator[dict[int, ExpertWeights]]:
        for expert in wanted:
            yield {expert: self.pin(layer, expert)}
